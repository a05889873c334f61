"""StreamingSVD: near the best error for any batches, order and merges, and within the bound that it states."""

import copy
import io
import pickle

import numpy as np
import pytest
import scipy.sparse
import torch
from matrices import DTYPES, LAYOUTS, MatrixFree, assert_orthonormal, assert_positive_peaks, gaussian, with_spectrum
from ranks import on_ranks
from sklearn.datasets import load_digits, load_sample_image
from sklearn.decomposition import PCA
from tolerances import factorisation

from panther.errors import DistributedError, DTypeError, FormatError, ShapeError
from panther.linalg import StreamingSVD

N = 120
SPECTRA = {
    "polynomial": torch.arange(1.0, N + 1) ** -1,
    "slow": torch.arange(1.0, N + 1) ** -0.5,
    "exponential": 10 ** (-0.1 * torch.arange(float(N))),
    "step": torch.cat((torch.ones(10), torch.full((N - 10,), 0.3))),
    "clusters": torch.cat((torch.ones(20), torch.full((N - 20,), 0.1))),
}


def digits():
    return torch.tensor(load_digits().data)


def photograph():
    return torch.tensor(load_sample_image("china.jpg"), dtype=torch.float64).mean(2) / 255


def streamed(batches, n, k, **options):
    stream = StreamingSVD(n, k, **{"dtype": torch.float64, **options})
    for batch in batches:
        stream.update(batch)
    return stream


def merged(streams):
    while len(streams) > 1:
        for first, second in zip(streams[::2], streams[1::2], strict=False):
            first.merge(second)
        streams = streams[::2]
    return streams[0]


def error_of(A, V):
    return torch.linalg.norm(A - (A @ V) @ V.mT)


def check_against(A, stream, excess):
    """The errors of SVD and PCA near the least ones, and between the bounds that are stated."""
    k = stream.k
    for X, V, centred in ((A, stream.svd()[1], False), (A - A.mean(0), stream.pca().V, True)):
        sigma, error, bound = torch.linalg.svdvals(X), error_of(X, V), stream.error(centred=centred)
        rounding = 1e-10 * X.norm()
        assert error <= excess * sigma[k:].norm() + rounding
        assert error <= bound.upper + rounding
        assert bound.upper <= 1.05 * error + rounding
        assert (bound.upper.square() - k * stream.shrinkage).clamp_min(0).sqrt() <= sigma[k:].norm() + rounding
        assert stream.shrinkage <= sigma[k:].square().sum() / (stream.sketch_size / 2 + 1 - k) + rounding
        assert_orthonormal(V)
        assert_positive_peaks(V)
    squares, sigma = stream.svd()[0].square(), torch.linalg.svdvals(A)[:k].square()
    assert bool((squares <= sigma * (1 + 1e-10)).all())
    assert bool((sigma <= squares + stream.shrinkage + 1e-10 * sigma[0]).all())


@pytest.mark.parametrize(("size", "excess"), [(2, 1.01), (4, 1.001)])
@pytest.mark.parametrize("name", ["photograph", "digits", *SPECTRA])
def test_one_pass_is_near_the_best_error(name, size, excess):
    real = {"photograph": (photograph, 40), "digits": (digits, 10)}
    make, k = real.get(name) or (lambda: with_spectrum(400, N, SPECTRA[name]), 10)
    for A in [make()]:
        n = A.shape[1]
        check_against(A, streamed(A.split(97), n, k, sketch_size=size * k), excess)
        parts = [streamed([part], n, k, sketch_size=size * k) for part in A.chunk(8)]
        check_against(A, merged(parts), excess)


def test_any_number_of_merges():
    A = digits()
    for parts in (A.chunk(100), A[torch.arange(len(A)).remainder(7).argsort()].chunk(5)):
        one_by_one = streamed([], 64, 10)
        for part in parts:
            one_by_one.merge(streamed([part], 64, 10))
        for stream in (one_by_one, merged([streamed([part], 64, 10) for part in parts])):
            assert stream.num_rows == len(A)
            check_against(A, stream, 1.01)


def test_orders_that_are_hard():
    """Sorted rows, directions that come one after the other, and one that is always the weakest of its batch."""
    X, y = load_digits(return_X_y=True)
    eye = torch.eye(80, dtype=torch.float64)
    hidden = torch.cat((10 * eye[:40], eye[50:51].expand(2000, -1), eye[51:52].expand(1000, -1)))
    for A in (torch.tensor(X[y.argsort(kind="stable")]), hidden, eye[:60].repeat_interleave(20, 0)):
        stream = streamed(A.split(100), A.shape[1], 10)
        assert error_of(A, stream.svd()[1]) <= 1.01 * torch.linalg.svdvals(A)[10:].norm()
        assert error_of(A, stream.svd()[1]) <= stream.error().upper * (1 + 1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_of_any_size_give_bitwise_equal_results(dtype):
    A = gaussian(203, 30, dtype=dtype) + 5
    streams = [streamed(A.split(size), 30, 4, dtype=dtype) for size in (1, 7, 203)]
    streams.append(streamed([A[:0], A[:90], A[90:90], A[90:]], 30, 4, dtype=dtype))
    for stream in streams[1:]:
        assert stream.num_rows == 203
        assert all(torch.equal(a, b) for a, b in zip(stream.pca(), streams[0].pca(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(stream.svd(), streams[0].svd(), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(60, 20), (200, 20), (15, 40), (1, 5), (40, 1), (2, 2)])
def test_nothing_is_lost_where_the_rows_kept_are_enough(dtype, shape):
    """Fewer columns or rows than are kept: S and V are those of a direct SVD, for a condition of 1e12 too."""
    rank = min(shape)
    for sigma in (torch.ones(rank), torch.logspace(0, -12, rank), torch.zeros(rank), torch.eye(rank)[0]):
        A = with_spectrum(*shape, sigma.double(), dtype)
        stream = streamed(A.split(9), shape[1], rank, dtype=dtype)
        S = torch.linalg.svdvals(A.double())
        S_k, V = stream.svd()
        assert (S_k - S).abs().max() <= factorisation(dtype) * max(1.0, float(S[0]))
        assert_orthonormal(V)
        assert stream.shrinkage <= 1e-12
        assert stream.error().upper <= factorisation(dtype) * max(1.0, float(S[0]))
        variance = torch.linalg.svdvals(A.double() - A.double().mean(0)).square()[:rank] / max(1, shape[0] - 1)
        assert (stream.pca().variance - variance).abs().max() <= factorisation(dtype)
        assert_orthonormal(stream.pca().V)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pca_equals_scikit_learn(dtype):
    """Also where the mean is far larger than the spread."""
    A = gaussian(500, 12) * torch.logspace(0, -1, 12) + 1e3
    A = A.to(dtype)
    reference = PCA(5, svd_solver="full").fit(A.double().numpy())
    stream = streamed(A.split(33), 12, 6, dtype=dtype)
    V, variance, ratio, mean = stream.pca(5)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-10  # of the entries' rounding, 1e3 eps, before the spread
    assert np.allclose(mean, reference.mean_, rtol=torch.finfo(dtype).eps * 4)
    assert np.allclose(variance, reference.explained_variance_, rtol=tolerance)
    assert np.allclose(ratio, reference.explained_variance_ratio_, rtol=tolerance)
    assert np.allclose((V.mT.double() @ torch.tensor(reference.components_).mT).abs(), np.eye(5), atol=tolerance)
    coordinates = stream.transform(A, 5)
    assert torch.allclose(coordinates.var(0), variance, rtol=max(tolerance, 1e-4))
    assert torch.allclose(stream.transform(A)[:, :5], coordinates, atol=tolerance)  # other sizes round otherwise


def test_every_way_to_hold_rows():
    A = gaussian(70, 20)
    expected = streamed([A], 20, 3)
    kinds = {name: hold for name, hold in LAYOUTS.items() if name != "matrix-free"}
    kinds |= {"scipy": lambda A: scipy.sparse.coo_array(A.numpy()), "scipy csc": lambda A: scipy.sparse.csc_matrix(A)}
    for hold in kinds.values():
        stream = streamed([hold(A[:33]), hold(A[33:])], 20, 3)
        assert torch.allclose(stream.svd()[0], expected.svd()[0], rtol=1e-12)
        assert torch.allclose(stream.transform(hold(A)), expected.transform(A), atol=1e-10)
        assert not stream.svd()[1].requires_grad
    for half in (torch.float16, torch.bfloat16):
        stream = streamed([A.to(half)], 20, 3, dtype=torch.float32)
        assert torch.equal(stream.svd()[0], streamed([A.to(half).float()], 20, 3, dtype=torch.float32).svd()[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(streamed([A], 20, 3).svd()[1], expected.svd()[1])


def test_a_state_continues_bitwise():
    A = gaussian(150, 20)
    for first in (0, 3, 12, 77):
        stream = streamed([A[:first]], 20, 3)
        file = io.BytesIO()
        torch.save(stream.state_dict(), file)
        file.seek(0)
        resumed = StreamingSVD(20, 3, dtype=torch.float64)
        resumed.update(A[-9:])
        resumed.load_state_dict(torch.load(file, weights_only=True))
        copies = [stream, resumed, copy.deepcopy(stream), pickle.loads(pickle.dumps(stream))]
        for one in copies:
            one.update(A[first:])
            assert torch.equal(one.pca().V, stream.pca().V)
            assert one.num_rows == 150
            assert one.error() == stream.error()


def test_bad_states_change_nothing():
    stream = streamed([gaussian(30, 5)], 5, 2)
    expected, state = stream.svd()[1], stream.state_dict()
    wrong = [
        {},
        {"rows": None},
        dict.fromkeys(state),
        {**state, "mean": state["mean"].float()},
        {**state, "mean": state["mean"][:3]},
        {**state, "rows": state["rows"][:-1]},
        {**state, "rows": state["rows"] * torch.nan},
        {**state, "rows": state["rows"].tolist()},
        {**state, "numbers": -state["numbers"]},
        {**state, "numbers": state["numbers"][:-1]},
        streamed([gaussian(30, 5)], 5, 1).state_dict(),
        streamed([gaussian(30, 5).float()], 5, 2, dtype=torch.float32).state_dict(),
    ]
    for bad in wrong:
        with pytest.raises(FormatError, match=r"the state must be that of a StreamingSVD\(5, 2, sketch_size=4"):
            stream.load_state_dict(bad)
    assert torch.equal(stream.svd()[1], expected)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.ones(2, 4), ShapeError, r"rows, of shape \(2, 4\), must have the 3 columns"),
        (torch.ones(3), ShapeError, "two dimensions"),
        (torch.ones(2, 2, 3), ShapeError, "two dimensions"),
        (torch.ones(2, 3, dtype=torch.int64), DTypeError, "int64 and must be real"),
        (torch.ones(2, 3, dtype=torch.float64), DTypeError, "float64 and the summary torch.float32: use Streaming"),
        (torch.full((2, 3), torch.nan), ValueError, "rows must be finite and has NaN"),
        (torch.full((2, 3), torch.inf).to_sparse(), ValueError, "rows must be finite and has infinity"),
        (torch.full((2, 3), 1e35), ValueError, "entry of 1e.35, above 2.100: divide all rows"),
        (MatrixFree(torch.ones(2, 3)), TypeError, "has products and no entries"),
        ([[1.0, 2.0, 3.0]], TypeError, "rows must be a tensor"),
    ],
)
def test_bad_rows_change_nothing(rows, error, message):
    stream = streamed([torch.eye(3)], 3, 1, dtype=torch.float32)
    with pytest.raises(error, match=message):
        stream.update(rows)
    assert stream.num_rows == 3


def test_bad_arguments():
    for arguments, error, message in [
        ((3, 4), ShapeError, "k=4 must be at most n=3"),
        ((3, 0), ShapeError, "k=0 must be at least 1"),
        ((0, 1), ShapeError, "n=0 must be at least 1"),
        ((3.0, 1), TypeError, "n must be an integer"),
    ]:
        with pytest.raises(error, match=message):
            StreamingSVD(*arguments)
    with pytest.raises(ShapeError, match="sketch_size=3 must be at least 2 k = 4"):
        StreamingSVD(5, 2, sketch_size=3)
    with pytest.raises(DTypeError, match=r"dtype=torch.float16 must be float32 or float64"):
        StreamingSVD(5, 2, dtype=torch.float16)
    stream = streamed([gaussian(1, 5)], 5, 2)
    for call in (stream.svd, stream.pca, stream.error, lambda: stream.transform(gaussian(2, 5)), lambda: stream.svd(3)):
        with pytest.raises(ShapeError, match="must be at most 1, as the summary was made for k=2 and has 1 rows"):
            call()
    empty = StreamingSVD(5, 2)
    assert empty.svd(0)[1].shape == empty.pca(0).V.shape == (5, 0)
    with pytest.raises(TypeError, match="other must be a StreamingSVD, not Tensor: use update"):
        stream.merge(torch.eye(5))
    with pytest.raises(
        ShapeError, match=r"are \(5, 2, 4, torch.float64\) here and \(5, 1, 2, torch.float32\) in other"
    ):
        stream.merge(StreamingSVD(5, 1))


@pytest.mark.distributed
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_all_ranks_get_one_summary_of_all_rows(n_ranks):
    """One rank has no rows, the summary of the rank stays, and a later call has later rows as well."""

    def work():
        rank = torch.distributed.get_rank()
        A, n_ranks = digits(), torch.distributed.get_world_size()
        stream = streamed(A[rank :: max(1, n_ranks - 1)].split(50) if rank < max(1, n_ranks - 1) else [], 64, 10)
        num_rows = stream.num_rows
        stream.all_reduce()
        total = stream.all_reduce()
        assert stream.num_rows == num_rows
        total.update(A[:5])
        assert torch.equal(
            stream._pending[: stream._num_pending], copy.deepcopy(stream)._pending[: stream._num_pending]
        )
        return stream.all_reduce().state_dict(), total.num_rows

    results = on_ranks(work, n_ranks)
    A = digits()
    assert {num_rows for _, num_rows in results} == {len(A) + 5}
    for state, _ in results:
        assert all(torch.equal(state[name], results[0][0][name]) for name in state)
    stream = StreamingSVD(64, 10, dtype=torch.float64)
    stream.load_state_dict(results[0][0])
    check_against(A, stream, 1.01)


@pytest.mark.distributed
def test_ranks_with_different_sizes_are_told():
    def work():
        stream = StreamingSVD(5, 1 + torch.distributed.get_rank())
        with pytest.raises(DistributedError, match=r"settings must be equal on all ranks.*rank 1: StreamingSVD\(5, 2"):
            stream.all_reduce()

    on_ranks(work, 2)


def test_one_process_needs_no_group():
    stream = streamed([gaussian(33, 8)], 8, 2)
    total = stream.all_reduce()
    total.update(gaussian(33, 8, seed=1))
    assert (stream.num_rows, total.num_rows) == (33, 66)
    assert torch.equal(stream.svd()[0], streamed([gaussian(33, 8)], 8, 2).svd()[0])

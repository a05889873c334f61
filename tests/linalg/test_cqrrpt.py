"""Pivoted QR: orthonormal, triangular, of the right rank, whatever M is."""

import contextlib
import importlib
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from fuzzing import fuzz, is_a_sentence
from hypothesis import given
from hypothesis import strategies as st
from tolerances import factorisation

import panther.linalg._cqrrpt as module
from panther.errors import DTypeError, PantherError, ShapeError
from panther.linalg import CQRRPTResult, ErrorEstimate, cqrrpt, estimate_error
from panther.sketch import SparseSketch

DTYPES = [torch.float64, torch.float32]
# The diagonal of R may rise by the distortion of the sketch, which is 18 for gamma = 1.25 and many columns.
RISE = 20


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Torch's threads and those of scipy's BLAS wait for each other where cores are shared: up to 20 times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        limits = importlib.import_module("threadpoolctl").threadpool_limits(1)  # it comes with scikit-learn
    except ModuleNotFoundError:
        limits = contextlib.nullcontext()
    with limits:
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["as users have it", "always sketched"])
def path(request, monkeypatch):
    """Small matrices go to LAPACK; the sketch must be right on them too."""
    if request.param == "always sketched":
        monkeypatch.setattr(module, "_pays", lambda M, d: d < len(M))


@pytest.fixture
def sketched(monkeypatch):
    monkeypatch.setattr(module, "_pays", lambda M, d: d < len(M))


def check(M, result, rtol=None):
    """The contract; returns the rank."""
    (m, n), (Q, R, P) = M.shape, result
    dtype = M.dtype if M.dtype == torch.float64 else torch.float32
    eps, r = torch.finfo(dtype).eps, Q.shape[1]
    rtol = eps * min(max(m, n), 10 * n) if rtol is None else rtol
    assert Q.shape == (m, r)
    assert R.shape == (r, n)
    assert r <= min(m, n)
    assert Q.dtype == R.dtype == dtype
    assert P.dtype == torch.int64
    assert torch.equal(P.sort()[0], torch.arange(n))
    assert torch.equal(R, R.triu())
    assert not Q.requires_grad
    assert not R.requires_grad
    exponent = -math.frexp(M.double().abs().max().item())[1] if M.numel() else 0
    M, Q, R = (2.0 ** (exponent // 2) * M.double()) * 2.0 ** (exponent - exponent // 2), Q.double(), R.double()
    R = (2.0 ** (exponent // 2) * R) * 2.0 ** (exponent - exponent // 2)
    diagonal = R.diagonal()
    assert bool((diagonal > rtol * R[:1, :1].sum()).all())
    if r and rtol >= eps:
        later = diagonal.flip(0).cummax(0)[0].flip(0)
        assert bool((later <= RISE * diagonal).all())
    loss = torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(r, dtype=Q.dtype), 2) if r else 0
    assert loss <= factorisation(dtype)
    cut = RISE * math.sqrt(n) * rtol * R[0, 0] if 0 < r < min(m, n) else 0
    assert (M[:, P] - Q @ R).norm() <= factorisation(dtype) * M.norm() + cut
    return r


def matrix(m, n, singular_values, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k = len(singular_values)
    U, V = (torch.linalg.qr(torch.randn(size, k, generator=generator, dtype=torch.float64))[0] for size in (m, n))
    return (U * torch.as_tensor(singular_values, dtype=torch.float64) @ V.mT).to(dtype)


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


SHAPES = [(1, 1), (2, 2), (100, 1), (3, 10), (1, 7), (7, 1), (40, 40), (20, 3), (200, 50), (280, 250), (50, 300)]
SHAPES += [(700, 90), (5000, 20)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape(dtype, path):
    """Those of 100 x 1, 3 x 10 and 2 x 2 crash the peer, and well-conditioned float32 input misleads its rank."""
    for shape in SHAPES:
        M = randn(*shape, dtype=dtype)
        original = M.clone()
        assert check(M, cqrrpt(M, seed=1)) == min(shape)
        assert torch.equal(M, original)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_and_zero(dtype, path):
    for shape in [(0, 0), (0, 5), (5, 0), (3, 4), (90, 40), (1, 1)]:
        M = torch.zeros(shape, dtype=dtype)
        result = cqrrpt(M, seed=1)
        assert check(M, result) == 0
        assert torch.equal(result.Q @ result.R, M)
        assert torch.equal(result @ torch.ones(shape[1], dtype=dtype), torch.zeros(shape[0], dtype=dtype))


@pytest.mark.parametrize("gamma", [1, 1.25, 3])
def test_conditions_up_to_1e14(gamma, path):
    for shape in [(600, 40), (300, 80), (30, 60)]:
        for condition in [1, 1e7, 1e12, 1e14]:
            n = min(shape)
            M = matrix(*shape, np.geomspace(1, 1 / condition, n))
            r = check(M, cqrrpt(M, gamma, seed=1))
            assert r == n or condition > 1 / (10 * shape[1] * 2.2e-16)
            assert r >= 0.85 * n
            assert check(M, cqrrpt(M, gamma, rtol=0, seed=1), rtol=0) == n


def test_conditions_in_float32(path):
    for shape in [(600, 40), (200, 70), (80, 60), (30, 60)]:
        for condition in [1, 1e2, 1e4]:
            M = matrix(*shape, np.geomspace(1, 1 / condition, min(shape)), torch.float32)
            assert check(M, cqrrpt(M, seed=1)) == min(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_of_moderate_condition_is_never_truncated(dtype, path):
    """Nor where max(m, n) eps, the usual tolerance, is far above its least singular value."""
    for shape in [(20000, 20), (3000, 40), (300, 60)]:
        smallest = 10 * shape[1] * torch.finfo(dtype).eps
        singular_values = np.ones(shape[1])
        singular_values[1:] = 1.05 * smallest
        for seed in range(3):
            M = matrix(*shape, singular_values, dtype, seed=seed)
            assert check(M, cqrrpt(M, seed=seed)) == shape[1]


def deficient(dtype):
    """Matrices with their rank."""
    for (m, n), r in (((400, 60), 1), ((400, 60), 23), ((300, 80), 79), ((30, 70), 11), ((90, 90), 45), ((64, 8), 3)):
        yield randn(m, r, dtype=dtype) @ randn(r, n, dtype=dtype, seed=1), r
        integers = (2 * randn(m, r)).round() @ (2 * randn(r, n, seed=1)).round()
        yield integers.to(dtype), int(np.linalg.matrix_rank(integers.numpy()))
        M = randn(m, n, dtype=dtype)
        M[:, r:] = M[:, torch.arange(n - r) % r]
        yield M, min(r, m)
        M = randn(m, n, dtype=dtype)
        M[:, torch.randperm(n, generator=torch.Generator().manual_seed(0))[r:]] = 0
        yield M, min(r, m)
    yield torch.ones(500, 30, dtype=dtype), 1
    M = torch.zeros(500, 30, dtype=dtype)
    M[77, 3] = 5
    yield M, 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", [1, 1.25, 2])
def test_exact_deficiency(dtype, gamma, path):
    """The peer's rank is wrong on these, and so is its factorisation."""
    for M, rank in deficient(dtype):
        assert check(M, cqrrpt(M, gamma, seed=1)) == rank


def test_the_diagonal_reveals_the_singular_values(path):
    singular_values = np.geomspace(1, 1e-10, 80)
    M = matrix(900, 80, singular_values)
    ratio = cqrrpt(M, seed=1).R.diagonal().numpy() / singular_values
    assert ratio.max() < 10
    assert ratio.min() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_and_wide_matrices_are_those_of_lapack(dtype):
    for shape in [(60, 40), (30, 70), (50, 50), (2000, 30)]:
        M = randn(*shape, dtype=dtype)
        Q, R, P = cqrrpt(M, seed=1)
        expected_q, expected_r, expected_p = scipy.linalg.qr(M.numpy(), mode="economic", pivoting=True)
        assert np.array_equal(P, expected_p)
        assert np.allclose(abs(R), abs(expected_r), atol=1e-5)
        assert np.allclose(abs(Q), abs(expected_q), atol=1e-5)


def test_a_large_matrix_is_sketched_with_gamma_n_rows(monkeypatch):
    sizes = []

    def spy(d, m, **options):
        sizes.append((d, m))
        return SparseSketch(d, m, **options)

    monkeypatch.setattr(module, "SparseSketch", spy)
    M = randn(4096, 128)
    results = [cqrrpt(M, gamma, seed=1) for gamma in (1, 1.25, 3)]
    assert sizes == [(144, 4096), (160, 4096), (384, 4096)]
    assert [check(M, result) for result in results] == [128] * 3


def test_float32_is_sketched_to_a_condition_that_one_pass_allows(monkeypatch):
    """Two passes made float32 slower than float64; of one, rounding must still leave Q orthonormal."""
    monkeypatch.setitem(module._LEAST_NUMBERS, torch.float32, 1)
    conditions = []

    def spy(C, seed):
        conditions.append(original(C, seed))
        return conditions[-1]

    original = module.condition
    monkeypatch.setattr(module, "condition", spy)
    graded = randn(3000, 80) * torch.logspace(0, -4, 80)
    for M in (randn(3000, 80), 1 + 0.1 * randn(3000, 80), graded, randn(9000, 64).abs()):
        for seed in range(3):
            check(M.float(), cqrrpt(M.float(), seed=seed))
    assert max(conditions) ** 2 * torch.finfo(torch.float32).eps <= torch.finfo(torch.float32).eps ** 0.75 / 8


def test_kahan(path):
    """Rank-deficient to within eps, while no entry of the diagonal is small."""
    for n, angle in ((60, 1.2), (90, 1.3), (100, 0.9)):
        c, s = math.cos(angle), math.sin(angle)
        K = s ** torch.arange(n, dtype=torch.float64)[:, None] * (torch.eye(n).double() - c * torch.ones(n, n).triu(1))
        for M in (K, torch.cat([K, K, K.flip(0)]), K.float(), torch.cat([K.float()] * 4)):
            check(M, cqrrpt(M, seed=1))
            check(M, cqrrpt(M, rtol=0, seed=1), rtol=0)


def test_graded_columns_and_rows(path):
    M = randn(500, 60)
    for grade in (torch.logspace(0, -30, 60), torch.logspace(-12, 0, 60), torch.logspace(0, -12, 500)[:, None]):
        for dtype in DTYPES:
            A = (M * grade).to(dtype)
            check(A, cqrrpt(A, seed=1))
            check(A, cqrrpt(A, rtol=0, seed=1), rtol=0)
    A = torch.linalg.vander(torch.linspace(0, 1, 300, dtype=torch.float64), N=40)
    check(A, cqrrpt(A, seed=1))


@pytest.mark.parametrize(("dtype", "exponents"), [(torch.float64, (-1000, 1000)), (torch.float32, (-120, 120))])
def test_extreme_scales_change_nothing_but_the_scale(dtype, exponents, path):
    for shape in [(300, 30), (30, 30), (20, 40), (9, 1)]:
        M = randn(*shape, dtype=dtype)
        expected = cqrrpt(M, seed=1)
        for exponent in exponents:
            scaled = M * 2.0**exponent
            result = cqrrpt(scaled, seed=1)
            assert check(scaled, result) == min(shape)
            assert torch.equal(result.P, expected.P)
            assert torch.allclose(result.Q, expected.Q, atol=1e-5)


def test_mixed_extreme_scales(path):
    for dtype, low, high in [(torch.float64, 1e-300, 1e300), (torch.float32, 1e-37, 1e37)]:
        M = randn(200, 20, dtype=dtype)
        M[:, ::2] *= low
        M[:, 1::2] *= high
        assert check(M, cqrrpt(M, seed=1)) == 10
        M[7, 0] = high
        assert check(M, cqrrpt(M, seed=1)) == 11


def test_a_triangle_beyond_the_range_is_named(path):
    for dtype, value in [(torch.float64, 1.5e308), (torch.float32, 3e38), (torch.float64, 1e-310)]:
        with pytest.raises(ValueError, match=r"beyond the range of torch.float\d\d: multiply M by 2\.0\*\*-?\d+$"):
            cqrrpt(torch.full((100, 3), value, dtype=dtype), seed=1)


def test_nan_and_infinity_are_named(path):
    """The peer reports a failed Cholesky factorisation."""
    for shape in [(300, 20), (20, 20), (5, 9), (1, 1)]:
        for value, name in [(math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "infinity")]:
            for dtype in DTYPES:
                M = randn(*shape, dtype=dtype)
                M[-1, -1] = value
                with pytest.raises(ValueError, match=f"M must be finite and has {name}: use torch.nan_to_num"):
                    cqrrpt(M, seed=1)


@pytest.mark.parametrize(
    ("M", "error", "fix"),
    [
        ([[1.0, 2.0]], TypeError, "pass its dense form"),
        (None, TypeError, "pass its dense form"),
        (torch.ones(4), ShapeError, "two dimensions"),
        (torch.tensor(1.0), ShapeError, "two dimensions"),
        (torch.ones(2, 4, 3), ShapeError, "one matrix at a time"),
        (torch.ones(4, 3).to_sparse(), TypeError, "to_dense"),
        (torch.ones(4, 3, dtype=torch.int64), DTypeError, r"M\.double"),
        (torch.ones(4, 3, dtype=torch.bool), DTypeError, r"M\.double"),
        (torch.ones(4, 3, dtype=torch.complex64), DTypeError, "real"),
    ],
)
def test_wrong_types_of_matrices(M, error, fix):
    """Three dimensions crash the peer."""
    with pytest.raises(error, match=fix) as caught:
        cqrrpt(M)
    is_a_sentence(caught.value)


@pytest.mark.parametrize("name", ["gamma", "rtol"])
def test_parameters_outside_their_range(name):
    for value in [-1, -1e300, math.nan, math.inf, -math.inf, 1e300, 10**400, "x", 1j, [2]]:
        with pytest.raises((ValueError, TypeError), match=f"^{name}.*must be") as caught:
            cqrrpt(torch.ones(4, 3), **{name: value})
        is_a_sentence(caught.value)
        assert len(str(caught.value)) < 200


def test_parameters_at_the_edge():
    M = torch.ones(4, 3)
    for bad in ({"gamma": 0.99}, {"rtol": 1}, {"seed": -1}, {"seed": 2**63}):
        with pytest.raises(ValueError, match="must be"):
            cqrrpt(M, **bad)
    for good in ({"gamma": 1}, {"rtol": 0}, {"rtol": 0.999}, {"gamma": np.float32(2)}, {"rtol": torch.tensor(0.5)}):
        cqrrpt(M, **good)


def test_rtol_sets_the_rank(path):
    M = torch.cat([torch.diag(10.0 ** -torch.arange(6)), torch.zeros(60, 6)])
    for r in range(1, 6):
        assert check(M, cqrrpt(M, rtol=10.0**-r * 3, seed=1), rtol=10.0**-r * 3) == r


def test_the_seed_and_nothing_else_decides(sketched):
    """The peer ignores torch.manual_seed."""
    M = randn(300, 40)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, again, other = cqrrpt(M, seed=1), cqrrpt(M, seed=1), cqrrpt(M, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first.P, other.P)
    drawn, next_drawn = cqrrpt(M), cqrrpt(M)
    torch.manual_seed(0)
    assert all(map(torch.equal, drawn, cqrrpt(M)))
    assert not torch.equal(drawn.P, next_drawn.P)


def test_strides_change_nothing(path):
    for dtype in DTYPES:
        M = randn(300, 40, dtype=dtype)
        expected = cqrrpt(M, seed=1)
        wide = torch.empty(600, 120, dtype=dtype)
        wide[1::2, 2::3] = M
        for view in (M.mT.contiguous().mT, wide[1::2, 2::3], torch.nn.Parameter(M)):
            assert all(map(torch.equal, expected, cqrrpt(view, seed=1)))
        assert check(M[:, :1].expand(300, 5), cqrrpt(M[:, :1].expand(300, 5), seed=1)) == 1
        assert check(M[:1].expand(300, 40), cqrrpt(M[:1].expand(300, 40), seed=1)) == 1


def test_half_precision_is_computed_and_returned_in_float32(path):
    for dtype in [torch.float16, torch.bfloat16]:
        M = randn(300, 20, dtype=dtype)
        assert check(M, cqrrpt(M, seed=1)) == 20


def test_autograd_and_autocast_stay_out(path):
    M = randn(300, 20, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert check(M.detach(), cqrrpt(M, seed=1)) == 20


@pytest.mark.parametrize("shape", [(300, 20), (20, 30)])
def test_the_result_multiplies_as_m_does(shape, path):
    M = randn(*shape) * torch.logspace(0, -3, shape[1])
    result = cqrrpt(M, seed=1)
    n = shape[1]
    for X in (randn(n), randn(n, 4), randn(2, 3, n, 4)):
        assert torch.allclose(result @ X, M @ X)
    error = estimate_error(M, result, seed=5)
    assert error.relative < 1e-13
    worse = estimate_error(M, cqrrpt(M, rtol=0.1, seed=1), seed=5)
    assert worse.relative > 1e-3


def test_return_error(path):
    M = matrix(400, 50, np.geomspace(1, 1e-6, 50))
    for rtol in (None, 1e-3):
        Q, R, P, error = cqrrpt(M, rtol=rtol, seed=1, return_error=True)
        assert all(map(torch.equal, (Q, R, P), cqrrpt(M, rtol=rtol, seed=1)))
        assert isinstance(error, ErrorEstimate)
        exact = (M[:, P] - Q @ R).norm()
        assert exact / 3 < error.frobenius < 3 * exact
        assert exact <= error.upper
        assert torch.equal(error.upper, cqrrpt(M, rtol=rtol, seed=1, return_error=True)[3].upper)


class Rows:
    """A sketch that sees the first rows, and those after them ``weak`` times."""

    weak = 0.0

    def __init__(self, d, m, **kwargs):
        self.d = d

    def __matmul__(self, A):
        return A[: self.d] + self.weak * A[self.d : 2 * self.d]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weak", [0, 1e-3, 1e-6, 1e-12])
def test_a_sketch_that_misses_most_of_m_costs_time_and_not_accuracy(weak, dtype, sketched, monkeypatch):
    """Whatever seed a user draws: a second pass, Householder's method, or LAPACK steps in."""
    monkeypatch.setattr(Rows, "weak", weak)
    monkeypatch.setattr(module, "SparseSketch", Rows)
    for M in (
        randn(300, 40, dtype=dtype),
        matrix(300, 40, np.geomspace(1, 1e-3, 40), dtype),
        randn(300, 1, dtype=dtype),
    ):
        M[: len(M[0]) + 16, ::2] = 0
        M[300 - 12 :] *= 1e3
        Q, R, P = cqrrpt(M, seed=1)
        assert Q.shape[1] == M.shape[1]
        loss = torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(len(R), dtype=dtype), 2)
        assert loss <= factorisation(dtype)
        assert (M[:, P] - Q @ R).norm() <= factorisation(dtype) * M.norm()


def test_a_sketch_that_misorders_columns(sketched, monkeypatch):
    """A small entry of the diagonal must not hide large ones after it."""
    monkeypatch.setattr(Rows, "weak", 0)
    monkeypatch.setattr(module, "SparseSketch", Rows)
    M = torch.zeros(100, 3, dtype=torch.float64)
    M[0, 0], M[1, 1], M[2, 2] = 1, 0.5, 0.1
    M[90, 0] = M[91, 2] = 1e20
    assert check(M, cqrrpt(M, seed=1)) == 2


VALUES = st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0, 1e-8, 1e8, 1e-30, 1e30, 1e-300, 1e300, math.nan, math.inf, 5e-324])
NUMBERS = st.one_of(st.none(), st.floats(), st.sampled_from([0, 1, -1, 1.25, 2, 10**400, "x", 0.5, 1e-3, True]))


@fuzz
@given(data=st.data())
def test_fuzz(data):
    """A result that satisfies the contract, or an error that says what to do."""
    shape = data.draw(st.one_of(st.tuples(*[st.integers(0, 200)] * 2), st.lists(st.integers(0, 9), max_size=4)))
    dtype = data.draw(st.sampled_from([*DTYPES, *DTYPES, torch.float16, torch.bfloat16, torch.int32, torch.complex64]))
    M = randn(*shape, seed=data.draw(st.integers(0, 99)))
    if len(shape) == 2 and M.numel():
        rank = data.draw(st.integers(0, 2 * min(shape)))
        if rank < min(shape):
            M = M[:, :rank] @ M[:rank]
        rows = data.draw(
            st.lists(st.tuples(st.integers(0, shape[0] - 1), st.integers(0, shape[1] - 1), VALUES), max_size=4)
        )
        for i, j, value in rows:
            if data.draw(st.booleans()):
                M[:, j] *= value
            else:
                M[i, j] = value
        M = M * data.draw(st.one_of(st.just(1.0), st.just(1.0), VALUES))
    M = M.to(dtype)
    layout = data.draw(st.sampled_from(["contiguous", "contiguous", "transposed", "strided", "sparse"]))
    if M.ndim == 2 and layout == "transposed":
        M = M.mT
    elif M.ndim == 2 and layout == "strided":
        M = M[::2, 1::3]
    elif M.ndim == 2 and layout == "sparse" and data.draw(st.booleans()):
        M = M.to_sparse()
    plain = data.draw(st.booleans())
    gamma = 1.25 if plain else data.draw(NUMBERS)
    rtol = None if plain else data.draw(NUMBERS)
    original = module._pays
    if data.draw(st.booleans()):
        module._pays = lambda M, d: d < len(M)
    seed = data.draw(st.integers(0, 99))
    try:
        result, message = cqrrpt(M, gamma, rtol=rtol, seed=seed), None
    except (PantherError, ValueError, TypeError) as error:
        is_a_sentence(error)
        message = str(error)
    finally:
        module._pays = original
    if message is None:
        check(M, result, None if rtol is None else float(rtol))
    elif plain and M.ndim == 2 and M.dtype.is_floating_point and M.layout == torch.strided:
        assert "beyond the range" in message or not bool(M.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda(dtype):
    for M in (
        randn(3000, 200, dtype=dtype),
        randn(30, 50, dtype=dtype),
        randn(900, 7, dtype=dtype) @ randn(7, 90, dtype=dtype),
    ):
        result = cqrrpt(M.cuda(), seed=1)
        assert all(part.is_cuda for part in result)
        assert check(M, CQRRPTResult(*(part.cpu() for part in result))) == cqrrpt(M, seed=1).Q.shape[1]

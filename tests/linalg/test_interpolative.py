"""interpolative: columns and rows, ranks and tolerances, the bound on the coefficients; leverage scores."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch
from matrices import gaussian, orthogonal, with_spectrum

from panther.errors import DTypeError, NumericalWarning, ShapeError
from panther.linalg import RowSharded, interpolative, leverage_scores

BOUND = 2 + 1e-6
i = torch.arange(1.0, 91.0)
SPECTRA = {
    "polynomial": 1 / i,
    "exponential": 0.8**i,
    "slow": i**-0.3,
    "clustered": 1.0 + (i < 20),
    "step": 1e-6 ** (i > 20),
}


def kahan(size, sine):
    """Kahan's matrix, with columns that pivoted QR does not exchange and coefficients up to 1e11."""
    upper = torch.eye(size) - math.sqrt(1 - sine**2) * torch.triu(torch.ones(size, size), 1)
    return (sine ** torch.arange(size))[:, None].double() * upper.double()


def error(A, result):
    return float((A.double() - result @ torch.eye(A.shape[1], dtype=result.T.dtype)).norm())


def assert_interpolative(A, result, k, dim=-1):
    J, T, skeleton, _ = result
    m, n = A.shape
    assert J.shape == (k,)
    assert J.dtype is torch.int64
    assert len(J.unique()) == k
    assert T.shape == ((k, n) if dim == -1 else (m, k))
    assert T.dtype is torch.promote_types(A.dtype, torch.float32)
    assert result.dim == dim
    assert torch.equal(skeleton, A.index_select(dim, J).to(T.dtype))
    assert torch.equal(T.index_select(dim, J), torch.eye(k, dtype=T.dtype))
    assert not T.numel() or T.abs().max() <= BOUND


def pivoted_error(A, k):
    P = torch.from_numpy(scipy.linalg.qr(A.double().numpy(), mode="r", pivoting=True)[1])[:k].long()
    Q = torch.linalg.qr(A.double()[:, P]).Q
    return float((A.double() - Q @ (Q.T @ A.double())).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(130, 90), (90, 130), (301, 187)])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_columns_and_rows_are_as_good_as_those_of_pivoted_qr(spectrum, shape, dtype):
    A, k = with_spectrum(*shape, SPECTRA[spectrum], dtype), 20
    for dim, matrix in ((-1, A), (-2, A.T)):
        result = interpolative(A, k, dim=dim, seed=0)
        assert_interpolative(A, result, k, dim)
        floor = 100 * torch.finfo(dtype).eps * float(A.norm())
        assert error(A, result) <= 1.35 * pivoted_error(matrix, k) + floor


def test_the_coefficients_are_the_best_ones():
    A = with_spectrum(200, 150, 0.9 ** torch.arange(150.0))
    J, T, skeleton, _ = interpolative(A, 25, seed=0)
    torch.testing.assert_close(T, torch.linalg.lstsq(skeleton, A).solution, atol=1e-9, rtol=0)
    by_rows = interpolative(A.T, 25, dim=-2, seed=0)
    assert torch.equal(by_rows.J, J)
    torch.testing.assert_close(by_rows.T, T.T)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (1, 1), (1, 7), (7, 1), (30, 30)])
def test_small_and_empty_matrices_are_exact(size):
    A = gaussian(*size)
    for dim in (-1, -2):
        for k in {0, min(size)}:
            result = interpolative(A, k, dim=dim, seed=0)
            assert_interpolative(A, result, k, dim)
        assert error(A, result) <= 1e-12 * float(A.norm())


def test_a_lower_rank_than_k_gets_zeros():
    A = gaussian(80, 6) @ gaussian(6, 70, seed=1)
    result = interpolative(A, 15, seed=0)
    assert_interpolative(A, result, 15)
    assert error(A, result) <= 1e-12 * float(A.norm())
    assert int((result.T.abs().sum(1) > 1).sum()) == 6
    zero = interpolative(torch.zeros(9, 8), 3, seed=0)
    assert_interpolative(torch.zeros(9, 8), zero, 3)
    assert len(interpolative(A, tol=1e-8, seed=0).J) == 6
    assert len(interpolative(torch.zeros(9, 8), tol=0.1, seed=0).J) == 0


@pytest.mark.parametrize("size", [60, 90])
def test_exchanges_bound_what_pivoted_qr_does_not(size):
    A = kahan(size, 0.95)
    assert torch.linalg.solve(A[: size - 1, : size - 1], A[: size - 1, -1]).abs().max() > 1e3
    for dim, matrix in ((-1, A), (-2, A.T)):
        assert_interpolative(matrix, result := interpolative(matrix, size - 1, dim=dim, seed=0), size - 1, dim)
        assert error(matrix, result) <= 1e-8 * float(A.norm())


def test_columns_of_very_different_sizes_and_duplicates():
    A = gaussian(100, 60) * torch.logspace(12, -12, 60, dtype=torch.float64)
    assert_interpolative(A, result := interpolative(A, 60, seed=0), 60)
    assert error(A, result) <= 1e-12 * float(A.norm())
    A = gaussian(100, 9)[:, torch.arange(60) % 9]
    assert_interpolative(A, result := interpolative(A, 20, seed=0), 20)
    assert error(A, result) <= 1e-12 * float(A.norm())


@pytest.mark.parametrize("tol", [0.5, 0.1, 1e-3, 1e-9])
def test_a_tolerance_takes_about_as_many_columns_as_pivoted_qr(tol):
    for spectrum in ("polynomial", "exponential"):
        A = with_spectrum(150, 90, SPECTRA[spectrum])
        R = torch.from_numpy(scipy.linalg.qr(A.numpy(), mode="r", pivoting=True)[0])
        tails = R.square().sum(1).flip(0).cumsum(0).flip(0)
        expected = int((tails > tol**2 * tails[0]).sum())
        for dim in (-1, -2):
            result, estimate = interpolative(A, tol=tol, dim=dim, seed=0, return_error=True)
            assert_interpolative(A, result, len(result.J), dim)
            assert abs(len(result.J) - expected) <= 2 + 0.05 * expected
            assert error(A, result) <= 1.3 * tol * float(A.norm()) + 1e-13
            assert estimate.relative <= 2 * tol + 1e-13
    with pytest.warns(NumericalWarning, match="k=5"):
        assert len(interpolative(A, 5, tol=1e-3, seed=0).J) == 5


def test_every_way_to_hold_a_matrix_gives_the_same_columns():
    A = with_spectrum(90, 70, 0.8 ** torch.arange(70.0)) * (gaussian(90, 70, seed=3) > 0.5)
    transposed = A.T.contiguous().T
    sparse = scipy.sparse.csr_array(A.numpy())
    operator = scipy.sparse.linalg.aslinearoperator(sparse)
    for held in (transposed, A.to_sparse(), sparse, A.numpy(), operator):
        for dim in (-1, -2):
            expected = interpolative(A, 12, dim=dim, seed=0)
            J, T, skeleton, _ = (torch.as_tensor(part) for part in interpolative(held, 12, dim=dim, seed=0))
            assert torch.equal(J, expected.J)
            torch.testing.assert_close(T, expected.T)
            torch.testing.assert_close(skeleton, expected.skeleton)


def test_half_precision_is_computed_in_float32():
    A = gaussian(60, 40, dtype=torch.bfloat16)
    result, expected = interpolative(A, 9, seed=0), interpolative(A.float(), 9, seed=0)
    assert torch.equal(result.T, expected.T)
    assert torch.equal(result.J, expected.J)


def test_one_seed_one_result():
    A = gaussian(90, 70)
    first, second, other = (interpolative(A, 9, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.T, second.T)
    assert not torch.equal(first.J, other.J)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"k": None}, ValueError, "k and tol are both None: pass a rank k"),
        ({"k": 6}, ShapeError, r"k=6 must be at most min\(m, n\) = 5"),
        ({"k": -1}, ShapeError, "k=-1 must be at least 0"),
        ({"tol": 1.0}, ValueError, r"tol=1.0 must be in \[0, 1\)"),
        ({"dim": 2}, ValueError, "dim=2 must be -1 for columns or -2 for rows"),
        ({"dim": True}, ValueError, "dim=True must be -1"),
        ({"oversample": -1}, ShapeError, "oversample=-1 must be at least 0"),
        ({"A": torch.ones(2, 5, 5)}, ShapeError, "pass one matrix at a time"),
        ({"A": torch.ones(5, 5, dtype=torch.complex64)}, DTypeError, "complex64 and must be real"),
        ({"A": torch.full((5, 5), math.nan)}, ValueError, "A must be finite and has NaN"),
        ({"A": torch.full((50, 50), math.inf)}, ValueError, "A must be finite and has infinity"),
    ],
)
def test_bad_input(arguments, kind, message):
    with pytest.raises(kind, match=message):
        interpolative(**{"A": torch.eye(5), "k": 2, **arguments})


def test_rows_that_are_sharded_over_one_rank():
    A = gaussian(30, 20)
    assert torch.equal(interpolative(RowSharded(A), 4, seed=0).J, interpolative(A, 4, seed=0).J)


@pytest.mark.parametrize("shape", [(1, 1), (40, 7), (7, 40), (3000, 200), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leverage_scores_are_the_norms_of_an_orthonormal_basis(shape, dtype):
    A = gaussian(*shape) * torch.logspace(0, -2, shape[1], dtype=torch.float64)
    A[: shape[0] // 20] *= 10
    A = A.to(dtype).double()
    expected = torch.linalg.qr(A).Q.square().sum(1)
    for held in (A.to(dtype), A.to(dtype).to_sparse()):
        scores = leverage_scores(held, seed=0)
        assert scores.dtype is dtype
        torch.testing.assert_close(scores.double(), expected, atol=40 * torch.finfo(dtype).eps ** 0.75, rtol=0)


def test_leverage_scores_of_a_rank():
    A = orthogonal(120, 3) @ gaussian(3, 30)
    expected = torch.linalg.svd(A, full_matrices=False).U[:, :3].square().sum(1)
    for held in (A, A.to_sparse(), scipy.sparse.csr_array(A.numpy())):
        torch.testing.assert_close(torch.as_tensor(leverage_scores(held, seed=0)), expected)
    A = A + 1e-6 * gaussian(120, 30, seed=5)
    torch.testing.assert_close(leverage_scores(A, 3, seed=0), expected, atol=1e-4, rtol=0)
    batch = torch.stack((A, 2 * A))
    torch.testing.assert_close(leverage_scores(batch, 3, seed=0)[1], expected, atol=1e-4, rtol=0)
    assert leverage_scores(A, 0, seed=0).abs().sum() == 0
    torch.testing.assert_close(leverage_scores(batch, seed=0).sum(1), torch.full((2,), 30.0, dtype=torch.float64))
    with pytest.raises(ShapeError, match="k=31 must be at most"):
        leverage_scores(A, 31)


def test_a_row_that_no_other_row_replaces_has_a_score_of_one():
    A = np.ones((50, 2))
    A[7, 1] = 5.0
    scores = np.asarray(leverage_scores(A, seed=0))
    assert scores.argmax() == 7
    assert scores[7] == pytest.approx(1.0)
    assert scores.sum() == pytest.approx(2.0)

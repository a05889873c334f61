"""qb and rangefinder: the error they promise, down to rounding, and no more columns than it takes."""

import pytest
import scipy.sparse
import torch
from fuzzing import fuzz, is_a_sentence
from hypothesis import given
from hypothesis import strategies as st
from matrices import (
    DTYPES,
    LAYOUTS,
    assert_orthonormal,
    assert_qb,
    frobenius,
    gaussian,
    is_finite,
    operands,
    sizes,
    tolerances,
    with_spectrum,
)
from tolerances import factorisation

from panther.errors import NumericalWarning, PantherError, ShapeError
from panther.linalg import ErrorEstimate, estimate_error, interpolative, qb, randomized_svd, rangefinder, rp_cholesky


def relative_error(A, Q, B):
    A = A.double()
    norm = frobenius(A)
    return torch.where(norm > 0, frobenius(A - Q.double() @ B.double()) / norm, 0.0)


@pytest.mark.parametrize("decay", [0.5, 0.8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tolerance_is_met_and_not_by_far(decay, dtype):
    """From 0.5 down to a few eps, with the exact residual and with the probes."""
    for exponent in [0.02, 0.2, 0.4, 0.6, 0.8, 0.9]:
        tol = torch.finfo(dtype).eps ** exponent
        sigma = decay ** torch.arange(120.0, dtype=torch.float64)
        A = with_spectrum(160, 120, sigma, dtype)
        tails = torch.linalg.vector_norm(torch.triu(sigma.expand(120, 120)), dim=-1) / sigma.norm()
        needed = int((tails > tol).sum())
        for seed in range(5):
            Q, B = qb(A, tol=tol, seed=seed, block_size=8)
            assert_qb(A, (Q, B), Q.shape[-1])
            exact = tol**2 >= 1000 * torch.finfo(dtype).eps
            assert relative_error(A, Q, B) <= tol * (1.001 if exact else 1.6) + torch.finfo(dtype).eps
            assert Q.shape[-1] <= needed + 8 or exponent == 0.9  # there rounding is felt


@pytest.mark.parametrize("dtype", DTYPES)
def test_slow_decay_to_ten_eps(dtype):
    A = gaussian(150, 100, dtype=dtype)
    tol = 10 * torch.finfo(dtype).eps
    Q, B = qb(A, tol=tol, seed=0)
    assert Q.shape[-1] == 100
    assert relative_error(A, Q, B) <= 1.6 * tol


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tolerance_below_rounding_is_said(dtype):
    with pytest.warns(NumericalWarning, match="is below what torch.float.. can reach, [0-9.]+e-[0-9]+ here"):
        Q, _ = qb(gaussian(60, 50, dtype=dtype), tol=torch.finfo(dtype).eps / 100, seed=0)
    assert Q.shape[-1] == 50


@pytest.mark.parametrize("driver", [qb, randomized_svd, interpolative, rp_cholesky])
@pytest.mark.parametrize("tol", [0.01, 0.0])
def test_a_limit_that_is_too_small_for_the_tolerance_is_said(driver, tol):
    A = torch.diag(torch.arange(1, 81.0, dtype=torch.float64) ** -0.5)
    with pytest.warns(
        NumericalWarning, match=rf"^tol={tol} is not reached with (k|rank)=20, [3-6]\.\de-01 here"
    ) as raised:
        driver(A, 20, tol=tol, seed=0)
    assert [warning.filename for warning in raised] == [__file__]
    assert driver(A, 80, tol=0.01, seed=0)[0].shape[-1] >= 79


@pytest.mark.parametrize("tol", [0.3, 1e-3, 1e-10])
def test_exact_low_rank_is_found(tol):
    for rank in [0, 1, 5, 40]:
        A = with_spectrum(150, 120, [1.0] * rank)
        Q, B = qb(A, tol=tol, seed=0, block_size=16)
        assert_qb(A, (Q, B), Q.shape[-1])
        assert relative_error(A, Q, B) <= tol
        assert Q.shape[-1] == (rank if tol < 0.1 else -(-rank * 91 // 100))


def test_the_rank_of_a_batch_is_that_of_its_hardest_entry():
    low, high = (with_spectrum(90, 80, [1.0] * rank) for rank in (2, 40))
    for tol in (1e-2, 1e-9):
        A = torch.stack((low, torch.zeros_like(low), high))[:, None]
        assert_qb(A, qb(A, tol=tol, seed=0), 40)


def test_k_bounds_the_tolerance():
    A = gaussian(90, 80)
    with pytest.warns(NumericalWarning, match="k=13"):
        assert_qb(A, qb(A, 13, 1e-3, block_size=5, seed=0), 13)
    assert_qb(A, qb(A, 80, 0.99, seed=0), qb(A, tol=0.99, seed=0).Q.shape[-1])


def test_scale_does_not_matter():
    for tol in [0.1, 1e-3]:
        for scale in [1e-30, 1e-12, 1e12, 1e30]:
            A = with_spectrum(90, 80, 0.8 ** torch.arange(80.0))
            expected = qb(A, tol=tol, seed=0)
            Q, B = qb(scale * A, tol=tol, seed=0)
            assert Q.shape == expected.Q.shape
            assert torch.allclose(Q @ B / scale, expected.Q @ expected.B)


@pytest.mark.filterwarnings("ignore:tol=1e-09 is not reached")
def test_every_kind_of_matrix():
    for tol in [0.5, 1e-9, None]:
        for name in LAYOUTS:
            A = with_spectrum(120, 90, 0.7 ** torch.arange(90.0))
            operand = LAYOUTS[name](A)
            result = tuple(map(torch.as_tensor, qb(operand, 20, tol, seed=0)))
            assert_qb(A, result, result[0].shape[-1])
            if tol == 0.5:
                assert relative_error(A, *result) <= tol
            Q, error = rangefinder(operand, 6, seed=0, return_error=True)
            Q = torch.as_tensor(Q)
            exact = float(frobenius(A - Q @ (Q.mT @ A)))
            assert exact / 2 < float(error.frobenius) < 2 * exact < 2 * float(error.upper)


@pytest.mark.filterwarnings("ignore:tol=.* is not reached")
def test_error_estimates_and_seeds():
    A = gaussian(120, 90)
    state = torch.get_rng_state()
    for tol in (None, 0.5, 1e-9):
        Q, B, error = qb(A, 30, tol, seed=2, return_error=True)
        again = qb(A, 30, tol, seed=2, return_error=True)
        assert isinstance(error, ErrorEstimate)
        assert torch.equal(Q, again[0])
        assert torch.equal(error.frobenius, again[2].frobenius)
        assert frobenius(A - Q @ B) / 1.5 < error.frobenius < 1.5 * frobenius(A - Q @ B)
        assert not torch.equal(Q, qb(A, 30, tol, seed=3).Q)
    assert estimate_error(A, qb(A, 30, seed=2), seed=9).relative < 1
    assert torch.equal(rangefinder(A, 3, seed=2), rangefinder(A, 3, seed=2))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "k and tol are both None: pass a rank k"),
        ({"tol": 2.0}, ValueError, r"tol=2.0 must be in \[0, 1\)"),
        ({"k": 2, "block_size": 0}, ShapeError, "block_size=0 must be at least 1"),
        ({"tol": 0.5, "A": torch.full((8, 5), torch.nan)}, ValueError, "A must be finite and has NaN"),
        ({"tol": 1e-7, "A": torch.full((8, 5), torch.inf)}, ValueError, "A must be finite and has infinity"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        qb(**{"A": gaussian(8, 5), **arguments})


@pytest.mark.gpu
@pytest.mark.parametrize("tol", [0.1, 1e-5])
def test_cuda_meets_the_tolerance(tol):
    A = with_spectrum(120, 90, 0.7 ** torch.arange(90.0), torch.float32)
    Q, B = qb(A.cuda(), tol=tol, seed=0)
    assert Q.is_cuda
    assert relative_error(A, Q.cpu(), B.cpu()) <= 1.6 * tol
    assert_orthonormal(rangefinder(A.cuda(), 9, seed=0).cpu())


@fuzz
@given(operands(), st.none() | sizes, tolerances, sizes, sizes, st.integers(-1, 5), st.booleans())
@pytest.mark.filterwarnings("ignore::panther.errors.NumericalWarning")
def test_a_contract_or_a_typed_error(A, k, tol, block_size, n_iter, seed, return_error):
    try:
        result = qb(A, k, tol, block_size=block_size, n_iter=n_iter, seed=seed, return_error=return_error)
    except (PantherError, ValueError, TypeError) as error:
        is_a_sentence(error)
        return
    if k == 0:
        assert result[0].shape == (*A.shape[:-1], 0)
        return
    assert is_finite(A)
    Q, B = result[:2]
    assert_qb(A, (Q, B), Q.shape[-1])
    if tol is None:
        assert Q.shape[-1] == k
    elif k is None:
        assert bool((relative_error(A, Q, B) <= max(1.7 * tol, factorisation(Q.dtype))).all())


@fuzz
@given(operands(), sizes, sizes, st.integers(-1, 5), st.booleans())
def test_the_range_finder_too(A, k, n_iter, seed, return_error):
    try:
        result = rangefinder(A, k, n_iter=n_iter, seed=seed, return_error=return_error)
    except (PantherError, ValueError, TypeError) as error:
        is_a_sentence(error)
        return
    assert is_finite(A) or k == 0
    Q = result[0] if return_error else result
    assert Q.shape == (*A.shape[:-1], k)
    assert_orthonormal(Q)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e19), (torch.float32, 1e-30), (torch.float64, 1e-200)])
def test_scale_does_not_change_the_rank(dtype, scale):
    A = with_spectrum(200, 40, torch.logspace(0, -3, 40))
    expected = qb(A, tol=1e-2, seed=0).Q.shape
    Q, B, error = qb((A * scale).to(dtype), tol=1e-2, seed=0, return_error=True)
    assert Q.shape == expected
    assert ((A * scale).to(dtype).double() / scale - Q.double() @ (B.double() / scale)).norm() <= 1e-2 * A.norm()
    assert 0 < error.relative < 1e-2


@pytest.mark.parametrize("layout", ["coo", "csr", "scipy", "matrix-free", "numpy"])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e25),
        (torch.float32, 1e34),
        (torch.float32, 1e-36),
        (torch.float64, 1e200),
        (torch.float64, 1e-200),
    ],
)
def test_scale_does_not_change_the_rank_of_any_kind_of_matrix(layout, dtype, scale):
    """Only dense tensors were scaled: others gave twice the rank, rank 0, or an error of LAPACK."""
    A = (with_spectrum(60, 40, torch.logspace(0, -3, 40)) * scale).to(dtype)
    expected = qb(A, tol=0.05, seed=0)
    kinds = {**LAYOUTS, "scipy": lambda A: scipy.sparse.coo_array(A.numpy())}
    Q, B = map(torch.as_tensor, qb(kinds[layout](A), tol=0.05, seed=0))
    assert Q.shape == expected.Q.shape
    assert ((A.double() - Q.double() @ B.double()) / scale).norm() <= 1.6 * 0.05 * (A.double() / scale).norm()


@pytest.mark.parametrize("shape", [(200_000, 25), (25, 200_000)])
@pytest.mark.parametrize("layout", ["dense", "coo"])
def test_the_tolerance_is_met_by_large_matrices(shape, layout):
    """One sum over 5e6 squares is wrong by 1700 eps, more than the smallest residual: the error was 1.4 times tol."""
    sigma = torch.logspace(0, -10, 25, dtype=torch.float64)
    A = gaussian(*shape) * (sigma if shape[1] == 25 else sigma[:, None])
    for tol in (1e-6, 6e-7):
        Q, B = qb(A if layout == "dense" else A.to_sparse_coo(), tol=tol, seed=0)
        assert relative_error(A, Q, B) <= 1.02 * tol

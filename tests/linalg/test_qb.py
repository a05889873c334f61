"""qb and rangefinder: the error they promise, down to rounding, and no more columns than it takes."""

import pytest
import torch
from fuzzing import fuzz, is_a_sentence
from hypothesis import given
from hypothesis import strategies as st
from matrices import (
    DTYPES,
    LAYOUTS,
    SIZES,
    assert_orthonormal,
    frobenius,
    gaussian,
    is_finite,
    operands,
    sizes,
    tolerances,
    with_spectrum,
)
from tolerances import factorisation

from panther.errors import DTypeError, NumericalWarning, PantherError, ShapeError
from panther.linalg import ErrorEstimate, estimate_error, qb, rangefinder


def relative_error(A, Q, B):
    A = A.double()
    norm = frobenius(A)
    return torch.where(norm > 0, frobenius(A - Q.double() @ B.double()) / norm, 0.0)


def assert_qb(A, result, rank):
    Q, B = result
    assert Q.shape == (*A.shape[:-1], rank)
    assert B.shape == (*A.shape[:-2], rank, A.shape[-1])
    assert not Q.requires_grad
    assert not B.requires_grad
    assert_orthonormal(Q)
    error = frobenius(Q.mT.double() @ A.double() - B.double())
    assert bool((error <= factorisation(Q.dtype) * frobenius(A)).all())


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_iter", [0, 2])
def test_every_rank_of_every_shape(shape, dtype, n_iter):
    A = gaussian(*shape, dtype=dtype)
    least = min(shape[-2:])
    for k in {0, 1, least // 3, least}:
        for matrix in (A, torch.zeros_like(A), torch.ones_like(A)):
            assert_qb(matrix, qb(matrix, k, n_iter=n_iter, block_size=20, seed=0), k)
            Q = rangefinder(matrix, k, n_iter=n_iter, seed=0)
            assert Q.shape == (*shape[:-1], k)
            assert_orthonormal(Q)
    assert bool((relative_error(A, *qb(A, least, seed=0)) <= factorisation(dtype)).all())


@pytest.mark.parametrize("decay", [0.5, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [0.02, 0.2, 0.4, 0.6, 0.8, 0.9])
def test_the_tolerance_is_met_and_not_by_far(decay, dtype, exponent):
    """From 0.5 down to a few eps, with the exact residual and with the probes."""
    tol = torch.finfo(dtype).eps ** exponent
    sigma = decay ** torch.arange(260.0, dtype=torch.float64)
    A = with_spectrum(350, 260, sigma, dtype)
    tails = torch.linalg.vector_norm(torch.triu(sigma.expand(260, 260)), dim=-1) / sigma.norm()
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
    qb(gaussian(60, 50, dtype=dtype), 10, torch.finfo(dtype).eps / 100)  # the rank was asked for: no warning


@pytest.mark.parametrize("tol", [0.3, 1e-3, 1e-10])
@pytest.mark.parametrize("rank", [0, 1, 5, 40])
def test_exact_low_rank_is_found(rank, tol):
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
    assert_qb(A, qb(A, 13, 1e-3, block_size=5, seed=0), 13)
    assert_qb(A, qb(A, 80, 0.99, seed=0), qb(A, tol=0.99, seed=0).Q.shape[-1])


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("tol", [0.1, 1e-3])
def test_scale_does_not_matter(scale, tol):
    A = with_spectrum(90, 80, 0.8 ** torch.arange(80.0))
    expected = qb(A, tol=tol, seed=0)
    Q, B = qb(scale * A, tol=tol, seed=0)
    assert Q.shape == expected.Q.shape
    assert torch.allclose(Q @ B / scale, expected.Q @ expected.B)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tol", [0.5, 1e-9, None])
def test_every_kind_of_matrix(name, tol):
    A = with_spectrum(120, 90, 0.7 ** torch.arange(90.0))
    operand = LAYOUTS[name](A)
    result = qb(operand, 20, tol, seed=0)
    assert_qb(A, result, result.Q.shape[-1])
    if tol == 0.5:
        assert relative_error(A, *result) <= tol
    Q, error = rangefinder(operand, 6, seed=0, return_error=True)
    exact = frobenius(A - Q @ (Q.mT @ A))
    assert exact / 2 < error.frobenius < 2 * exact < 2 * error.upper


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    A = gaussian(50, 40, dtype=dtype)
    assert torch.equal(qb(A, 5, seed=0).B, qb(A.float(), 5, seed=0).B)
    assert torch.equal(rangefinder(A, 5, seed=0), rangefinder(A.float(), 5, seed=0))


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


def test_autocast_and_gradients_stay_out():
    A = gaussian(100, 90, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(qb(A, 5, 0.1, seed=0).B, qb(A.detach(), 5, 0.1, seed=0).B)
        assert torch.equal(rangefinder(A, 5, seed=0), rangefinder(A.detach(), 5, seed=0))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "k and tol are both None: pass a rank k"),
        ({"k": 6}, ShapeError, r"k=6 must be at most min\(m, n\) = 5"),
        ({"k": 2.5}, TypeError, "k must be an integer"),
        ({"tol": 2.0}, ValueError, r"tol=2.0 must be in \[0, 1\)"),
        ({"k": 2, "block_size": 0}, ShapeError, "block_size=0 must be at least 1"),
        ({"k": 2, "n_iter": 1000}, ShapeError, "n_iter=1000 must be at most 100"),
        ({"k": 2, "A": torch.ones(8, 5).int()}, DTypeError, "must be real and floating"),
        ({"k": 2, "A": torch.full((8, 5), torch.nan)}, ValueError, "A must be finite and has NaN"),
        ({"tol": 0.5, "A": torch.full((8, 5), torch.nan)}, ValueError, "A must be finite and has NaN"),
        ({"tol": 1e-7, "A": torch.full((8, 5), torch.inf)}, ValueError, "A must be finite and has infinity"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        qb(**{"A": gaussian(8, 5), **arguments})


@pytest.mark.parametrize(("k", "n_iter"), [(6, 0), (-1, 0), (2, -1), (2, 101), (2, "many")])
def test_bad_input_of_the_range_finder(k, n_iter):
    with pytest.raises((ShapeError, ValueError)):
        rangefinder(gaussian(8, 5), k, n_iter=n_iter)


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

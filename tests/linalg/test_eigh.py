"""randomized_eigh and nystrom against the full eigendecomposition."""

import pytest
import torch
from fuzzing import fuzz, is_a_sentence
from hypothesis import given
from hypothesis import strategies as st
from matrices import (
    DTYPES,
    MatrixFree,
    assert_eigenpairs,
    frobenius,
    gaussian,
    is_finite,
    operands,
    sizes,
    symmetric,
)
from tolerances import factorisation

from panther.errors import PantherError, ShapeError
from panther.linalg import EighResult, ErrorEstimate, NystromResult, estimate_error, nystrom, randomized_eigh


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_by_magnitude_of_either_sign(dtype):
    A = symmetric(300, [-9.0, 8.0, -7.0, 6.0, -0.5, 0.25], dtype)
    for seed in range(5):
        values, V = randomized_eigh(A, 4, seed=seed)
        assert torch.allclose(values, torch.tensor([-9.0, 8.0, -7.0, 6.0], dtype=dtype), rtol=factorisation(dtype))
        assert (A @ V - V * values).norm() <= 9 * factorisation(dtype)


@pytest.mark.parametrize("decay", [0.5, 0.8, 0.97])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decaying_spectra(decay, dtype):
    sizes = decay ** torch.arange(300.0, dtype=torch.float64)
    A = symmetric(300, sizes * (-1.0) ** torch.arange(300), dtype)
    K = symmetric(300, sizes, dtype)
    for seed in range(5):
        values, V = randomized_eigh(A, 15, seed=seed)
        assert_eigenpairs(A, values, V, 15, 1.01)
        U, values = nystrom(K, 15, seed=seed)
        assert_eigenpairs(K, values, U, 15, 1.01)
        assert (values - sizes[:15]).abs().max() <= 50 * torch.finfo(dtype).eps + 0.1 * sizes[15]


def test_nystrom_is_closer_than_projection():
    """The same products, one power more: what the extra factorisation is for."""
    K = symmetric(400, torch.arange(1, 401.0) ** -1.0)
    for seed in range(5):
        L, V = randomized_eigh(K, 20, n_iter=0, oversample=0, seed=seed)
        U, values = nystrom(K, 20, n_iter=0, oversample=0, seed=seed)
        assert frobenius(K - (U * values) @ U.mT) < frobenius(K - (V * L) @ V.mT)


def test_matrix_free_needs_no_transpose():
    A = symmetric(150, 0.7 ** torch.arange(150.0))
    assert torch.allclose(randomized_eigh(MatrixFree(A, False), 8).L, torch.linalg.eigvalsh(A).flip(0)[:8])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    A = symmetric(100, [4.0, 2.0, 1.0]).to(dtype)
    assert torch.equal(randomized_eigh(A, 2, seed=0).V, randomized_eigh(A.float(), 2, seed=0).V)
    U, values = nystrom(A, 3, seed=0)  # semidefinite to the rounding of its own dtype
    assert U.dtype == values.dtype == torch.float32
    assert torch.allclose(values, torch.tensor([4.0, 2.0, 1.0]), atol=8 * torch.finfo(dtype).eps)


def test_error_estimates_and_seeds():
    A = symmetric(200, 0.8 ** torch.arange(200.0))
    state = torch.get_rng_state()
    for driver in (randomized_eigh, nystrom):
        first, second, other = (driver(A, 5, seed=seed, return_error=True) for seed in (2, 2, 3))
        assert isinstance(first[2], ErrorEstimate)
        assert all(torch.equal(a, b) for a, b in zip(first[:2], second[:2], strict=True))
        assert torch.equal(first[2].frobenius, second[2].frobenius)
        assert not torch.equal(first[0], other[0])
        result = (EighResult if driver is randomized_eigh else NystromResult)(*first[:2])
        exact = frobenius(A - result @ torch.eye(200, dtype=A.dtype))
        assert exact / 2 < first[2].frobenius < 2 * exact
        assert exact < estimate_error(A, result, seed=5).upper
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("driver", [randomized_eigh, nystrom])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"A": gaussian(8, 5)}, ShapeError, r"A, of shape \(8, 5\), must be square: use randomized_svd"),
        ({"A": gaussian(80, 80)}, ValueError, r"A must be symmetric: use \(A \+ A.mT\) / 2, or randomized_svd"),
        ({"A": gaussian(400, 400)}, ValueError, "A must be symmetric"),
        ({"oversample": -1}, ShapeError, "oversample=-1 must be at least 0"),
    ],
)
def test_bad_input(driver, arguments, error, message):
    with pytest.raises(error, match=message):
        driver(**{"A": torch.eye(5), "k": 2, **arguments})


@pytest.mark.parametrize("n", [3, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_indefinite_matrix_is_not_for_nystrom(n, dtype):
    with pytest.raises(ValueError, match=r"A must be positive semidefinite and has an eigenvalue of -0.[0-9]+ or less"):
        nystrom(symmetric(n, [3.0, 1.0, -0.5], dtype), 2, seed=0)
    nystrom(symmetric(n, [3.0, 1.0, -torch.finfo(dtype).eps], dtype), 2, seed=0)


@pytest.mark.gpu
@pytest.mark.parametrize("driver", [randomized_eigh, nystrom])
def test_cuda_equals_cpu(driver):
    A = symmetric(300, 0.8 ** torch.arange(100.0))
    for ours, expected in zip(driver(A.cuda(), 9, seed=0), driver(A, 9, seed=0), strict=True):
        assert ours.is_cuda
        assert torch.allclose(ours.cpu(), expected, atol=1e-8)


@fuzz
@given(operands(square=True), st.booleans(), sizes, sizes, sizes, st.integers(-1, 5), st.booleans())
def test_a_contract_or_a_typed_error(A, semidefinite, k, oversample, n_iter, seed, return_error):
    driver = nystrom if semidefinite else randomized_eigh
    try:
        result = driver(A, k, oversample=oversample, n_iter=n_iter, seed=seed, return_error=return_error)
    except (PantherError, ValueError, TypeError) as error:
        is_a_sentence(error)
        return
    assert is_finite(A)
    values, vectors = (result[1], result[0]) if semidefinite else result[:2]
    assert_eigenpairs(A, values, vectors, k, 30)

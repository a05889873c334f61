"""What every truncating driver satisfies: shapes, ranks, kinds of matrix and ways to hold one; seeds; bad input."""

from typing import NamedTuple

import numpy as np
import pandas
import pytest
import torch
from covering import half_of
from matrices import (
    DTYPES,
    LAYOUTS,
    SIZES,
    assert_eigenpairs,
    assert_orthonormal,
    assert_qb,
    assert_truncated_svd,
    gaussian,
    symmetric,
    with_spectrum,
)

from panther.errors import DTypeError, ShapeError
from panther.linalg import ErrorEstimate, nystrom, qb, randomized_eigh, randomized_svd, rangefinder

SQUARE = [(1, 1), (40, 40), (187, 187), (2, 3, 90, 90), (0, 30, 30), (0, 0)]


class Driver(NamedTuple):
    """A driver, its options, and the assertion for its result with the excess of its error by n_iter."""

    function: object
    options: dict
    check: object
    excess: dict
    square: bool = False
    semidefinite: bool = False

    def __call__(self, A, k, **options):
        return self.function(A, k, **{"seed": 0, **self.options, **options})

    def kinds(self, shape, dtype):
        """Matrices of full rank, of rank one or two, and zero."""
        X = gaussian(*shape, dtype=dtype)
        if not self.square:
            return X, torch.zeros_like(X), torch.ones_like(X)
        if not self.semidefinite:
            return X + X.mT, torch.zeros_like(X), torch.eye(shape[-1], dtype=dtype).expand(shape)
        return X @ X.mT, torch.zeros_like(X), torch.ones_like(X), X[..., :2] @ X[..., :2].mT


def check_basis(A, Q, k, excess):
    assert Q.shape == (*A.shape[:-1], k)
    assert_orthonormal(Q)


DRIVERS = {
    "rangefinder": Driver(rangefinder, {}, check_basis, {0: 0, 2: 0}),
    "qb": Driver(qb, {"block_size": 20}, lambda A, result, k, excess: assert_qb(A, result, k), {0: 0, 2: 0}),
    "svd": Driver(randomized_svd, {"oversample": 3}, assert_truncated_svd, {0: 1.5, 1: 1.3, "auto": 1.1, 100: 1.1}),
    "eigh": Driver(
        randomized_eigh,
        {"oversample": 3},
        lambda A, result, k, excess: assert_eigenpairs(A, result.L, result.V, k, excess),
        {0: 1.6, 1: 1.4, "auto": 1.15, 100: 1.15},
        square=True,
    ),
    "nystrom": Driver(
        nystrom,
        {"oversample": 3},
        lambda A, result, k, excess: assert_eigenpairs(A, result.L, result.U, k, excess),
        {0: 1.6, 1: 1.4, "auto": 1.15, 100: 1.15},
        square=True,
        semidefinite=True,
    ),
}
every_driver = pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)


def parts(result):
    tensors = map(torch.as_tensor, result) if isinstance(result, tuple) else [torch.as_tensor(result)]
    return list(tensors)


@pytest.mark.parametrize(
    ("case", "dtype"), half_of([(name, n) for name, driver in DRIVERS.items() for n in driver.excess], DTYPES)
)
def test_every_rank_of_every_shape(case, dtype):
    name, n_iter = case
    driver = DRIVERS[name]
    for shape in SQUARE if driver.square else SIZES:
        full_rank = min(shape[-2:])
        for k in {0, min(1, full_rank), full_rank // 3, full_rank}:
            for A in driver.kinds(shape, dtype):
                result = driver(A, k, n_iter=n_iter)
                driver.check(A, result, k, driver.excess[n_iter])
                assert not any(part.requires_grad for part in parts(result))


@every_driver
def test_every_way_to_hold_a_matrix(driver):
    for shape in [(140, 140)] if driver.square else [(220, 140), (140, 220), (30, 20)]:
        spectrum = 0.7 ** torch.arange(float(min(shape)))
        A = symmetric(shape[0], spectrum) if driver.square else with_spectrum(*shape, spectrum)
        expected = parts(driver(A, 8))
        for hold in LAYOUTS.values():
            *result, error = driver(held := hold(A), 8, return_error=True)
            kind = np.ndarray if isinstance(held, np.ndarray | pandas.DataFrame) else torch.Tensor
            assert {type(part) for part in (*result, error.frobenius)} == {kind}
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parts(tuple(result)), expected, strict=True))
            assert 0 < error.relative < 1


@every_driver
def test_half_precision_is_computed_in_float32(driver):
    for dtype in (torch.float16, torch.bfloat16):
        A = (symmetric(100, [4.0, 2.0, 1.0]) if driver.square else gaussian(120, 80)).to(dtype)
        result = parts(driver(A, 3))
        assert {part.dtype for part in result} == {torch.float32}
        if not driver.semidefinite:  # in float32, nystrom refuses what is semidefinite to half precision only
            assert all(torch.equal(a, b) for a, b in zip(result, parts(driver(A.float(), 3)), strict=True))


@every_driver
def test_autocast_and_gradients_stay_out(driver):
    A = symmetric(100, [4.0, 2.0, 1.0], torch.float32) if driver.square else gaussian(200, 100, dtype=torch.float32)
    expected = parts(driver(A, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = parts(driver(A.clone().requires_grad_(), 2))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@every_driver
def test_one_seed_one_result_and_the_global_generator(driver):
    A = symmetric(200, 0.8 ** torch.arange(200.0)) if driver.square else gaussian(120, 90)
    state = torch.get_rng_state()
    first, second, other = (driver(A, 5, seed=seed, return_error=True) for seed in (2, 2, 3))
    assert isinstance(first[-1], ErrorEstimate)
    assert torch.equal(first[-1].frobenius, second[-1].frobenius)
    assert all(torch.equal(a, b) for a, b in zip(parts(first), parts(second), strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(0)
    first = parts(driver(A, 5, seed=None))
    torch.manual_seed(0)
    assert torch.equal(first[0], parts(driver(A, 5, seed=None))[0])


BAD = [
    ({"k": 6}, ShapeError, r"k=6 must be at most min\(m, n\) = 5 for A of shape \(5, 5\): use k=5"),
    ({"k": -1}, ShapeError, "k=-1 must be at least 0"),
    ({"k": 2.0}, TypeError, "k must be an integer, not float"),
    ({"n_iter": -1}, ShapeError, "n_iter=-1 must be at least 0"),
    ({"n_iter": 101}, ShapeError, "n_iter=101 must be at most 100"),
    ({"n_iter": "many"}, ValueError, "n_iter='many' must be an integer or \"auto\""),
    ({"seed": -1}, ValueError, "seed"),
    ({"A": torch.ones(5)}, ShapeError, "two dimensions"),
    ({"A": torch.ones(5, 5, dtype=torch.int64)}, DTypeError, "int64 and must be real and floating"),
    ({"A": torch.ones(5, 5, dtype=torch.complex64)}, DTypeError, "complex64 and must be real"),
    ({"A": [[1.0]]}, TypeError, "A must be a tensor"),
    ({"A": torch.full((5, 5), torch.nan)}, ValueError, "A must be finite and has NaN"),
    ({"A": torch.full((100, 100), torch.inf)}, ValueError, "A must be finite and has infinity"),
    ({"A": torch.full((100, 100), torch.nan).to_sparse()}, ValueError, "A must be finite and has NaN"),
    ({"A": torch.full((100, 100), 3e38)}, ValueError, "products of A overflow torch.float32: divide A"),
    ({"A": torch.ones(2, 5, 5).to_sparse()}, ShapeError, "two dimensions"),
]


@every_driver
def test_bad_input(driver):
    for arguments, error, message in BAD:
        with pytest.raises(error, match=message):
            driver(**{"A": torch.eye(5), "k": 2, **arguments})

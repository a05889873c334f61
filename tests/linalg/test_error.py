"""estimate_error: the stated confidence, every kind of approximation, extreme scales, bad input."""

import math
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import scipy.sparse
import scipy.stats
import torch
from fuzzing import fuzz, is_a_sentence
from hypothesis import given
from hypothesis import strategies as st

from panther.errors import DTypeError, ShapeError
from panther.linalg import estimate_error
from panther.linalg.error import _quantile


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("probes", "confidence", "seeds"), [(1, 0.7, 300), (3, 0.9, 300), (10, 0.99, 400)])
def test_the_bound_fails_no_more_often_than_stated(probes, confidence, seeds):
    """The threshold is exceeded once in 30,000 if the bound fails just as often as stated.

    The entries of a batch get the same probes, so that one call serves an error of rank one, a flat and a decaying one.
    """
    decaying = 0.7 ** torch.arange(20, dtype=torch.float64)
    E = torch.stack((gaussian(20, 1) @ gaussian(1, 20, seed=1), torch.eye(20), torch.diag(decaying)))
    zero = torch.zeros_like(E)
    estimates = [estimate_error(E, zero, probes=probes, confidence=confidence, seed=seed) for seed in range(seeds)]
    norms = torch.linalg.matrix_norm(E)
    failures = sum((estimate.upper < norms).int() for estimate in estimates)
    assert (failures <= scipy.stats.binom.isf(1 / 30_000, seeds, 1 - confidence)).all()
    means = torch.stack([estimate.frobenius.square() for estimate in estimates]).mean(0)
    deviation = math.sqrt(2 / probes / seeds)  # of a mean of squares of one singular value, the widest
    assert ((means / norms**2 - 1).abs() <= 4 * deviation).all()


def test_the_quantile_solves_its_equation():
    for failure in [0.5, 1e-3, 1e-15, 1 - 1e-9]:
        for probes in [1, 2, 10, 100, 10_000]:
            x = _quantile(failure, probes)
            assert 0 < x < 1
            assert math.log(x) + 1 - x == pytest.approx(2 * math.log(failure) / probes, rel=1e-6, abs=1e-14)


@pytest.mark.parametrize(("probes", "factor"), [(10, 3.12), (100, 1.33), (10_000, 1.03)])
def test_how_far_the_bound_is_from_the_estimate(probes, factor):
    estimate = estimate_error(gaussian(5, 5), gaussian(5, 5, seed=1), probes=probes, seed=0)
    assert (estimate.upper / estimate.frobenius).item() == pytest.approx(factor, rel=1e-2)


class Factors(NamedTuple):
    """What a driver returns: a tuple that multiplies."""

    U: torch.Tensor
    V: torch.Tensor

    def __matmul__(self, X):
        return self.U @ (self.V.mT @ X)


class Operator:
    """A matrix that only multiplies."""

    def __init__(self, A):
        self._A = A
        self.shape, self.dtype = A.shape, A.dtype

    def __matmul__(self, X):
        return self._A.to(X.dtype) @ X


def test_every_kind_of_matrix_and_approximation_gives_one_estimate():
    U, V = gaussian(30, 4), gaussian(20, 4, seed=1)
    S = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    A, approximation = gaussian(30, 20, seed=2), U * S @ V.mT
    expected = estimate_error(A, approximation, seed=5)
    with warnings.catch_warnings():  # torch's own, that its CSR layout is in beta state
        warnings.simplefilter("ignore")
        kinds = [
            approximation.numpy(),
            approximation.to_sparse_coo(),
            approximation.to_sparse_csr(),
            scipy.sparse.csr_array(approximation.numpy()),
            Operator(approximation),
            (U * S, V.mT),
            [U * S, V.mT],
            ((U * S).numpy(), V.mT.numpy()),
            (U, S, V),
            Factors(U * S, V),
        ]
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float64)  # that of an operator which has none
        try:
            for kind in kinds:
                torch.testing.assert_close(estimate_error(A, kind, seed=5), expected)
            for matrix in (A.numpy(), A.to_sparse_coo(), scipy.sparse.csr_array(A.numpy()), Operator(A)):
                torch.testing.assert_close(estimate_error(matrix, approximation, seed=5), expected)
        finally:
            torch.set_default_dtype(torch.float32)
    single = estimate_error(A, approximation.float(), seed=5)  # and of another precision
    torch.testing.assert_close(single, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(estimate_error(A, Factors((U * S).float(), V.float()), seed=5), single)
    assert abs(expected.relative - expected.frobenius / A.norm()) <= 0.2 * expected.relative


def test_a_batch_is_estimated_entry_by_entry():
    A, B = gaussian(3, 2, 10, 8), gaussian(3, 2, 10, 8, seed=1)
    estimate = estimate_error(A, B, seed=0)
    assert estimate.upper.shape == (3, 2)
    torch.testing.assert_close(estimate.upper[1, 1], estimate_error(A[1, 1], B[1, 1], seed=0).upper)
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    assert (estimate_error(A, (U, S, Vh.mT), seed=0).relative <= 1e-14).all()


def test_gradients_autocast_and_half_precision():
    A, B = gaussian(10, 8).float(), gaussian(10, 8, seed=1).float()
    expected = estimate_error(A, B, seed=0)
    assert torch.equal(estimate_error(A.requires_grad_(), B, seed=0).upper, expected.upper)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(estimate_error(A, B, seed=0).upper, expected.upper)
    half = estimate_error(A.detach().half(), B.half(), seed=0)
    assert half.frobenius.dtype == torch.float32
    torch.testing.assert_close(half.frobenius, expected.frobenius, rtol=1e-2, atol=0)


def test_the_seed_decides():
    A, B = gaussian(10, 8), gaussian(10, 8, seed=1)
    assert torch.equal(estimate_error(A, B, seed=1).upper, estimate_error(A, B, seed=1).upper)
    assert not torch.equal(estimate_error(A, B, seed=1).upper, estimate_error(A, B, seed=2).upper)
    torch.manual_seed(0)
    first = estimate_error(A, B)
    torch.manual_seed(0)
    assert torch.equal(estimate_error(A, B).upper, first.upper)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_scales(dtype):
    for power in [-1.0, -0.5, 0.5, 1.0]:
        exponent = 34 if dtype == torch.float32 else 300
        A, B = gaussian(10, 8), gaussian(10, 8, seed=1)
        scaled = estimate_error(
            (A * 10 ** (power * exponent)).to(dtype), (B * 10 ** (power * exponent)).to(dtype), seed=0
        )
        expected = estimate_error(A, B, seed=0)
        for name in ("frobenius", "upper"):
            ratio = getattr(scaled, name).double() / 10 ** (power * exponent) / getattr(expected, name)
            assert abs(ratio - 1) <= 1e-4
        assert abs(scaled.relative / expected.relative - 1) <= 1e-4


def test_a_small_error_of_a_large_matrix_does_not_vanish():
    A = torch.diag(torch.tensor([1.0, 1e-200], dtype=torch.float64))
    B = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert 1e-200 <= estimate_error(A, B, seed=0).upper <= 1e-199


def test_empty_and_tiny():
    for shape in [(0, 3), (3, 0), (0, 0), (2, 0, 3), (0, 2, 3), (1, 1)]:
        A = gaussian(*shape)
        estimate = estimate_error(A, A, seed=0)
        assert estimate.upper.shape == estimate.relative.shape == shape[:-2]
        assert (estimate.upper == 0).all()
        assert (estimate.relative == 0).all()
        assert estimate_error(torch.zeros(3, 3), torch.eye(3), seed=0).relative == math.inf


A = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((A, A.mT), {}, ShapeError, r"of shape \(4, 3\), must have the same shape; it has the shape \(3, 4\)"),
        ((A, A[:2]), {}, ShapeError, "it has the shape"),
        ((A[None], A), {}, ShapeError, "it has the shape"),
        ((A, (A, A)), {}, ShapeError, "its product with a matrix of shape .* failed"),
        ((A, (A[:2], torch.eye(3))), {}, ShapeError, r"its products have the shape \(2, 10\)"),
        ((A, (torch.ones(4, 2), torch.ones(3), torch.ones(3, 2))), {}, ShapeError, "failed"),
        ((A, Factors(A, A)), {}, ShapeError, "failed"),
        ((A, (A,)), {}, TypeError, "not a tuple of 1: multiply its factors"),
        ((A, None), {}, TypeError, "not NoneType"),
        ((A, ([1.0], [2.0])), {}, TypeError, "factors must be tensors or NumPy arrays, not list"),
        ((A, A.long()), {}, DTypeError, "real and floating"),
        ((A, (A, torch.eye(3).long())), {}, DTypeError, "a factor is torch.int64"),
        ((A, A.to("meta")), {}, ValueError, "the approximation has a shape and no entries"),
        ((A.cfloat(), A), {}, DTypeError, "real and floating"),
        ((A[0], A[0]), {}, ShapeError, "two dimensions"),
        ((A, A * math.nan), {}, ValueError, "the approximation must be finite"),
        ((A * math.nan, A), {}, ValueError, "A must be finite and has NaN"),
        ((A * math.inf, A), {}, ValueError, "A must be finite and has infinity"),
        ((A, A), {"probes": 0}, ShapeError, "probes=0 must be at least 1"),
        ((A, A), {"probes": 10**12}, ShapeError, "must be at most 10000"),
        ((A, A), {"probes": 1.5}, TypeError, "probes must be an integer"),
        ((A, A), {"confidence": 1.0}, ValueError, "confidence=1.0 must be between 0 and 1"),
        ((A, A), {"confidence": math.nan}, ValueError, "confidence=nan"),
        ((A, A), {"confidence": "0.9"}, TypeError, "confidence must be a number, not str"),
        ((A, A), {"seed": -1}, ValueError, "seed"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message) as raised:
        estimate_error(*arguments, **options)
    is_a_sentence(raised.value)


sizes = st.lists(st.integers(0, 60), min_size=2, max_size=3)
poison = st.sampled_from([None, None, None, math.nan, math.inf, 1e300, 1e-300])


@fuzz
@given(
    sizes,
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]),
    st.sampled_from(["dense", "transposed", "expanded", "coo", "pair", "triple", "wrong"]),
    poison,
    st.one_of(st.integers(-1, 40), st.just(10**15)),
    st.sampled_from([0.999, 0.5, 1e-300, 1 - 1e-16, 0.0, 2.0, math.nan]),
    st.integers(-1, 2**63),
)
def test_any_input_gives_a_bound_or_a_typed_error(shape, dtype, kind, bad, probes, confidence, seed):
    *batch, m, n = shape
    A, B = gaussian(*shape).to(dtype), gaussian(*shape, seed=1)
    if bad is not None and B.numel():
        B.view(-1)[probes % B.numel()] = bad
    B = B.to(dtype)
    approximation = {
        "dense": lambda: B,
        "transposed": lambda: B.mT.contiguous().mT,
        "expanded": lambda: B[..., :1].expand(*shape),
        "coo": B.to_sparse_coo,
        "pair": lambda: (B, torch.eye(n, dtype=dtype)),
        "triple": lambda: (B, torch.ones(n, dtype=dtype), torch.eye(n, dtype=dtype)),
        "wrong": lambda: B.mT,
    }[kind]()
    try:
        estimate = estimate_error(A, approximation, probes=probes, confidence=confidence, seed=seed)
    except (ValueError, TypeError) as raised:
        is_a_sentence(raised)
        wrong = dtype == torch.int64 or (kind == "wrong" and m != n) or (kind == "coo" and batch) or bad is not None
        assert wrong or not (1 <= probes <= 40 and 0 < confidence < 1 and 0 <= seed < 2**63)
        return
    assert estimate.upper.shape == tuple(batch)
    assert (estimate.frobenius <= estimate.upper).all()
    assert not estimate.upper.isnan().any()


def test_numpy_scalars_are_numbers():
    assert estimate_error(A, A, probes=np.int64(3), confidence=np.float32(0.9), seed=0).probes == 3


def test_results_of_torch_and_numpy_are_known_by_their_names():
    A = torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for result in (torch.linalg.svd(A), np.linalg.svd(A.numpy())):
        assert estimate_error(A, result, seed=0).relative < 1e-13


def test_arrays_that_torch_cannot_share():
    A = np.random.default_rng(0).standard_normal((20, 10))
    frozen = A.copy()
    frozen.flags.writeable = False
    for odd in (A[::-1], A.astype(">f8"), frozen, np.asfortranarray(A)):
        assert estimate_error(odd, np.array(odd, dtype=float), seed=0).relative == 0
    with pytest.raises(TypeError, match=r"A is a masked array.*A.filled\(0\)"):
        estimate_error(np.ma.masked_greater(A, 1), A)
    for dtype in (object, np.longdouble, int, complex):
        fix = "pass its real and imaginary parts" if dtype is complex else "(use )?A.astype"
        with pytest.raises(DTypeError, match=f"A is a NumPy array of .* must be real and floating: {fix}"):
            estimate_error(A.astype(dtype), A)

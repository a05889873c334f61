"""One contract suite that every sketching operator passes."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from panther.errors import DTypeError, ShapeError
from panther.sketch import (
    SRHT,
    GaussianSketch,
    SignSketch,
    SketchingOperator,
    SparseSketch,
    UniformSketch,
    scaled_sign_sketch,
)

KINDS = [SignSketch, GaussianSketch, UniformSketch, SparseSketch, SRHT]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 1), (3, 130), (40, 7), (0, 5), (5, 0)]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_equal_those_of_the_dense_matrix(kind, size, dtype):
    torch.manual_seed(0)
    S = kind(*size, seed=3, dtype=dtype)
    d, m = S.shape
    dense = S.dense().double()
    assert dense.shape == (d, m)
    for A in (torch.randn(m), torch.randn(m, 4), torch.randn(2, 3, m, 4), torch.randn(4, m).mT):
        A = A.to(dtype)
        assert_close(S @ A, dense @ A.double(), dtype)
    for A in (torch.randn(d), torch.randn(d, 4), torch.randn(2, d, 4)):
        A = A.to(dtype)
        assert_close(S.T @ A, dense.T @ A.double(), dtype)
    for A in (torch.randn(m), torch.randn(4, m), torch.randn(2, 4, m), torch.randn(m, 4).mT):
        A = A.to(dtype)
        assert_close(A @ S.T, A.double() @ dense.T, dtype)
    for A in (torch.randn(d), torch.randn(4, d), torch.randn(2, 4, d)):
        A = A.to(dtype)
        assert_close(A @ S, A.double() @ dense, dtype)


def test_torch_matmul_takes_a_sketch_on_either_side(kind):
    S, A = kind(4, 5, seed=1), torch.randn(5, 4)
    assert torch.equal(torch.matmul(S, A), S @ A)
    assert torch.equal(torch.matmul(A, S), A @ S)
    assert torch.equal(torch.matmul(A.T, S.T), A.T @ S.T)
    assert torch.equal(torch.matmul(S.T, A.T), S.T @ A.T)
    with pytest.raises(TypeError):
        torch.matmul(A, S, out=torch.empty(5, 5))


def test_adjoint_identity(kind):
    torch.manual_seed(0)
    S = kind(5, 33, seed=1, dtype=torch.float64)
    x, y = torch.randn(33, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    assert torch.allclose((S @ x) @ y, x @ (S.T @ y))


def test_gradient_through_the_operand(kind):
    S = kind(3, 5, seed=1, dtype=torch.float64)
    A = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda A: S @ A, A)
    assert torch.autograd.gradcheck(lambda A: A.mT @ S.T, A)


@given(data=st.data(), size=st.tuples(st.integers(0, 40), st.integers(0, 300)))
def test_block_is_the_slice(data, size):
    for kind in KINDS:
        S = kind(*size, seed=9)
        parts = []
        for n in size:
            start = data.draw(st.integers(0, n))
            parts.append(slice(start, data.draw(st.integers(start, n))))
        block = S.block(*parts)
        assert torch.equal(block, S.dense()[parts[0], parts[1]])
        assert torch.equal(S.T.block(parts[1], parts[0]), block.T)
        assert torch.equal(S.block(*(range(*p.indices(n)) for p, n in zip(parts, size, strict=True))), block)


def test_same_seed_same_operator(kind):
    S = kind(4, 50, seed=6)
    assert torch.equal(S.dense(), kind(4, 50, seed=6).dense())
    assert not torch.equal(S.dense(), kind(4, 50, seed=7).dense())
    assert not torch.equal(S.dense(), kind(4, 50, seed=6, stream=1).dense())
    for twin in (pickle.loads(pickle.dumps(S)), copy.deepcopy(S), S.to("cpu"), S.T.T):
        assert torch.equal(twin.dense(), S.dense())
    assert S.to(dtype=torch.float64).dense().dtype == torch.float64


def test_seed_is_drawn_and_recorded(kind):
    torch.manual_seed(0)
    S = kind(4, 5)
    assert type(S.seed) is int
    assert torch.equal(kind(4, 5, seed=S.seed).dense(), S.dense())


def test_isometric_in_expectation(kind):
    """E||Sx||^2 = ||x||^2: the mean over 400 seeds of d = 20 rows has deviation below sqrt(2 / 8000); 6 of them."""
    x = torch.linspace(-1, 1, 37, dtype=torch.float64)
    x /= x.norm()
    norms = [(kind(20, 37, seed=seed, dtype=torch.float64) @ x).square().sum() for seed in range(400)]
    assert abs(torch.stack(norms).mean() - 1) < 6 * math.sqrt(2 / 8000)


def test_attributes(kind):
    S = kind(4, 5, seed=1, dtype=torch.float64, device="cpu")
    assert isinstance(S, SketchingOperator)
    assert (S.shape, S.seed, S.dtype, S.device) == ((4, 5), 1, torch.float64, torch.device("cpu"))
    assert S.T.shape == (5, 4)
    assert "seed=1" in repr(S)


def test_bad_input(kind):
    S = kind(4, 5, seed=1)
    with pytest.raises(ShapeError, match="d=-1 must be at least 0"):
        kind(-1, 5)
    with pytest.raises(TypeError, match="m must be an integer, not float"):
        kind(1, 5.0)
    with pytest.raises(DTypeError, match="must be a floating dtype"):
        kind(1, 5, dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"must be 5 to meet a sketch of shape \(4, 5\)"):
        S @ torch.ones(4, 5)
    with pytest.raises(ShapeError, match=r"dimension -1 of the operand, of shape \(3, 5\), must be 4"):
        torch.ones(3, 5) @ S
    with pytest.raises(ShapeError, match=r"dimension -1 of the operand, of shape \(3, 4\), must be 5"):
        torch.ones(3, 4) @ S.T
    with pytest.raises(DTypeError, match="must be a floating dtype"):
        S.to(dtype=torch.int64)
    with pytest.raises(TypeError, match="must be slices or ranges, not int"):
        S.block(1, 2)
    with pytest.raises(DTypeError, match=r"cast the operand, A.to\(torch.float32\)"):
        S @ torch.ones(5, dtype=torch.float64)
    with pytest.raises(TypeError, match="a sketch multiplies tensors"):
        S @ 3.0
    with pytest.raises(ShapeError, match="step 1"):
        S.block(slice(0, 4, 2), slice(None))
    with pytest.raises(ShapeError, match="step 1"):
        S.block(range(3, 9), slice(None))


def test_sign_sketch_has_no_zeros_and_the_right_scale():
    for dtype in DTYPES:
        assert set(SignSketch(9, 200, seed=0, scale=False, dtype=dtype).dense().unique().tolist()) == {-1.0, 1.0}
    assert torch.allclose(SignSketch(16, 20, seed=0).dense().abs(), torch.tensor(0.25))


def test_scaled_sign_sketch_is_the_operators_matrix():
    matrix = scaled_sign_sketch(4, 6, "cpu", torch.float64, seed=2)
    assert torch.equal(matrix, SignSketch(4, 6, seed=2, dtype=torch.float64).dense())
    torch.manual_seed(1)
    first = scaled_sign_sketch(4, 6)
    torch.manual_seed(1)
    assert torch.equal(first, scaled_sign_sketch(4, 6))

"""A CSR matrix times a dense one against float64, and sparse sketches."""

import pytest
import torch
from covering import half_of
from panther.kernels import csr_matmul, reference
from tolerances import assert_close

from panther.sketch import SparseSketch

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def sparse(counts, m, seed=0):
    """A matrix with so many entries in its rows, in CSR and dense, in float64; a column may hold several of a row."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(counts, dtype=torch.int64)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    index = torch.randint(max(m, 1), (int(starts[-1]),), generator=generator)
    value = torch.randn(len(index), generator=generator, dtype=torch.float64)
    dense = torch.zeros(len(counts), m, dtype=torch.float64)
    dense.index_put_((torch.arange(len(counts)).repeat_interleave(counts), index), value, accumulate=True)
    return (starts, index, value), dense


def check(csr, dense, A, integers=torch.int64):
    starts, index, value = csr
    entries = value if A.dtype is torch.float64 else value.float()
    operands = (starts.to(integers), index.to(integers), entries)
    y = csr_matmul(*operands, A)
    assert y.dtype == A.dtype
    assert y.is_contiguous()
    assert_close(y, dense @ A.double(), A.dtype)
    assert torch.equal(y, csr_matmul(*operands, A))


UNEVEN = {
    "one": ([1], 1),
    "empty rows": ([0, 3, 0, 0, 1, 0], 5),
    "none at all": ([0, 0, 0], 4),
    "one long row": ([1, 0, 300, 2, 0], 50),
    "many short rows": ([1, 0, 2] * 100, 7),
    "growing": (list(range(40)), 64),
}


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (2, 0)])
def test_batches(batch):
    check(*sparse([2, 0, 5], 6), draw(*batch, 6, 5), integers=torch.int32)


def test_no_rows_no_columns():
    check(*sparse([], 6), draw(2, 6, 5))
    check(*sparse([2, 1], 6), draw(2, 6, 0))
    check(*sparse([0, 0], 0), draw(2, 0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(dtype):
    csr, dense = sparse([3, 0, 20, 1], 30)
    check(csr, dense, draw(2, 50, 30, dtype=dtype).mT)
    check(csr, dense, draw(60, 100, dtype=dtype)[::2, 1::3])
    check(csr, dense, draw(30, 2, 40, dtype=dtype).transpose(0, 1))
    check(csr, dense, draw(1, 30, 1, dtype=dtype).expand(3, 30, 9))
    (starts, index, value), dense = sparse([3, 0, 20, 1], 30)
    spread = torch.stack((index, index), dim=1)[:, 0]
    check((starts, spread, value), dense, draw(30, 4, dtype=dtype))


def test_rows_that_no_entry_names_do_not_matter():
    csr = torch.tensor([0, 1, 2]), torch.tensor([0, 2]), torch.ones(2)
    A = torch.tensor([[1.0], [float("nan")], [3.0]])
    assert csr_matmul(*csr, A).tolist() == [[1.0], [3.0]]


def multiply_all(S, exact, d, m, dtype):
    for shape in ((m,), (m, 1), (2, m, 3)):
        A = draw(*shape, dtype=dtype)
        assert_close(S @ A, exact @ A.double(), dtype)
    x, B = draw(2, 5, m, dtype=dtype), draw(d, 3, dtype=dtype)
    assert_close(x @ S.T, x.double() @ exact.mT, dtype)
    assert_close(S.T @ B, exact.mT @ B.double(), dtype)
    assert_close(B.mT @ S, B.mT.double() @ exact, dtype)


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"), half_of([(7, 100), (30, 20), (1, 1), (0, 5), (5, 0)], ("short", "long"), DTYPES)
)
def test_sparse_sketches_multiply_like_their_matrices(shape, axis, dtype):
    d, m = shape
    S = SparseSketch(d, m, axis=axis, seed=1, dtype=dtype)
    exact = SparseSketch(d, m, axis=axis, seed=1, dtype=torch.float64).dense()
    multiply_all(S, exact, d, m, dtype)


def test_count_sketch_multiplies_like_its_matrix():
    S = SparseSketch(7, 100, vec_nnz=1, seed=1)
    multiply_all(S, SparseSketch(7, 100, vec_nnz=1, seed=1, dtype=torch.float64).dense(), 7, 100, torch.float32)


def test_gradients_of_a_sketch():
    S = SparseSketch(6, 20, seed=0)
    exact = SparseSketch(6, 20, seed=0, dtype=torch.float64).dense()
    A = draw(2, 20, 3).requires_grad_()
    B = A.detach().double().requires_grad_()
    for x, M in ((A, S), (B, exact)):
        (first,) = torch.autograd.grad(((M @ x) ** 3).sum(), x, create_graph=True)
        (first**2).sum().backward()
    assert_close(A.grad, B.grad)


def test_autocast_leaves_the_dtype():
    csr, dense = sparse([2, 0, 3], 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(csr, dense, draw(5, 3))
        assert_close(reference.csr_matmul(*csr, draw(5, 3)), dense @ draw(5, 3).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", UNEVEN)
def test_in_torch(rows, dtype):
    counts, m = UNEVEN[rows]
    csr, dense = sparse(counts, m)
    for n in (1, 3):
        check(csr, dense, draw(2, m, n, dtype=dtype))


def test_refusals():
    csr, _ = sparse([2, 1], 4)
    starts, index, value = csr
    with pytest.raises(TypeError, match=r"and a floating A, not .* and torch\.int64: cast them"):
        csr_matmul(starts, index, value, torch.ones(4, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"not \(4,\): use A\[:, None\]"):
        csr_matmul(starts, index, value, torch.ones(4))
    with pytest.raises(ValueError, match=r"must have one dimension, and have shapes \(3,\), \(3,\), \(3, 1\)"):
        csr_matmul(starts, index, value[:, None], torch.ones(4, 1))


def test_forward_derivatives_of_a_sketch():
    S = SparseSketch(4, 30, seed=0)
    A = torch.randn(30, 2)
    assert_close(torch.func.jvp(lambda A: S @ A, (A,), (A,))[1], (S @ A).double())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"starts": torch.zeros(0, dtype=torch.int64)}, ValueError, "starts of d . 1 numbers"),
        ({"value": torch.ones(1)}, ValueError, "as many values as indices, not 3, 1 and 2"),
        ({"index": torch.zeros(2)}, TypeError, "int64 or int32 starts and index"),
        ({"starts": torch.zeros(3)}, TypeError, "int64 or int32 starts and index"),
        ({"value": torch.ones(2, dtype=torch.float16)}, TypeError, "float32 or float64 values"),
        ({"A": torch.ones(3, 2, dtype=torch.int64)}, TypeError, "a floating A"),
        ({"value": torch.ones(2, 1)}, ValueError, "one dimension, and have shapes .*: flatten them"),
    ],
)
def test_bad_csr(change, error, message):
    given = {
        "starts": torch.tensor([0, 2, 2]), "index": torch.tensor([0, 2]), "value": torch.ones(2), "A": torch.ones(3, 2),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        csr_matmul(*{**given, **change}.values())


def test_double_entries_and_half_operand():
    S = SparseSketch(4, 30, seed=0, dtype=torch.float64)
    starts, index, value, _ = S._draw_csr(S._vectors(), False)
    A = torch.randn(30, 2)
    for dtype in (torch.bfloat16, torch.float16):
        out = csr_matmul(starts, index, value.double(), A.to(dtype))
        assert out.dtype is dtype
        assert_close(out, (S.dense() @ A.to(dtype).double()))

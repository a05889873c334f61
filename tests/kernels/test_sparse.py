"""A CSR matrix times a dense one by the Triton kernel against float64, and the sparse sketches that use it."""

import pytest
import torch
from covering import half_of
from panther.kernels import csr_matmul, reference
from tolerances import assert_close

from panther.sketch import SparseSketch

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def draw(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


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
    y = csr_matmul(*(part.to(A.device) for part in operands), A)
    assert y.dtype == A.dtype
    assert y.device == A.device
    assert y.is_contiguous()
    assert_close(y.cpu(), dense @ A.cpu().double(), A.dtype)
    assert torch.equal(y, csr_matmul(*(part.to(A.device) for part in operands), A))


@pytest.fixture
def poisoned(monkeypatch):
    """``torch.empty`` gives NaN, so that an entry that is never written shows."""
    empty = torch.empty

    def fill(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", fill)


UNEVEN = {
    "one": ([1], 1),
    "empty rows": ([0, 3, 0, 0, 1, 0], 5),
    "none at all": ([0, 0, 0], 4),
    "one long row": ([1, 0, 300, 2, 0], 50),
    "many short rows": ([1, 0, 2] * 100, 7),
    "growing": (list(range(40)), 64),
}


@pytest.mark.parametrize(("rows", "n", "dtype"), half_of([*UNEVEN], (1, 3, 33), DTYPES))
def test_rows_of_any_length(device, poisoned, rows, n, dtype):
    counts, m = UNEVEN[rows]
    check(*sparse(counts, m), draw(m, n, dtype=dtype, device=device))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (2, 0)])
def test_batches(device, poisoned, batch):
    check(*sparse([2, 0, 5], 6), draw(*batch, 6, 5, device=device), integers=torch.int32)


def test_no_rows_no_columns(device):
    check(*sparse([], 6), draw(2, 6, 5, device=device))
    check(*sparse([2, 1], 6), draw(2, 6, 0, device=device))
    check(*sparse([0, 0], 0), draw(2, 0, 3, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(device, poisoned, dtype):
    csr, dense = sparse([3, 0, 20, 1], 30)
    check(csr, dense, draw(2, 50, 30, dtype=dtype, device=device).mT)
    check(csr, dense, draw(60, 100, dtype=dtype, device=device)[::2, 1::3])
    check(csr, dense, draw(30, 2, 40, dtype=dtype, device=device).transpose(0, 1))
    check(csr, dense, draw(1, 30, 1, dtype=dtype, device=device).expand(3, 30, 9))
    (starts, index, value), dense = sparse([3, 0, 20, 1], 30)
    spread = torch.stack((index, index), dim=1)[:, 0]
    check((starts, spread, value), dense, draw(30, 4, dtype=dtype, device=device))


def test_offsets_of_64_bits(device, monkeypatch):
    """Sizes that need them do not fit into memory here, so the kernel is told that the sizes do."""
    pytest.importorskip("triton")
    from panther.kernels._triton import sparse as launcher

    kernel = launcher._csr_matmul_kernel

    class Wide:
        def __getitem__(self, grid):
            return lambda *args, WIDE, **constants: kernel[grid](*args, WIDE=True, **constants)

    monkeypatch.setattr(launcher, "_csr_matmul_kernel", Wide())
    check(*sparse([2, 0, 50], 60), draw(2, 60, 5, device=device))


def test_rows_that_no_entry_names_do_not_matter(device):
    csr = torch.tensor([0, 1, 2]), torch.tensor([0, 2]), torch.ones(2)
    A = torch.tensor([[1.0], [float("nan")], [3.0]], device=device)
    assert csr_matmul(*(part.to(device) for part in csr), A).tolist() == [[1.0], [3.0]]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 4, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_sketches_on_cuda(dtype, n):
    S = SparseSketch(1000, 200_000, seed=0, dtype=dtype, device="cuda")
    exact = SparseSketch(1000, 200_000, seed=0, dtype=torch.float64).to_sparse()
    A, B = draw(200_000, n, dtype=dtype, device="cuda"), draw(1000, n, dtype=dtype, device="cuda")
    assert_close((S @ A).cpu(), exact @ A.cpu().double(), dtype)
    assert_close((A.mT.contiguous() @ S.T).cpu(), (exact @ A.cpu().double()).mT, dtype)
    assert_close((S.T @ B).cpu(), exact.mT @ B.cpu().double(), dtype)


def multiply_all(S, exact, d, m, dtype, device):
    for shape in ((m,), (m, 1), (2, m, 3)):
        A = draw(*shape, dtype=dtype, device=device)
        assert_close((S @ A).cpu(), exact @ A.cpu().double(), dtype)
    x, B = draw(2, 5, m, dtype=dtype, device=device), draw(d, 3, dtype=dtype, device=device)
    assert_close((x @ S.T).cpu(), x.cpu().double() @ exact.mT, dtype)
    assert_close((S.T @ B).cpu(), exact.mT @ B.cpu().double(), dtype)
    assert_close((B.mT @ S).cpu(), B.mT.cpu().double() @ exact, dtype)


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"), half_of([(7, 100), (30, 20), (1, 1), (0, 5), (5, 0)], ("short", "long"), DTYPES)
)
def test_sparse_sketches_multiply_like_their_matrices(device, poisoned, shape, axis, dtype):
    d, m = shape
    S = SparseSketch(d, m, axis=axis, seed=1, dtype=dtype, device=device)
    exact = SparseSketch(d, m, axis=axis, seed=1, dtype=torch.float64).dense()
    multiply_all(S, exact, d, m, dtype, device)


def test_count_sketch_multiplies_like_its_matrix(device):
    S = SparseSketch(7, 100, vec_nnz=1, seed=1, device=device)
    multiply_all(S, SparseSketch(7, 100, vec_nnz=1, seed=1, dtype=torch.float64).dense(), 7, 100, torch.float32, device)


def test_sketches_use_the_kernel_where_it_runs(device, monkeypatch):
    def refuse(*args):
        raise AssertionError("torch's product was called")

    monkeypatch.setattr(reference, "csr_matmul", refuse)
    monkeypatch.setattr("panther.sketch.sparse._csr_product", refuse)
    S, A = SparseSketch(5, 20, seed=0, device=device), draw(20, 2, device=device)
    S.T @ (S @ A)
    monkeypatch.setenv("PANTHER_KERNELS", "torch")
    monkeypatch.setattr("panther.sketch.sparse._gathers", lambda device: False)
    with pytest.raises(AssertionError):
        S @ A


def test_gradients_of_a_sketch(device):
    S = SparseSketch(6, 20, seed=0, device=device)
    exact = SparseSketch(6, 20, seed=0, dtype=torch.float64).dense()
    A = draw(2, 20, 3, device=device).requires_grad_()
    B = A.detach().cpu().double().requires_grad_()
    for x, M in ((A, S), (B, exact)):
        (first,) = torch.autograd.grad(((M @ x) ** 3).sum(), x, create_graph=True)
        (first**2).sum().backward()
    assert_close(A.grad.cpu(), B.grad)


def test_backward_is_refused_with_a_reason(device):
    csr, _ = sparse([2, 1], 4)
    starts, index, value = (part.to(device) for part in csr)
    A = draw(4, 2, device=device).requires_grad_()
    y = csr_matmul(starts, index, value.float(), A)
    with pytest.raises(NotImplementedError, match=r"transpose of S in CSR: use panther\.sketch\.SparseSketch"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_operator_passes_opcheck(device, dtype):
    examine(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operator_passes_opcheck_in_torch(dtype):
    examine(torch.device("cpu"), dtype)


def examine(device, dtype):
    csr, _ = sparse([2, 0, 3], 5)
    starts, index, value = (part.to(device) for part in csr)
    for A in (draw(5, 3, dtype=dtype, device=device), draw(2, 3, 5, dtype=dtype, device=device).mT):
        torch.library.opcheck(torch.ops.panther.csr_matmul.default, (starts, index, value.float(), A))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(device, dynamic, backend):
    csr, _ = sparse([2, 0, 3], 5)
    starts, index, value = (part.to(device) for part in csr)

    def function(A):
        return csr_matmul(starts, index, value.float(), A * 2) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    for n in (3, 4):
        A = draw(2, 5, n, device=device)
        assert torch.equal(compiled(A), function(A))


def test_vmap(device):
    csr, _ = sparse([2, 0, 3], 5)
    starts, index, value = (part.to(device) for part in csr)
    A = draw(5, 4, 3, device=device)
    y = torch.vmap(lambda A: csr_matmul(starts, index, value.float(), A), in_dims=1, out_dims=1)(A)
    assert torch.equal(y, csr_matmul(starts, index, value.float(), A.movedim(1, 0)).movedim(0, 1))
    with pytest.raises(NotImplementedError, match="batched over A alone"):
        torch.vmap(lambda v: csr_matmul(starts, index, v, A[:, 0]))(torch.stack([value, value]))


def test_autocast_leaves_the_dtype(device):
    csr, dense = sparse([2, 0, 3], 5)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        check(csr, dense, draw(5, 3, device=device))
        assert_close(reference.csr_matmul(*csr, draw(5, 3)), dense @ draw(5, 3).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", UNEVEN)
def test_in_torch(rows, dtype):
    counts, m = UNEVEN[rows]
    csr, dense = sparse(counts, m)
    for n in (1, 3):
        check(csr, dense, draw(2, m, n, dtype=dtype))


def test_refusals(device):
    csr, _ = sparse([2, 1], 4)
    starts, index, value = (part.to(device) for part in csr)
    with pytest.raises(TypeError, match=r"and a floating A, not .* and torch\.int64: cast them"):
        csr_matmul(starts, index, value, torch.ones(4, 1, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match=r"not \(4,\): use A\[:, None\]"):
        csr_matmul(starts, index, value, torch.ones(4, device=device))
    with pytest.raises(ValueError, match=r"must have one dimension, and have shapes \(3,\), \(3,\), \(3, 1\)"):
        csr_matmul(starts, index, value[:, None], torch.ones(4, 1, device=device))


def test_forward_derivatives_are_refused_and_not_zero():
    starts, index, value = torch.tensor([0, 2, 2]), torch.tensor([0, 2]), torch.tensor([1.0, -1.0])
    A = torch.randn(3, 2)
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative: use panther.sketch.SparseSketch"):
        torch.func.jvp(lambda A: csr_matmul(starts, index, value, A), (A,), (A,))
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


def test_double_entries_and_half_operand(device):
    S = SparseSketch(4, 30, seed=0, dtype=torch.float64, device=device)
    starts, index, value = S._gathered(False)
    A = torch.randn(30, 2, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        out = csr_matmul(starts, index, value.double(), A.to(dtype))
        assert out.dtype is dtype
        assert_close(out.cpu(), (S.dense() @ A.to(dtype).double()).cpu())

"""The Walsh-Hadamard transform, sparse sketches and both linear attentions on a GPU, each against what torch has."""

__all__ = ["attention_problems", "hadamard_problems", "sparse_problems"]

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import panther.kernels
import torch
from panther.kernels import reference
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.timing import Alternative, Problem
from panther.sketch import SparseSketch

Build = Callable[[], Problem]

_HEADS = 16
_DENSE_HADAMARD_LIMIT = 1 << 14
_EXACT_ATTENTION_LIMIT = 1 << 14
# Float32 elements transformed in all; a transform moves them twice.
_HADAMARD_ELEMENTS = 1 << 27


def hadamard_problems(device: str, tiny: bool = False) -> Iterator[tuple[dict[str, Any], Build]]:
    """Return transforms of lengths from one block to several passes, of single vectors and of 64 columns."""
    for dtype in ("float32", "bfloat16"):
        for bits in (4, 6) if tiny else (10, 14, 20):
            for columns in (1, 64):
                batch = 2 if tiny else max(1, (_HADAMARD_ELEMENTS >> bits) // columns)
                facts = {"case": f"n {1 << bits} columns {columns} batch {batch}", "dtype": dtype}
                shape = (batch, 1 << bits, columns)
                yield facts, lambda shape=shape, dtype=dtype: _hadamard(shape, getattr(torch, dtype), device)  # type: ignore[misc]


def _hadamard(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> Problem:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    x = torch.randn(shape, device=device, dtype=dtype)
    N, bits = shape[1], shape[1].bit_length() - 1
    flops = float(x.numel() * bits)

    def exact() -> list[Tensor]:
        return [reference.hadamard_transform(x.double())]

    alternatives: dict[str, Alternative | str] = {
        "panther": Alternative(lambda: panther.kernels.hadamard_transform(x), 2 * x.nbytes, flops, exact),
        "copy": Alternative(lambda: x.clone(), 2 * x.nbytes, 0.0, None),
        "dense": f"a dense matrix is left out above {_DENSE_HADAMARD_LIMIT}, and for batches of columns",
    }
    if N <= _DENSE_HADAMARD_LIMIT and 1 in (shape[0], shape[2]):
        H = reference.hadamard_transform(torch.eye(N, device=device, dtype=dtype))
        alternatives["dense"] = Alternative(
            # One product of two matrices; a batch of products with a column each would read H every time.
            lambda: (x[..., 0] @ H)[..., None] if shape[2] == 1 else H @ x,
            2 * x.nbytes + H.nbytes,
            2.0 * N * x.numel(),
            exact if N <= 1 << 10 else None,
        )
    return Problem(alternatives, "copy", "bfloat16" if dtype is torch.bfloat16 else "float32")


def sparse_problems(device: str, tiny: bool = False) -> Iterator[tuple[dict[str, Any], Build]]:
    """Time a sparse sketch of a tall matrix, four entries a column, and CountSketch, one."""
    for dtype in ("float32", "bfloat16"):
        for m, n, d in ((64, 4, 8),) if tiny else ((65536, 512, 1024), (1 << 20, 64, 4096), (65536, 512, 16384)):
            for vec_nnz in (4, 1):
                facts = {"case": f"{m}x{n} to {d}, vec_nnz {vec_nnz}", "dtype": dtype}
                arguments = (m, n, d, vec_nnz, getattr(torch, dtype), device)
                yield facts, lambda arguments=arguments: _sparse(*arguments)  # type: ignore[misc]


def _sparse(m: int, n: int, d: int, vec_nnz: int, dtype: torch.dtype, device: str) -> Problem:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    A = torch.randn(m, n, device=device, dtype=dtype)
    S = SparseSketch(d, m, vec_nnz, seed=0, device=device, dtype=dtype)
    nnz = vec_nnz * m
    flops = 2.0 * nnz * n
    minimum_bytes = A.nbytes + d * n * A.element_size() + 12 * nnz + 8 * d

    def exact() -> list[Tensor]:
        S64 = SparseSketch(d, m, vec_nnz, seed=0, device=device, dtype=torch.float64)
        return [torch.sparse.mm(S64.to_sparse().to_sparse_coo(), A.double())]

    alternatives: dict[str, Alternative | str] = {"panther": Alternative(lambda: S @ A, minimum_bytes, flops, exact)}
    if dtype is torch.float32:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR tensors a prototype
            csr = S.to_sparse().to_sparse_csr()
        alternatives["torch CSR"] = Alternative(lambda: csr @ A, minimum_bytes, flops, exact)
    else:
        alternatives["torch CSR"] = "measured in float32"
    if d * m * A.element_size() <= 1 << 32:
        matrix = S.dense()
        dense_bytes = minimum_bytes - 12 * nnz - 8 * d + matrix.nbytes
        alternatives["dense"] = Alternative(lambda: matrix @ A, dense_bytes, 2.0 * d * m * n, exact)
    else:
        alternatives["dense"] = "the dense matrix would take more than 4 GB"
    baseline = "torch CSR" if dtype is torch.float32 else "dense"
    return Problem(alternatives, baseline, "bfloat16" if dtype is torch.bfloat16 else "float32")


def attention_problems(device: str, tiny: bool = False) -> Iterator[tuple[dict[str, Any], Build]]:
    """Return attention of sixteen heads over lengths at which quadratic attention goes from fast to very slow."""
    sizes = ((8, 8),) if tiny else ((64, 64), (128, 128), (128, 64))  # features, head dimension
    lengths = (16, 40) if tiny else (16384, 4096, 1024, 65536)  # that with an aim first
    for features, dim in sizes:
        for dtype in ("bfloat16", "float32"):
            for backward in (False, True):
                for length in lengths:
                    facts = {
                        "case": f"length {length} features {features} head dim {dim}",
                        "dtype": dtype,
                        "precision": "high" if dtype == "float32" else "",
                        "direction": "forward+backward" if backward else "forward",
                    }
                    arguments = (length, features, dim, getattr(torch, dtype), device, backward)
                    yield facts, lambda arguments=arguments: _attention(*arguments)  # type: ignore[misc]


def _attention(length: int, features: int, dim: int, dtype: torch.dtype, device: str, backward: bool) -> Problem:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")

    def randn(width: int) -> Tensor:
        return torch.randn(1, _HEADS, length, width, device=device, dtype=dtype)

    q, k, v = randn(features).exp(), randn(features).exp(), randn(dim)  # features are positive
    dense_q, dense_k = randn(dim), randn(dim)
    grad = randn(dim)
    pairs = float(_HEADS) * length * length / 2
    linear_flops = 4.0 * _HEADS * length * features * (dim + 1)  # state updates and reads, one position at a time
    dense_flops = 4.0 * pairs * dim
    times = 3 if backward else 1

    def least(*tensors: Tensor) -> float:  # q, k, v are read and y is written; backward reads all of it, writes as much
        forward = sum(t.nbytes for t in tensors) + v.nbytes
        return forward + (2.0 * forward if backward else 0.0)

    def attention(*operands: Tensor) -> Tensor:
        return panther.kernels.causal_linear_attention(*operands)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def exact() -> list[Tensor]:
        operands = [t.detach().double() for t in (q, k, v)]
        return list(_call(reference.causal_linear_attention, operands, grad.double(), backward)())

    alternatives: dict[str, Alternative | str] = {
        "SDPA": Alternative(
            _call(sdpa, (dense_q, dense_k, v), grad, backward), least(dense_q, dense_k, v), times * dense_flops
        ),
        "panther": "causal_linear_attention is not in this version",
    }
    if hasattr(panther.kernels, "causal_linear_attention"):
        alternatives["panther"] = Alternative(
            _call(attention, (q, k, v), grad, backward),
            least(q, k, v),
            times * linear_flops,
            exact if length <= _EXACT_ATTENTION_LIMIT else None,
        )
    return Problem(alternatives, "SDPA", "bfloat16" if dtype is torch.bfloat16 else "tf32")


def _call(
    function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor, backward: bool
) -> Callable[[], Sequence[Tensor]]:
    """Return the function without gradients, or its gradients."""

    def inference() -> Sequence[Tensor]:
        with torch.no_grad():
            return (function(*operands),)

    leaves = [t.detach().requires_grad_() for t in operands]

    def training() -> Sequence[Tensor]:
        return torch.autograd.grad(function(*leaves), leaves, grad)

    return training if backward else inference

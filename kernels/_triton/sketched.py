"""What the Triton kernels of sketched products and of their gradients share: tiles, loads, and the sum of parts."""

__all__ = ["SketchedProduct", "is_addressable", "reduce_launch"]

import math
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from ._device import cdiv, next_power_of_2
from ._launch import Launch

# Maps x, S1, U1, S2, U2 and the bias to the output (rows, out) and to ``scale x [S1 | U2]`` (rows, 2R).
SketchedProduct = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

_MAX_RANK_TILE = 64
# Largest rank of one float32 product. Three TF32 products need twice the tiles, so a larger rank would spill registers.
_SINGLE_SLICE = 32
# Partial sums that are loaded at once, and entries that a program of the reduction computes.
_PARTS = tl.constexpr(4)
_BLOCK = 256
# If all programs read at most this many bytes of partial sums in total, each program adds them itself: reading them
# from the L2 cache at 5 TB/s takes as long as one more launch, 2.5 us. This is predicted, not measured.
_REDUCED_BYTES = 12 << 20


@triton.jit
def _load(A, i, j, I, J, stride_i, stride_j):  # noqa: E741
    """Load the entries in rows ``i`` and columns ``j`` of a matrix (I, J); entries outside are 0."""
    inside = (i[:, None] < I) & (j[None, :] < J)
    return tl.load(A + i[:, None].to(tl.int64) * stride_i + j[None, :] * stride_j, mask=inside, other=0.0)


@triton.jit
def _pair_reduce_kernel(partial, inner, scale, n, splits, part_stride, BLOCK: tl.constexpr):
    """Add the parts of the inner product in a fixed order, and scale and round them."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, splits, _PARTS, num_stages=3):
        part = start + tl.arange(0, _PARTS)[:, None]
        inside = (part < splits) & (i[None, :] < n)
        total += tl.sum(tl.load(partial + part.to(tl.int64) * part_stride + i[None, :], mask=inside, other=0.0), axis=0)
    tl.store(inner + i, (total * scale).to(inner.dtype.element_ty), mask=i < n)


def reduce_launch(M: int, R: int, splits: int, scale: float) -> Launch:
    """Return the launch on the partial sums and the inner product, which adds them in a fixed order."""
    size = 2 * M * R
    return Launch(_pair_reduce_kernel, (cdiv(size, _BLOCK),), scale, size, splits, size, BLOCK=_BLOCK)


def _row_tile(M: int, most: int, target_rows: float = math.inf) -> int:
    """Return a power of two, at least 16, of at most about ``most``, M and ``target_rows`` rows."""
    rows: int = max(16, min(most, next_power_of_2(M), next_power_of_2(int(min(target_rows, most)))))
    return rows


def _rank_tile(R: int, most: int = _MAX_RANK_TILE) -> int:
    columns: int = min(most, max(16, next_power_of_2(R)))
    return columns


def is_addressable(operand: Tensor) -> bool:
    """Return whether the kernels can address an operand: its second index times the stride must fit 32 bits."""
    return (operand.shape[1] - 1) * operand.stride(1) < 1 << 31

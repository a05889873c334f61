"""A sparse matrix in CSR times a dense one, by gathering. Without atomics every run gives the same result.

A program computes a tile of the output. For each row of the tile it reads K entries at a time, gathers the K rows of
the dense matrix that they name, and adds the products to K sums, which it adds at the end. K is near the average number
of entries per row, which fills the device both if few rows have many entries (a sketch) and if many rows have few
entries (its transpose). The size determines the tile, because tuning could choose a tile that adds in a different
order.
"""

__all__ = ["csr_matmul"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import cdiv, next_power_of_2

# Products that a program of 4 warps computes at once.
_TILE = 1024
# A tile spans one cache line of a row (in bytes), so that all rows of a slab of columns stay in the L2 cache.
_LINE, _SECTOR = 128, 32


@triton.jit
def _csr_matmul_kernel(
    starts, index, value, A, out, rows, columns, stride_b, stride_m, stride_n, row_tiles, column_tiles,
    ROWS: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Rows vary fastest, so that programs that run at the same time gather from the same columns.
    pid = tl.program_id(0)
    b = (pid // row_tiles // column_tiles).to(tl.int64)
    INDEX = tl.int64 if WIDE else tl.int32
    r = (pid % row_tiles).to(INDEX) * ROWS + tl.arange(0, ROWS)
    c = (pid // row_tiles % column_tiles).to(INDEX) * COLS + tl.arange(0, COLS)
    first = tl.load(starts + r, mask=r < rows, other=0).to(INDEX)
    last = tl.load(starts + r + 1, mask=r < rows, other=0).to(INDEX)
    dense = A + b * stride_b + (c * stride_n)[None, None, :]
    acc = tl.zeros((ROWS, K, COLS), dtype=ACC)
    longest = tl.max((last - first).to(tl.int32), axis=0)
    step = 0
    while step < longest:
        k = first[:, None] + step + tl.arange(0, K)[None, :]
        held = k < last[:, None]
        m = tl.load(index + k, mask=held, other=0).to(INDEX)
        v = tl.load(value + k, mask=held, other=0.0).to(ACC)
        mask = held[:, :, None] & (c < columns)[None, None, :]
        acc += v[:, :, None] * tl.load(dense + (m * stride_m)[:, :, None], mask=mask, other=0.0).to(ACC)
        step += K
    total = tl.sum(acc, axis=1)
    if out.dtype.element_ty != tl.float64:  # The interpreter cannot cast float64 to bfloat16.
        total = total.to(tl.float32)
    target = (b * rows + r)[:, None] * columns + c[None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (c < columns)[None, :])


def csr_matmul(starts: Tensor, index: Tensor, value: Tensor, A: Tensor) -> Tensor:  # (*batch, d, n)
    """Compute :func:`panther.kernels.csr_matmul`; all operands except for A are contiguous."""
    rows, (m, n) = starts.numel() - 1, A.shape[-2:]
    out = torch.empty(*A.shape[:-2], rows, n, dtype=A.dtype, device=A.device)
    if not out.numel():
        return out
    if not index.numel():
        return out.zero_()
    source = A.reshape(-1, m, n)
    stride_b, stride_m, stride_n = source.stride()
    # If neighbouring columns of a row are far apart in memory, entries are gathered singly, and only the output needs
    # to span a sector.
    span = (_LINE if stride_n == 1 else _SECTOR) // A.element_size()
    COLS = min(next_power_of_2(n), span)
    K = min(next_power_of_2(cdiv(index.numel(), rows)), _TILE // COLS)
    ROWS = _TILE // COLS // K
    row_tiles, column_tiles = cdiv(rows, ROWS), cdiv(n, COLS)
    double = torch.float64 in (A.dtype, value.dtype)
    # An entry is sought up to the longest row behind the last entry.
    largest = max(n, rows, 2 * index.numel(), (m - 1) * stride_m + (n - 1) * stride_n)
    _csr_matmul_kernel[(row_tiles * column_tiles * source.shape[0],)](
        starts, index, value, source, out, rows, n, stride_b, stride_m, stride_n, row_tiles, column_tiles,
        ROWS=ROWS, K=K, COLS=COLS, ACC=tl.float64 if double else tl.float32, WIDE=largest >= (1 << 31) - _TILE,
    )  # fmt: skip
    return out

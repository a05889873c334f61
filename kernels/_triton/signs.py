"""Signs drawn from the Philox stream, and signs expanded from one bit an entry.

The signs equal :func:`panther.kernels.sign_block` bit for bit: a call gives 128 entries of a row, and a set bit is a
minus sign.
"""

__all__ = ["expand", "fill_signs_"]

import triton
import triton.language as tl
from torch import Tensor

from ..reference.philox import SIGNS_PER_CALL
from ._device import cdiv

_ROWS, _CALLS = 16, 4


@triton.jit
def expand(words, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Unpack words (ROWS, WORDS), 32 entries each from the lowest bit on, to float32 signs (ROWS, 32 WORDS)."""
    bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return 1.0 - 2.0 * tl.reshape(bits, (ROWS, 32 * WORDS)).to(tl.float32)


@triton.jit
def _draw_words(seed, stream, tag, row, call):
    """Draw words (ROWS, 4 CALLS) of the counters ``(row, call, stream, tag)``; row (ROWS, 1), call (1, CALLS)."""
    zero = (row * 0 + call * 0).to(tl.uint64)  # Counters have 32 bits, independent of the width of the scalars.
    c0, c1 = (zero + row).to(tl.uint32), (zero + call).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, (zero + stream).to(tl.uint32), (zero + tag).to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (ROWS, CALLS, 2, 2), the fastest index first over w0, w1
    return tl.reshape(words, (row.shape[0], 4 * call.shape[1]))


@triton.jit(do_not_specialize=("seed", "stream", "tag", "row0", "call0"))
def _fill_signs_kernel(
    out, seed, stream, tag, row0, call0, rows, cols, skip,
    ROWS: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, ROWS)  # The grid has one axis, because only the first axis can have 2^31 programs.
    row = (tl.program_id(0) % row_tiles) * ROWS
    call = (tl.program_id(0) // row_tiles).to(tl.int64) * CALLS
    i = row + tl.arange(0, ROWS)[:, None]
    words = _draw_words(seed, stream, tag, row0 + i, call0 + call + tl.arange(0, CALLS)[None, :])
    tile = expand(words, ROWS, CALLS * 4)
    j = call * 128 - skip + tl.arange(0, CALLS * 128)[None, :]
    mask = (i < rows) & (j >= 0) & (j < cols)
    tl.store(out + i.to(tl.int64) * cols + j, tile.to(out.dtype.element_ty), mask=mask)


def fill_signs_(out: Tensor, seed: int, stream: int, tag: int, row: int, col: int) -> None:
    """Fill ``out`` (rows, cols), contiguous, with the signs from row ``row`` and column ``col`` of the stream."""
    rows, cols = out.shape
    if not out.numel():
        return
    skip = col % SIGNS_PER_CALL
    grid = (cdiv(rows, _ROWS) * cdiv(skip + cols, _CALLS * SIGNS_PER_CALL),)
    _fill_signs_kernel[grid](
        out, seed, stream, tag, row, col // SIGNS_PER_CALL, rows, cols, skip, ROWS=_ROWS, CALLS=_CALLS
    )

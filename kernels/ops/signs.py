"""Random signs, drawn by a Triton kernel on a GPU and by torch elsewhere: the same, bit for bit."""

__all__ = ["sign_block"]

import torch
from torch import Tensor

from .. import reference
from .._backend import interpreting, use_triton
from ._library import define


def sign_block(
    seed: int,
    stream: int,
    tag: int,
    rows: range,
    cols: range,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:  # (len(rows), len(cols)), entries +1 and -1
    """Draw one block of a random sign matrix, without drawing the rest.

    Entry (i, j) takes bit ``j % 32`` of word ``j % 128 // 32`` of the Philox call with counter
    ``(i, j // 128, stream, tag)`` and key ``seed``; a set bit is a minus sign, as in IEEE 754.

    Args:
        seed: The 64-bit key.
        stream: Third counter word: which matrix of this seed.
        tag: Fourth counter word: kind and version of the stream.
        rows: Contiguous range of row indices, step 1.
        cols: Contiguous range of column indices, step 1.
        dtype: Floating dtype of the result.
        device: Device of the result; the drawing happens there.

    Returns:
        A tensor of shape ``(len(rows), len(cols))``.

    Raises:
        ValueError: If ``rows`` or ``cols`` has another step, or a counter word or the seed is out of its range.

    Cost: one Philox call for each row and each 128 columns touched.

    Example:
        >>> sign_block(0, 0, 0, range(2), range(3), dtype=torch.float32, device="cpu").abs().sum().item()
        6.0
    """
    if rows.step != 1 or cols.step != 1 or min(rows.start, cols.start) < 0:
        raise ValueError(f"rows={rows} and cols={cols} must be ranges of step 1 from 0 or more: range(start, stop)")
    if not (0 <= seed < 1 << 64 and 0 <= stream < 1 << 32 and 0 <= tag < 1 << 32):
        raise ValueError(
            f"seed={seed} must be in [0, 2^64), and stream={stream} and tag={tag} in [0, 2^32): take them modulo that"
        )
    device = torch.device(device)
    # A graph that is traced leaves the choice on a GPU to the operator. Layers are often built on the CPU and moved, so
    # there the demand for Triton is one for the interpreter.
    if torch.compiler.is_compiling() or (device.type == "cpu" and not interpreting()):
        by_kernel = device.type == "cuda"
    else:
        by_kernel = use_triton("sign_block", device)
    if not by_kernel:
        return reference.sign_block(seed, stream, tag, rows, cols, dtype=dtype, device=device)
    out = torch.empty(len(rows), len(cols), dtype=dtype, device=device)
    _fill_signs_(out, seed - (seed >> 63 << 64), stream, tag, rows.start, cols.start)  # the key as a signed integer
    return out


def _fill(out: Tensor, seed: int, stream: int, tag: int, row: int, col: int) -> None:
    if use_triton("sign_block", out.device):
        from .._triton import signs

        signs.fill_signs_(out, seed, stream, tag, row, col)
        return
    rows, cols = range(row, row + out.shape[0]), range(col, col + out.shape[1])
    out.copy_(reference.sign_block(seed, stream, tag, rows, cols, dtype=out.dtype, device=out.device))


_fill_signs_ = define(
    "fill_signs_(Tensor(a!) out, int seed, int stream, int tag, int row, int col) -> ()", _fill, lambda *args: None
)

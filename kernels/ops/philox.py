"""Random blocks by their position in a stream: signs by a Triton kernel on a GPU, everything else by torch.

Both give the same bits. In a traced graph every draw is one operator, because Inductor would fuse the ten rounds of
Philox into one expression of exponential length.
"""

__all__ = ["normal_block", "sign_block", "uniform_block", "word_block"]

import torch
from torch import Tensor

from .. import reference
from ..selection import interpreting, use_triton
from .library import define

# Seed, stream, tag, rows and columns.
_Block = tuple[int, int, int, range, range]


def sign_block(
    seed: int, stream: int, tag: int, rows: range, cols: range, *, dtype: torch.dtype, device: torch.device | str
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
        >>> sign_block(
        ...     0, 0, 0, range(2), range(3), dtype=torch.float32, device="cpu"
        ... ).abs().sum().item()
        6.0
    """
    if rows.step != 1 or cols.step != 1 or min(rows.start, cols.start) < 0:
        raise ValueError(f"rows={rows} and cols={cols} must be ranges of step 1 from 0 or more: range(start, stop)")
    if not (0 <= seed < 1 << 64 and 0 <= stream < 1 << 32 and 0 <= tag < 1 << 32):
        raise ValueError(
            f"seed={seed} must be in [0, 2^64), and stream={stream} and tag={tag} in [0, 2^32): reduce them modulo that"
        )
    return _draw("sign", (seed, stream, tag, rows, cols), 1.0, dtype, device)


def word_block(
    seed: int, stream: int, tag: int, rows: range, cols: range, *, device: torch.device | str
) -> Tensor:  # (len(rows), len(cols)), int64
    """Draw one block of a matrix of random 32-bit words, held in int64.

    Entry (i, j) is word ``j % 4`` of the Philox call with counter ``(i, j // 4, stream, tag)`` and key ``seed``.

    Args:
        seed: The 64-bit key.
        stream: Third counter word: which matrix of this seed.
        tag: Fourth counter word: kind and version of the stream.
        rows: Contiguous range of row indices, step 1.
        cols: Contiguous range of column indices, step 1.
        device: Device of the result; the drawing happens there.

    Raises:
        ValueError: If ``rows`` or ``cols`` has another step, or a counter word or the seed is out of its range.

    Cost: one Philox call for each row and each 4 columns touched; 8 bytes per entry, and temporaries of the same size.

    Example:
        >>> word_block(0, 0, 0, range(1), range(2), device="cpu").tolist()
        [[1713891541, 3781805453]]
    """
    return _draw("word", (seed, stream, tag, rows, cols), 1.0, torch.int64, device)


def uniform_block(
    seed: int,
    stream: int,
    tag: int,
    rows: range,
    cols: range,
    *,
    scale: float = 1.0,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:  # (len(rows), len(cols))
    """Draw one block of a matrix of entries uniform in ``(-scale, scale)``.

    Word w of :func:`word_block` gives ``scale (2 w + 1 - 2^32) / 2^32``, in float64, then rounded to ``dtype``.

    Args:
        seed: The 64-bit key.
        stream: Third counter word: which matrix of this seed.
        tag: Fourth counter word: kind and version of the stream.
        rows: Contiguous range of row indices, step 1.
        cols: Contiguous range of column indices, step 1.
        scale: Bound of the entries.
        dtype: Floating dtype of the result.
        device: Device of the result; the drawing happens there.

    Raises:
        ValueError: If ``rows`` or ``cols`` has another step, or a counter word or the seed is out of its range.

    Cost: one Philox call for each row and each 4 columns touched.

    Example:
        >>> uniform_block(
        ...     0, 0, 0, range(1), range(2), dtype=torch.float32, device="cpu"
        ... )
        tensor([[-0.2019,  0.7610]])
    """
    return _draw("uniform", (seed, stream, tag, rows, cols), scale, dtype, device)


def normal_block(
    seed: int,
    stream: int,
    tag: int,
    rows: range,
    cols: range,
    *,
    scale: float = 1.0,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:  # (len(rows), len(cols))
    r"""Draw one block of a matrix of normal entries, of mean 0 and standard deviation ``scale``.

    Box and Muller's transform (Ann. Math. Stat. 29, 1958, doi:10.1214/aoms/1177706645) in float64, then rounded to
    ``dtype``: of the words a, b of a pair of columns, with :math:`\rho = \sqrt{-2 \log((a + 1/2) / 2^{32})}` and
    :math:`\phi = 2 \pi (b + 1/2) / 2^{32}`, the even column gets :math:`\rho \cos \phi`, the odd one
    :math:`\rho \sin \phi`. No entry exceeds 6.77 ``scale``.

    Args:
        seed: The 64-bit key.
        stream: Third counter word: which matrix of this seed.
        tag: Fourth counter word: kind and version of the stream.
        rows: Contiguous range of row indices, step 1.
        cols: Contiguous range of column indices, step 1.
        scale: Standard deviation of the entries.
        dtype: Floating dtype of the result.
        device: Device of the result; the drawing happens there.

    Raises:
        ValueError: If ``rows`` or ``cols`` has another step, or a counter word or the seed is out of its range.

    Cost: one Philox call for each row and each 4 columns touched, and logarithms, sines and cosines in float64.

    Example:
        >>> normal_block(
        ...     0, 0, 0, range(1), range(2), dtype=torch.float32, device="cpu"
        ... )
        tensor([[ 0.9911, -0.9247]])
    """
    return _draw("normal", (seed, stream, tag, rows, cols), scale, dtype, device)


def _draw(kind: str, block: _Block, scale: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    seed, stream, tag, rows, cols = block
    if not torch.compiler.is_compiling() and not _runs_triton(kind, torch.device(device)):
        return reference.random_block(kind, *block, scale=scale, dtype=dtype, device=device)
    out = torch.empty(len(rows), len(cols), dtype=dtype, device=device)
    signed = seed - (seed >> 63 << 64)  # Operators take signed 64-bit integers.
    _fill_block_(out, kind, signed, stream, tag, rows.start, cols.start, scale)
    return out


def _runs_triton(kind: str, device: torch.device) -> bool:
    # Layers are often built on the CPU and moved, so PANTHER_KERNELS=triton must not prevent drawing there.
    return kind == "sign" and (device.type != "cpu" or interpreting()) and use_triton("sign_block", device)


def _fill(out: Tensor, kind: str, seed: int, stream: int, tag: int, row: int, col: int, scale: float) -> None:
    if _runs_triton(kind, out.device):
        from .._triton import signs

        signs.fill_signs_(out, seed, stream, tag, row, col)
        return
    rows, cols = range(row, row + out.shape[0]), range(col, col + out.shape[1])
    key = seed + (1 << 64 if seed < 0 else 0)
    block = reference.random_block(kind, key, stream, tag, rows, cols, scale=scale, dtype=out.dtype, device=out.device)
    out.copy_(block)


_fill_block_ = define(
    "fill_block_(Tensor(a!) out, str kind, int seed, int stream, int tag, int row, int col, float scale) -> ()",
    _fill,
    lambda *args: None,
)

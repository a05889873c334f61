"""Integers of 1 to 8 bits stored in whole bytes, for weights that are quantized, and products with such weights.

A width is split into parts of 8, 4, 2 and 1 bits (3 = 2 + 1, 7 = 4 + 2 + 1). The widest part holds the low bits. A
part of p bits stores 8 / p codes a byte: with n bytes a row, byte k holds the codes of columns k, n + k, 2 n + k, ...
from the low bits up, so that one shift of n bytes gives n neighbouring columns. The parts of a row follow each
other. Codes of 8 bits are stored as int8, minus 128, because torch's kernels read int8.
"""

__all__ = ["code_bytes", "pack_codes", "quantized_matmul", "spread", "unpack_codes"]

import torch
from torch import Tensor

from .._torch import are_transforms_active, is_in_export

MIDDLE = 128  # is subtracted from codes of 8 bits, by flipping their highest bit


def code_bytes(columns: int, bits: int) -> int:
    """Return the number of bytes of a row of codes.

    Args:
        columns: Number of codes.
        bits: Bits of a code, 1 to 8.
    """
    return sum(-(-columns * width // 8) for width, _ in _parts(bits))


def pack_codes(codes: Tensor, bits: int) -> Tensor:  # (rows, columns) -> (rows, code_bytes(columns, bits)), uint8
    """Pack a matrix of codes below ``2^bits``; higher bits are dropped.

    Args:
        codes: Shape ``(rows, columns)``, uint8.
        bits: 1 to 8.

    Returns:
        uint8 of shape ``(rows, code_bytes(columns, bits))``; bits past the last column are zero.

    Example:
        >>> pack_codes(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4)
        tensor([[49,  2]], dtype=torch.uint8)
    """
    if bits == 8:
        return codes ^ MIDDLE
    rows, columns = codes.shape
    packed = []
    for width, shift in _parts(bits):
        length = -(-columns * width // 8)
        runs = codes.new_zeros(rows, 8 // width * length)
        runs[:, :columns] = (codes >> shift) & ((1 << width) - 1)
        part_bytes = codes.new_zeros(rows, length)
        for place, run in enumerate(runs.split(length, 1) if length else ()):
            part_bytes |= run << (place * width)
        packed.append(part_bytes)
    return torch.cat(packed, 1)


def unpack_codes(
    packed: Tensor, bits: int, columns: int, work: Tensor | None = None
) -> Tensor:  # (rows, bytes) -> (rows, columns), uint8
    """Return the codes (rows, columns) that :func:`pack_codes` packed.

    Args:
        packed: The packed codes, uint8.
        bits: Bits of a code, 1 to 8.
        columns: Number of codes in a row.
        work: A buffer for the result, one-dimensional uint8 with at least ``2 * rows * (columns + 71)`` entries.

    Example:
        >>> unpack_codes(torch.tensor([[49, 2]], dtype=torch.uint8), 4, 3)
        tensor([[1, 2, 3]], dtype=torch.uint8)
    """
    if bits == 8:
        return packed ^ MIDDLE
    parts = _parts(bits)
    # vmap does not support ``out``.
    if are_transforms_active() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _unpacked_by_parts(packed, parts, columns)
    if not packed.numel():
        return packed.new_empty(len(packed), columns)
    return _unpacked_by_words(packed, parts, columns, work)


def spread(groups: Tensor, group_size: int | None, columns: int) -> Tensor:  # (rows, groups) -> (rows, columns)
    """Return for each column the value of its group."""
    if group_size is None or columns <= group_size:
        return groups.expand(-1, columns)
    # The last group is separate. If torch 2.13 compiles `repeat_interleave` with a slice, it reads past the end of the
    # groups, and the gradient of an index is wrong.
    full_groups = columns // group_size
    runs = groups[:, :full_groups, None].expand(-1, -1, group_size).flatten(1)
    if full_groups * group_size == columns:
        return runs
    return torch.cat((runs, groups[:, full_groups:].expand(-1, columns - runs.shape[1])), 1)


def quantized_matmul(
    x: Tensor,
    codes: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    inner: Tensor | None = None,
    left: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x Q^T + inner left^T + bias`` with ``Q = scales * (codes - zeros)`` by groups, summed in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    columns = x.shape[1]
    numbers = unpack_codes(codes, bits, columns).to(wide)
    s, z = (spread(part.to(wide), group_size, columns) for part in (scales, zeros))
    weight = ((numbers - z) * s).to(x.dtype)
    y = x.to(wide) @ weight.to(wide).mT
    if inner is not None and left is not None:
        y = y + inner.to(wide) @ left.to(wide).mT
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def _unpacked_by_words(packed: Tensor, parts: list[tuple[int, int]], columns: int, work: Tensor | None) -> Tensor:
    """Return the codes by operations on eight bytes at once, which are faster.

    A shift moves bits into the neighbouring byte. A mask clears them. Rows that are not whole words are padded.
    """
    rows = len(packed)
    has_words = packed.stride(1) == 1 and packed.stride(0) % 8 == 0 and packed.storage_offset() % 8 == 0
    size = rows * max(64 // width * -(-columns * width // 64) for width, _ in parts)
    if work is None:
        work = packed.new_empty(size if len(parts) == 1 else 2 * size)
    if parts == [(4, 0)] and not (has_words and columns % 16 == 0):  # Two operations on bytes are faster than padding.
        nibbles = work[: 2 * packed.numel()].view(rows, 2, -1)
        torch.bitwise_and(packed, 15, out=nibbles[:, 0])
        torch.bitwise_right_shift(packed, 4, out=nibbles[:, 1])
        return nibbles.flatten(1)[:, :columns]
    codes, start = packed, 0
    for width, low in parts:
        length = -(-columns * width // 8)
        part_bytes = packed[:, start : start + length]
        if not has_words or start % 8 or length % 8:
            part_bytes = packed.new_zeros(rows, -(-length // 8) * 8)
            part_bytes[:, :length] = packed[:, start : start + length]
        start += length
        words = part_bytes.view(torch.int64)
        part = (work[size:] if low else work)[: 8 // width * part_bytes.numel()]
        runs = part.view(torch.int64).view(rows, 8 // width, words.shape[1])
        if width == 4:
            runs[:, 0] = words
            torch.bitwise_right_shift(words, 4, out=runs[:, 1])
        else:
            shifts = torch.arange(0, 8, width, device=packed.device)
            torch.bitwise_right_shift(words[:, None], shifts[:, None], out=runs)
        runs &= int.from_bytes(bytes([(1 << width) - 1] * 8))
        if part.numel() == rows * columns:
            entries = part.view(rows, columns)
        else:
            entries = part.view(rows, 8 // width, -1)[:, :, :length].reshape(rows, -1)[:, :columns]
        codes = codes.add_(entries, alpha=1 << low) if low else entries
    return codes


def _unpacked_by_parts(packed: Tensor, parts: list[tuple[int, int]], columns: int) -> Tensor:
    """Return the codes by operations without ``out``: compilers fuse them, and torch.func transforms them."""
    if is_in_export():  # ONNX's exporter writes shifts of signed integers.
        packed = packed.to(torch.int32)
    codes, start = None, 0
    for width, shift in parts:
        length = -(-columns * width // 8)
        part_bytes = packed[:, start : start + length]
        start += length
        runs = [(part_bytes >> place) & ((1 << width) - 1) for place in range(0, 8, width)]
        part = torch.cat(runs, 1)[:, :columns]
        codes = part if codes is None else codes | part << shift
    assert codes is not None  # There is at least one part.
    return codes.to(torch.uint8)


def _parts(bits: int) -> list[tuple[int, int]]:
    """Return width and lowest bit of each part."""
    parts, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            parts.append((width, shift))
            shift += width
    return parts

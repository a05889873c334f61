r"""Random signs, words, uniforms and normals by their position in a stream, in plain torch.

Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
doi:10.1145/2063384.2063405) is a keyed bijection of 128-bit counters. All of it is integer arithmetic, so its
values are the same on every device.
"""

__all__ = ["SIGNS_PER_CALL", "philox_4x32", "random_block"]

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .packing import byte_signs

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_Words = tuple[Tensor, Tensor, Tensor, Tensor]
SIGNS_PER_CALL = 128  # a call gives four words of 32 bits

# Numbers are drawn in slabs of about this many counters, to bound the memory of temporaries, and on a CPU to keep them
# in its cache.
_SLAB, _CPU_SLAB = 1 << 16, 1 << 15


def _next_word(product: Tensor, word: Tensor, key: int) -> Tensor:
    """Return the high word of a 64-bit product, xored with a word and a key.

    The bits above the lower 32 of ``product`` (its sign) and ``word`` do not count: clearing them once, here, takes
    fewer passes over memory than clearing them in each word.
    """
    return ((product >> 32) ^ word).bitwise_xor_(key).bitwise_and_(_MASK)


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor],  # int64 holding 32-bit words, shapes that broadcast
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # the same
    """Apply ten rounds of Philox-4x32.

    Args:
        counter: Four words in ``[0, 2^32)`` as int64 tensors that broadcast together.
        seed: The 64-bit key.

    Returns:
        Four words in ``[0, 2^32)`` as int64 tensors.

    Cost: 100 integer operations for 128 random bits.

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [
        ...     hex(word.item())
        ...     for word in philox_4x32((zero, zero, zero, zero), seed=0)
        ... ]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        # Products of 32-bit words take up to 64 bits, and int64 keeps all of them, the highest as the sign.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _next_word(product1, c1, k0), product1, _next_word(product0, c3, k1), product0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def random_block(
    kind: str,
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
    """Compute a block of ``kind`` "sign", "word", "uniform" or "normal", see ``sign_block`` and so on."""
    out = torch.empty(len(rows), len(cols), dtype=dtype, device=device)
    per_call = SIGNS_PER_CALL if kind == "sign" else 4
    for i, j, part in _slabs(out, cols, per_call):
        words = _philox_block(seed, stream, tag, rows[i], part, per_call, device)
        offset = part.start % per_call
        out[i, j] = _CONVERSIONS[kind](words, scale, dtype)[:, offset : offset + len(part)]
    return out


def _slabs(out: Tensor, cols: range, per_call: int) -> Iterator[tuple[slice, slice, range]]:
    """Yield rows and columns of ``out``, and columns of the stream, in slabs of some calls each."""
    if out.is_meta or not out.numel():
        return
    start, calls = cols.start, _CPU_SLAB if out.device.type == "cpu" else _SLAB
    while start < cols.stop:
        stop = min(start // per_call * per_call + calls * per_call, cols.stop)
        height = max(1, calls * per_call // (stop - start))
        for row in range(0, out.shape[0], height):
            yield slice(row, row + height), slice(start - cols.start, stop - cols.start), range(start, stop)
        start = stop


def _philox_block(
    seed: int, stream: int, tag: int, rows: range, cols: range, per_call: int, device: torch.device | str
) -> _Words:  # (len(rows), calls), int64
    """Return the four words of the calls that cover the columns, ``per_call`` columns a call."""
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)[:, None]
    first, last = cols.start // per_call, (cols.stop - 1) // per_call + 1
    call = torch.arange(first, last, dtype=torch.int64, device=device)
    high = torch.tensor([stream, tag], dtype=torch.int64, device=device)
    return philox_4x32((row, call, high[0], high[1]), seed)


def _in_columns(words: _Words) -> Tensor:
    """Return the four words of each call side by side."""
    return torch.stack(words, dim=-1).flatten(1)


def _signs(words: _Words, scale: float, dtype: torch.dtype) -> Tensor:
    stacked = _in_columns(words)
    index = stacked[..., None] >> torch.arange(0, 32, 8, device=stacked.device) & 255  # bytes, the lowest first
    return byte_signs(dtype, stacked.device).index_select(0, index.flatten()).view(len(stacked), -1)


def _uniforms(words: _Words, scale: float, dtype: torch.dtype) -> Tensor:
    return _in_columns(words).double().mul_(2).add_(1 - 2.0**32).mul_(2.0**-32).mul_(scale)


def _normals(words: _Words, scale: float, dtype: torch.dtype) -> Tensor:
    columns = []
    for a, b in (words[:2], words[2:]):  # Whole words at a time: pairs of columns would be read with gaps.
        rho = a.double().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_().mul_(scale)
        phi = b.double().add_(0.5).mul_(2.0**-32).mul_(2 * math.pi)
        columns += [phi.cos().mul_(rho).to(dtype), phi.sin_().mul_(rho).to(dtype)]
    return torch.stack(columns, dim=-1).flatten(1)


# Functions that convert the words of calls to entries.
_CONVERSIONS: dict[str, Callable[[_Words, float, torch.dtype], Tensor]] = {
    "sign": _signs,
    "word": lambda words, scale, dtype: _in_columns(words),
    "uniform": _uniforms,
    "normal": _normals,
}

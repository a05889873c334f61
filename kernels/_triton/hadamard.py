r"""The fast Walsh-Hadamard transform: a block in registers, and longer transforms in several passes of this kernel.

As :math:`H_{ab} = H_a \otimes H_b`, a digit of r bits of the index is transformed by laying those bits last, (M, 2^r),
and multiplying by :math:`H_{2^r}`: with a butterfly in float32, or, for half precision, with one product on tensor
cores, which takes a third of the instructions. In the same way a transform of length a b is two passes, over views
(b, n) and (a, b n) of each matrix; a pass reads and writes every entry once, which bounds its time.
"""

__all__ = ["hadamard_transform", "passes"]

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import cdiv, dot_operand, next_power_of_2
from ._launch import launch

# Entries that a program usually transforms, and the most bytes of entries: 32 KB of shared memory, with 8 warps.
_TILE, _MOST = 4096, 32768
# Neighbouring columns span at least a sector of memory, and a cache line where that costs nothing. In bytes.
_SECTOR, _LINE = 32, 128


@triton.jit
def _hadamard_matrix(R: tl.constexpr, dtype: tl.constexpr):
    """Return H of R rows, at most 256: the sign of an entry is the parity of the bits that its indices share."""
    i = tl.arange(0, R)
    shared = i[:, None] & i[None, :]
    shared ^= shared >> 4
    return (1 - 2 * ((0x6996 >> (shared & 15)) & 1)).to(dtype)


@triton.jit
def _transform_digit(tile, A: tl.constexpr, R: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, DOT: tl.constexpr):
    """Transform the middle dimension of (A, R, B), R = 2^BITS; return float32 numbers."""
    M: tl.constexpr = A * B
    x = tl.reshape(tl.permute(tl.reshape(tile, (A, R, B)), (0, 2, 1)), (M, R))
    if DOT:
        x = tl.dot(x, _hadamard_matrix(R, x.dtype), input_precision="ieee")
    else:
        # A step deals with the highest bit and makes it the lowest, so that after all of them the order is natural.
        for _ in tl.static_range(BITS):
            a, b = tl.split(tl.permute(tl.reshape(x, (M, 2, R // 2)), (0, 2, 1)))
            x = tl.reshape(tl.join(a + b, a - b), (M, R))
    return tl.permute(tl.reshape(x, (A, B, R)), (0, 2, 1))


@triton.jit
def _hadamard_kernel(
    x, out, stride_b, stride_o, stride_i, stride_c, groups, outer, columns, column_tiles,
    G: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, DIGITS: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Group g is the (2^BITS, columns) matrix at (g // outer, g % outer) of x, and the g-th of out, which is contiguous.
    N: tl.constexpr = 1 << BITS
    pid = tl.program_id(0)
    g = (pid // column_tiles).to(tl.int64) * G + tl.arange(0, G)
    i = tl.arange(0, N).to(tl.int64 if WIDE else tl.int32)
    c = (pid % column_tiles).to(tl.int64 if WIDE else tl.int32) * C + tl.arange(0, C)
    mask = (g < groups)[:, None, None] & (i >= 0)[None, :, None] & (c < columns)[None, None, :]
    source = (g // outer * stride_b + g % outer * stride_o)[:, None, None] + (
        (i * stride_i)[:, None] + (c * stride_c)[None, :]
    )[None, :, :]
    tile = tl.load(x + source, mask=mask, other=0.0)
    tile = dot_operand(tile) if DOT else tile.to(tl.float32)
    narrow: tl.constexpr = tile.dtype
    for digit in tl.static_range(DIGITS):
        tile = _transform_digit(
            tile.to(narrow),
            G * (N >> BITS * (digit + 1) // DIGITS),
            1 << (BITS * (digit + 1) // DIGITS - BITS * digit // DIGITS),
            C << BITS * digit // DIGITS,
            BITS * (digit + 1) // DIGITS - BITS * digit // DIGITS,
            DOT,
        )
    target = (g * columns * N)[:, None, None] + ((i * columns)[:, None] + c[None, :])[None, :, :]
    tl.store(out + target, tl.reshape(tile, (G, N, C)).to(out.dtype.element_ty), mask=mask)


def passes(N: int, n: int, itemsize: int) -> list[int]:
    """Return the number of index bits that each pass over (N, n) matrices deals with, from the lowest.

    There are as few passes as possible. In float32 a block holds 2^13 entries of one column, or 2^10 entries of as many
    columns as fill a sector of memory. Passes after the first one are shortened if they can then read complete cache
    lines: [13] for (2^13, 1) in float32, [12, 8] for (2^20, 1), [10, 10] for (2^20, 64).
    """
    bits = N.bit_length() - 1
    most = (_MOST // _SECTOR).bit_length() - 1
    brief = (_MOST // _LINE).bit_length() - 1
    first = (_MOST // min(next_power_of_2(n) * itemsize, _SECTOR)).bit_length() - 1
    if bits <= first:
        return [bits] if bits else []
    count = -(-(bits - first) // most)  # the number of later passes
    plan = [min(first, max(-(-bits // (count + 1)), bits - count * brief))]
    for left in range(count, 0, -1):
        plan.append(-(-(bits - sum(plan)) // left))
    return plan


def hadamard_transform(x: Tensor) -> Tensor:  # (*batch, N, n) -> the same, contiguous
    """Compute :func:`panther.kernels.hadamard_transform` for float32, float16 and bfloat16, with any strides."""
    N, n = x.shape[-2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    if N == 1:
        return out.copy_(x)
    source = x.reshape(-1, N, n)
    stride_b, stride_i, stride_c = source.stride()
    length = 1
    for bits in passes(N, n, x.element_size()):
        R, groups = 1 << bits, source.shape[0] * N // (length << bits)
        if length == 1:
            _launch(source, out, (stride_b, R * stride_i, stride_i, stride_c), groups, N // R, bits, n)
        else:  # This can be in place, because a program reads only the entries that it writes.
            _launch(out, out, (R * length * n, 0, length * n, 1), groups, 1, bits, length * n)
        length <<= bits
    return out


def _launch(
    x: Tensor, out: Tensor, strides: tuple[int, int, int, int], groups: int, outer: int, bits: int, columns: int
) -> None:
    """Transform ``groups`` matrices of 2^bits rows; not tuned, because tuning repeats an in-place transform."""
    N, sector = 1 << bits, _SECTOR // x.element_size()
    C = min(next_power_of_2(columns), max(sector, _TILE // N))
    G = max(1, _TILE // (N * C))
    tiles = cdiv(columns, C)
    # Butterflies of 2 or 3 bits and products of 4 to 6 bits take the fewest instructions on sm_90. A product of 7 bits
    # would take more instructions than butterflies, and 168 registers.
    dot = x.dtype is not torch.float32 and bits >= 4 and bits != 7
    reach = max((N - 1) * strides[2] + (columns - 1) * strides[3], N * columns)
    launch(
        _hadamard_kernel, (cdiv(groups, G) * tiles,), (x, out), *strides, groups, outer, columns, tiles,
        G=G, BITS=bits, C=C, DIGITS=max(1, bits // (4 if dot else 2)), DOT=dot,
        WIDE=reach + C * max(strides[3], 1) >= 1 << 31, num_warps=8 if G * N * C > _TILE else 4,
    )  # fmt: skip

"""The product with a weight of 2 to 8 bits an entry and its low-rank correction, expanded in registers.

A program computes a tile of outputs: it loads codes of ``BN`` rows and ``BK`` columns, converts them into numbers and
multiplies, so that the expanded weight is never written to memory. If x has few rows, the columns are split over
programs, and a second kernel adds the partial sums in a fixed order. The caller passes the product of x with the right
factor of the correction, which is small.
"""

__all__ = ["is_within", "load_codes", "quantized_plan"]

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import cdiv, dot_operand, dot_precision, multiprocessors, pipeline_stages
from ._launch import Launch
from .sketched import reduce_launch

# A program takes at least this many columns, so that a split does not cost more than it gains.
_LEAST_SPLIT = 256


@triton.jit
def _load_part(
    codes, n, k0, N, K, row_bytes, start,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, BK: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """Return one part (BN, BK) of the codes, see ``pack_codes``: byte b stores the columns b, length + b, ..."""
    length = tl.cdiv(K * WIDTH, 8)
    if WITHIN:  # Divided column by column, neighbours in memory would be loaded byte by byte.
        place = k0 // length
        at = tl.multiple_of(start + k0 - place * length, 16) + tl.arange(0, BK)[None, :]
        inside = n[:, None] < N
    else:
        k = k0 + tl.arange(0, BK)[None, :]
        place = k // length
        at = start + k - place * length
        inside = (n[:, None] < N) & (k < K)
    stored = tl.load(codes + n[:, None].to(tl.int64) * row_bytes + at, mask=inside, other=0).to(tl.int32)
    return ((stored >> (place * WIDTH)) & ((1 << WIDTH) - 1)) << SHIFT


@triton.jit
def load_codes(codes, n, k0, N, K, row_bytes, BITS: tl.constexpr, BK: tl.constexpr, WITHIN: tl.constexpr):
    """Return the codes (BN, BK) of rows n and the columns from k0 as int32.

    WITHIN says that each part stores them in BK neighbouring bytes, from a multiple of 16 bytes of the row on.
    """
    if BITS == 8:
        q = _load_part(codes, n, k0, N, K, row_bytes, 0, 8, 0, BK, WITHIN) ^ 128
    else:
        start = 0
        if BITS & 4:
            q = _load_part(codes, n, k0, N, K, row_bytes, start, 4, 0, BK, WITHIN)
            start += tl.cdiv(K * 4, 8)
            if BITS & 2:
                q += _load_part(codes, n, k0, N, K, row_bytes, start, 2, 4, BK, WITHIN)
                start += tl.cdiv(K * 2, 8)
        else:
            q = _load_part(codes, n, k0, N, K, row_bytes, start, 2, 0, BK, WITHIN)
            start += tl.cdiv(K * 2, 8)
        if BITS & 1:
            q += _load_part(codes, n, k0, N, K, row_bytes, start, 1, BITS & 6, BK, WITHIN)
    return q


@triton.jit
def _dequantized(
    codes, scales, zeros, n, k0, N, K, row_bytes, groups, group_size,
    BITS: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """Return ``scale (code - zero)`` in float32; WHOLE says that all columns of the tile are in one group."""
    q = load_codes(codes, n, k0, N, K, row_bytes, BITS, BK, WITHIN)
    if WHOLE:
        at = n.to(tl.int64) * groups + k0 // group_size
        s = tl.load(scales + at, mask=n < N, other=0.0).to(tl.float32)[:, None]
        z = tl.load(zeros + at, mask=n < N, other=0).to(tl.float32)[:, None]
    else:
        k = k0 + tl.arange(0, BK)
        inside = (n[:, None] < N) & (k[None, :] < K)
        at = n[:, None].to(tl.int64) * groups + (k // group_size)[None, :]
        s = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
    return (q.to(tl.float32) - z) * s


@triton.jit
def _quantized_kernel(
    x, codes, scales, zeros, inner, left, bias, out, M, N, K, R, row_bytes, groups, group_size, split_k, part_stride,
    sx_m, sx_k,
    BITS: tl.constexpr, WHOLE: tl.constexpr, WITHIN: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    acc = tl.zeros((BM, BN), tl.float32)
    stop = tl.minimum((split + 1) * split_k, K)
    for k0 in range(split * split_k, stop, BK):
        k = k0 + tl.arange(0, BK)
        inside = (m[:, None] < M) & (k[None, :] < K)
        a = tl.load(x + m[:, None].to(tl.int64) * sx_m + k[None, :] * sx_k, mask=inside, other=0.0)
        w = _dequantized(
            codes, scales, zeros, n, k0, N, K, row_bytes, groups, group_size, BITS, BK, WHOLE, WITHIN
        ).to(a.dtype)  # fmt: skip
        acc = tl.dot(dot_operand(a), tl.trans(dot_operand(w)), acc, input_precision=PRECISION)
    # The correction and the bias are in the first part of the sum.
    ranks, outputs = tl.where(split == 0, R, 0), tl.where(split == 0, N, 0)
    for r0 in range(0, ranks, BR):
        r = r0 + tl.arange(0, BR)
        rows = (m[:, None] < M) & (r[None, :] < R)
        a = tl.load(inner + m[:, None].to(tl.int64) * R + r[None, :], mask=rows, other=0.0)
        rows = (n[:, None] < N) & (r[None, :] < R)
        b = tl.load(left + n[:, None].to(tl.int64) * R + r[None, :], mask=rows, other=0)
        b = b.to(tl.float32).to(a.dtype)  # The interpreter cannot cast int8 to bfloat16.
        acc = tl.dot(dot_operand(a), tl.trans(dot_operand(b)), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    at = out + split.to(tl.int64) * part_stride + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def is_within(K: int, bits: int, BK: int) -> bool:
    """Return whether all tiles of BK of K columns are within a part, see WITHIN."""
    return K % (8 * BK // (bits & -bits)) == 0  # The lowest bit is the width of the shortest part.


def quantized_plan(
    x: Tensor,  # (rows, in)
    codes: Tensor,  # (out, bytes), see pack_codes
    bits: int,
    scales: Tensor,  # (out, groups)
    zeros: Tensor,  # (out, groups) uint8
    group_size: int,
    inner: Tensor | None,  # (rows, r): x times the right factor and the scales of the correction
    left: Tensor | None,  # (out, r) int8
    bias: Tensor | None,  # (out,)
) -> Callable[..., Tensor]:
    """Return the product of these operands, none of them empty, as a function of all except for the two numbers.

    The function returns ``x Q^T + inner left^T + bias`` with ``Q = scales * (codes - zeros)`` by groups.
    """
    (M, K), (N, row_bytes), groups = x.shape, codes.shape, scales.shape[1]
    rank = 0 if inner is None else inner.shape[1]
    # Widths of two or three parts, ragged groups and float32 take more registers and would spill in larger tiles.
    simple = bits in (2, 4, 8) and group_size % 64 == 0 and x.dtype.itemsize == 2
    BM, BN, BK = (16 if M <= 16 else 64), 64, (64 if simple else 32)
    warps = 4 if (BM, BK) == (64, 64) else 8
    tiles = cdiv(M, BM) * cdiv(N, BN)
    max_splits = max(1, min(multiprocessors(x.device) // tiles, K // _LEAST_SPLIT))
    split_k = cdiv(cdiv(K, max_splits), BK) * BK
    splits = cdiv(K, split_k)
    launch = Launch(
        _quantized_kernel, (cdiv(M, BM), cdiv(N, BN), splits),
        M, N, K, rank, row_bytes, groups, group_size, split_k, M * N, x.stride(0), x.stride(1),
        BITS=bits, WHOLE=group_size % BK == 0, WITHIN=is_within(K, bits, BK), HAS_BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype), BM=BM, BN=BN, BK=BK, BR=16, num_warps=warps, num_stages=pipeline_stages(3),
    )  # fmt: skip
    launch_sum = None if splits == 1 else reduce_launch(M * N, splits, 1.0)

    def product(
        x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, inner: Tensor | None, left: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = x.new_empty(M, N)
        parts = out if splits == 1 else x.new_empty(splits, M, N, dtype=torch.float32)
        # The kernel needs a tensor for each missing operand and never reads it.
        ends = x if inner is None else inner, codes if left is None else left, x if bias is None else bias
        launch(x, codes, scales, zeros, *ends, parts)
        if launch_sum is not None:
            launch_sum(parts, out)
        return out

    return product

"""The product of up to 16 rows with a quantized weight, its correction and its bias, in one kernel.

A program computes all rows of ``BN`` outputs from all columns, so that nothing has to be added after it and results do
not depend on the order of programs. Each program computes the product of x with the right factor again. It is small
for ranks up to 32, and the factor comes from the second-level cache.
"""

__all__ = ["few_rows_plan"]

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import INTERPRETED, cdiv, dot_operand, dot_precision, multiprocessors, next_power_of_2, pipeline_stages
from ._launch import Launch
from .quantized import is_within, load_codes


@triton.jit
def _product_step(a, w, acc, ONE_ROW: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``acc + a w^T``; for one row, products of entries, which are summed over the columns after the loop."""
    if ONE_ROW:
        acc += w.to(tl.float32) * a
    else:  # The interpreter cannot cast int8 to bfloat16.
        w = w.to(tl.float32) if INTERPRETED else w.to(a.dtype)
        acc = tl.dot(dot_operand(a), tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _few_rows_kernel(
    x, codes, scales, zeros, left, right, factor_scales, bias, out,
    M, N, K, R, row_bytes, groups, group_size, length, sx_m, sx_k,
    BITS: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, WITHIN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ONE_ROW: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m, n, r = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, max(BR, 1))
    # One row accumulates (outputs, columns of the tile). Several rows accumulate (rows, outputs).
    acc = tl.zeros((BN, BK) if ONE_ROW else (BM, BN), tl.float32)
    inner = tl.zeros((max(BR, 1), BK) if ONE_ROW else (BM, max(BR, 1)), tl.float32)
    row_starts = codes + n.to(tl.int64) * row_bytes
    for j0 in tl.range(0, length, BK, num_stages=STAGES):
        j = j0 + tl.arange(0, BK)
        stored = tl.zeros((BN, BK), tl.int32)
        if BITS == 2 or BITS == 4 or BITS == 8:  # A byte stores the columns j, length + j, ..., and is read once.
            inside = (n[:, None] < N) & (j[None, :] < length)
            stored = tl.load(row_starts[:, None] + j[None, :], mask=inside, other=0).to(tl.int32)
        for part in tl.static_range(PARTS):
            k = part * length + j
            columns = (j < length) & (k < K)
            if ONE_ROW:
                a = tl.load(x + k * sx_k, mask=columns, other=0.0).to(tl.float32)[None, :]
            else:
                inside = (m[:, None] < M) & columns[None, :]
                a = tl.load(x + m[:, None].to(tl.int64) * sx_m + k[None, :] * sx_k, mask=inside, other=0.0)
            if BITS == 8:
                q = stored ^ 128
            elif BITS == 2 or BITS == 4:
                q = (stored >> (part * BITS)) & ((1 << BITS) - 1)
            else:
                q = load_codes(codes, n, j0, N, K, row_bytes, BITS, BK, WITHIN)
            if WHOLE:  # All columns of the tile are in one group.
                at = n.to(tl.int64) * groups + tl.minimum((part * length + j0) // group_size, groups - 1)
                s = tl.load(scales + at, mask=n < N, other=0.0).to(tl.float32)
                z = tl.load(zeros + at, mask=n < N, other=0).to(tl.int32)
                w = (q - z[:, None]).to(tl.float32)  # The difference is exact in every dtype.
                if ONE_ROW:
                    acc = _product_step(a, w * s[:, None], acc, ONE_ROW, PRECISION)
                else:
                    sums = _product_step(a, w, tl.zeros((BM, BN), tl.float32), ONE_ROW, PRECISION)
                    acc += sums * s[None, :]
            else:
                inside = (n[:, None] < N) & columns[None, :]
                at = n[:, None].to(tl.int64) * groups + (k // group_size)[None, :]
                s = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
                z = tl.load(zeros + at, mask=inside, other=0).to(tl.int32)
                acc = _product_step(a, (q - z).to(tl.float32) * s, acc, ONE_ROW, PRECISION)
            if BR:
                inside = (r[:, None] < R) & columns[None, :]
                factor = tl.load(right + r[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0)
                inner = _product_step(a, factor, inner, ONE_ROW, PRECISION)
    total = tl.sum(acc, 1)[None, :] if ONE_ROW else acc
    if BR:
        c = tl.load(factor_scales + r, mask=r < R, other=0.0).to(tl.float32)
        inside = (n[:, None] < N) & (r[None, :] < R)
        factor = tl.load(left + n[:, None].to(tl.int64) * R + r[None, :], mask=inside, other=0)
        if ONE_ROW:
            total += tl.sum(factor.to(tl.float32) * (tl.sum(inner, 1) * c)[None, :], 1)[None, :]
        else:
            a = (inner * c[None, :]).to(x.dtype.element_ty)
            total = _product_step(a, factor, total, ONE_ROW, PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = out + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def few_rows_plan(
    x: Tensor,  # (rows, in), at most 16 rows
    codes: Tensor,  # (out, bytes), see pack_codes
    bits: int,
    scales: Tensor,  # (out, groups)
    zeros: Tensor,  # (out, groups) uint8
    group_size: int,
    left: Tensor | None,  # (out, r) int8, r at most 32
    right: Tensor | None,  # (r, in) int8
    factor_scales: Tensor | None,  # (r,)
    bias: Tensor | None,  # (out,)
) -> Callable[..., Tensor]:
    """Return the product of these operands, none of them empty, as a function of all except for the two numbers.

    The function returns ``x (Q + left diag(factor_scales) right)^T + bias`` with ``Q = scales * (codes - zeros)`` by
    groups. Codes, scales and zeros are contiguous.
    """
    (M, K), (N, row_bytes), groups = x.shape, codes.shape, scales.shape[1]
    rank = 0 if right is None else len(right)
    parts = 8 // bits if bits in (2, 4, 8) else 1
    length = cdiv(K, parts)
    # One row is multiplied without tensor cores, which would compute 16 rows.
    one_row = M == 1
    simple = parts > 1 or bits == 8
    if one_row:
        BK, warps = 256 if simple else 128, 8
    else:
        BK, warps = (128 if bits in (4, 8) else 64) if x.dtype.itemsize == 2 else 32, 4
    # A tile as long as a group has one scale for each output.
    BK = min(BK, max(16, next_power_of_2(length)))
    if groups > 1 and group_size % 32 == 0:
        while group_size % BK:
            BK //= 2
    # Wide tiles read the right factor less often. A fifth of the multiprocessors may be idle.
    BN = next((width for width in (64, 32) if 5 * cdiv(N, width) >= 4 * multiprocessors(x.device)), 16)
    if not (one_row or simple):
        BN = min(BN, 32)
    launch = Launch(
        _few_rows_kernel, (cdiv(N, BN),),
        M, N, K, rank, row_bytes, groups, group_size, length, x.stride(0), x.stride(1),
        BITS=bits, PARTS=parts, WHOLE=groups == 1 or (group_size % BK == 0 and (parts == 1 or length % BK == 0)),
        WITHIN=not simple and is_within(K, bits, BK), HAS_BIAS=bias is not None, ONE_ROW=one_row,
        PRECISION=dot_precision(x.dtype), BM=1 if one_row else 16, BN=BN, BK=BK,
        BR=max(16, next_power_of_2(rank)) if rank else 0, STAGES=pipeline_stages(3), num_warps=warps,
    )  # fmt: skip

    are_contiguous = all(part is None or part.is_contiguous() for part in (left, right, factor_scales, bias))

    def product(
        x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, left: Tensor | None, right: Tensor | None,
        factor_scales: Tensor | None, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = torch.empty(M, N, dtype=x.dtype, device=x.device)
        # The kernel needs a tensor for each missing operand and never reads it.
        ends: Sequence[Tensor] = (
            codes if left is None else left,
            codes if right is None else right,
            scales if factor_scales is None else factor_scales,
            x if bias is None else bias,
        )
        if not are_contiguous:
            ends = [operand.contiguous() for operand in ends]
        launch(x, codes, scales, zeros, *ends, out)
        return out

    return product

"""The sketched product with sparse sketches, ``scale (x S1 U1 + x U2 S2) + bias``, as two kernels.

The first kernel reads x once and computes parts of the *inner product* ``x [S1 | U2]``: it multiplies tiles of x by S1,
and folds the same tiles, times the signs of the inputs, into R sums. The second kernel writes the output once: it adds
the parts in a fixed order, tiles ``x S1`` over the output, times the signs of the outputs, and adds ``(x U2) S2`` and
the bias. Neither sketch is in memory. No GPU has run these kernels: Triton's interpreter compares them with float64,
and they are compiled ahead of time.

The place of a feature is its number modulo R. A tile of B features has ``B / P`` groups of P places, where P is the
power of two that is at least R, or B for a larger R. If R is not a power of two, up to half of a tile is empty.

Operands are x (rows, in), S1 (in, R), S2 (R, out) and contiguous signs (out,) and (in,) and bias (out,).
"""

__all__ = ["folded_plan"]

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import cdiv, dot_operand, dot_precision, multiprocessors, next_power_of_2, pipeline_stages
from ._launch import Launch
from .sketched import (
    _MAX_RANK_TILE,
    _PARTS,
    _REDUCED_BYTES,
    _SINGLE_SLICE,
    SketchedProduct,
    _rank_tile,
    _row_tile,
    reduce_launch,
)


@triton.jit
def _features(tile, R, B: tl.constexpr, P: tl.constexpr):
    """Return the first place of a tile, its B features, and their places, which are below R for features."""
    rank_tiles = tl.cdiv(R, P)
    i = tl.arange(0, B)
    first = (tile % rank_tiles) * P
    place = first + i % P
    return first, (tile // rank_tiles * (B // P) + i // P) * R + place, place


@triton.jit
def _folded_inner_kernel(
    x, S1, in_signs, partial, M, K, R, tiles, split_tiles, part_stride, sx_m, sx_k, s1_k, s1_r,
    RP: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    r0 = tl.program_id(1) * RP
    r = r0 + tl.arange(0, RP)
    split = tl.program_id(2)
    start = split * split_tiles
    left = tl.zeros((BM, RP), tl.float32)
    right = tl.zeros((BM, BK), tl.float32)
    for tile in range(start, tl.minimum(start + split_tiles, tiles)):
        _, k, place = _features(tile, R, BK, P)
        has_place = (place < R) & (k < K)
        at = x + m[:, None].to(tl.int64) * sx_m + k[None, :] * sx_k
        a = tl.load(at, mask=(m[:, None] < M) & has_place[None, :], other=0.0)
        at = S1 + k[:, None].to(tl.int64) * s1_k + r[None, :] * s1_r
        s = tl.load(at, mask=has_place[:, None] & (r[None, :] < R), other=0.0)
        # The program of these ranks adds the features at their places. With several tiles of ranks, RP is P.
        is_own = has_place & (place >= r0) & (place < r0 + P)
        signs = tl.load(in_signs + k, mask=is_own, other=0.0).to(tl.float32)
        right += a.to(tl.float32) * signs[None, :]
        left = tl.dot(dot_operand(a), dot_operand(s), left, input_precision=PRECISION)
    at = partial + split.to(tl.int64) * part_stride + m[:, None].to(tl.int64) * (2 * R)
    tl.store(at + r[None, :], left, mask=(m[:, None] < M) & (r[None, :] < R))
    r = r0 + tl.arange(0, P)
    right = tl.sum(tl.reshape(right, (BM, BK // P, P)), 1)
    tl.store(at + R + r[None, :], right, mask=(m[:, None] < M) & (r[None, :] < R))


@triton.jit
def _inner_half(
    partial, inner, half, m, r0, M, R, splits, part_stride, scale,
    BM: tl.constexpr, WIDTH: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Return columns from ``r0`` of a half of the inner product, from its parts if REDUCE."""
    r = r0 + tl.arange(0, WIDTH)
    inside = (m[:, None] < M) & (r[None, :] < R)
    at = m[:, None].to(tl.int64) * (2 * R) + half * R + r[None, :]
    if not REDUCE:
        return tl.load(inner + at, mask=inside, other=0.0)
    total = tl.zeros((BM, WIDTH), tl.float32)
    for start in tl.range(0, splits, _PARTS, num_stages=3):
        part = start + tl.arange(0, _PARTS)[:, None, None]
        here = partial + part.to(tl.int64) * part_stride + at[None, :, :]
        total += tl.sum(tl.load(here, mask=(part < splits) & inside[None, :, :], other=0.0), axis=0)
    return (total * scale).to(inner.dtype.element_ty)


@triton.jit
def _folded_outer_kernel(
    partial, out_signs, S2, bias, out, inner, scale, M, N, R, splits, part_stride, tiles, s2_r, s2_n,
    RP: tl.constexpr, RANK_TILES: tl.constexpr, P: tl.constexpr, REDUCE: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    if RANK_TILES == 1:
        a = _inner_half(partial, inner, 0, m, 0, M, R, splits, part_stride, scale, BM, P, REDUCE)
        b = _inner_half(partial, inner, 1, m, 0, M, R, splits, part_stride, scale, BM, RP, REDUCE)
        if REDUCE:  # noqa: SIM102  decided when it is compiled
            if tl.program_id(1) == 0:
                at = inner + m[:, None].to(tl.int64) * (2 * R)
                r = tl.arange(0, P)[None, :]
                tl.store(at + r, a, mask=(m[:, None] < M) & (r < R))
                r = tl.arange(0, RP)[None, :]
                tl.store(at + R + r, b, mask=(m[:, None] < M) & (r < R))
    for tile in range(tl.program_id(1) * tiles, (tl.program_id(1) + 1) * tiles):
        first, n, place = _features(tile, R, BN, P)
        has_place = (place < R) & (n < N)
        acc = tl.zeros((BM, BN), tl.float32)
        for r0 in range(0, RANK_TILES * RP, RP):
            if RANK_TILES > 1:
                b = _inner_half(partial, inner, 1, m, r0, M, R, splits, part_stride, scale, BM, RP, False)
            r = r0 + tl.arange(0, RP)
            at = S2 + r[:, None].to(tl.int64) * s2_r + n[None, :] * s2_n
            s = tl.load(at, mask=(r[:, None] < R) & has_place[None, :], other=0.0)
            acc = tl.dot(dot_operand(b), dot_operand(s), acc, input_precision=PRECISION)
        if RANK_TILES > 1:
            a = _inner_half(partial, inner, 0, m, first, M, R, splits, part_stride, scale, BM, P, False)
        tiled = tl.reshape(tl.broadcast_to(a[:, None, :], (BM, BN // P, P)), (BM, BN)).to(tl.float32)
        acc += tiled * tl.load(out_signs + n, mask=has_place, other=0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=has_place, other=0.0).to(tl.float32)[None, :]
        at = out + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=(m[:, None] < M) & has_place[None, :])


def folded_plan(
    x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None, scale: float
) -> SketchedProduct:
    """Return the product of these operands in two kernels, or three for many partial sums."""
    (M, K), (R, N) = x.shape, S2.shape
    half, programs, precision = x.element_size() == 2, multiprocessors(x.device), dot_precision(x.dtype)
    RP = _rank_tile(R, _MAX_RANK_TILE if half else _SINGLE_SLICE)
    rank_tiles, (BK, BN) = cdiv(R, RP), (64, 128) if half else (32, 32)
    P, k_tiles = _places(K, R, BK)
    BM = _row_tile(M, 64 if half else 32)
    row_tiles = cdiv(M, BM)
    # As for dense signs, a part covers two tiles or more, and there are at most 32.
    splits = max(1, min(32, programs // (row_tiles * rank_tiles), cdiv(k_tiles, 2)))
    split_tiles = cdiv(k_tiles, splits)
    splits, part_stride = cdiv(k_tiles, split_tiles), 2 * M * R
    launch_inner = Launch(
        _folded_inner_kernel, (row_tiles, rank_tiles, splits), M, K, R, k_tiles, split_tiles, part_stride,
        *x.stride(), *S1.stride(),
        RP=RP, P=P, BM=BM, BK=BK, num_warps=8 if BM >= 64 else 4, num_stages=pipeline_stages(3) if half else 2,
        PRECISION=precision,
    )  # fmt: skip
    # Entries that are loaded one by one, with their addresses, would spill registers beside several tiles of ranks.
    is_scattered = half and rank_tiles > 1 and (R % 16 > 0 or N % 16 > 0)
    BN = 64 if is_scattered else BN
    P, n_tiles = _places(N, R, BN)
    # Adding the parts of several tiles of ranks would spill registers.
    reduce = rank_tiles == 1 and 8 * R * M * splits * min(n_tiles, programs) <= _REDUCED_BYTES
    launch_reduce = None if reduce else reduce_launch(2 * M * R, splits, scale)
    parts = splits if reduce else 1
    BM = _row_tile(M, 64 if half else 32, math.sqrt(M * N * x.element_size() / (4 * programs * parts)))
    row_tiles = cdiv(M, BM)
    tiles = min(n_tiles, cdiv(n_tiles * row_tiles, programs))
    launch_outer = Launch(
        _folded_outer_kernel, (row_tiles, cdiv(n_tiles, tiles)), scale, M, N, R, splits, part_stride, tiles,
        *S2.stride(),
        RP=RP, RANK_TILES=rank_tiles, P=P, REDUCE=reduce, HAS_BIAS=bias is not None, BM=BM, BN=BN,
        num_warps=8 if BM >= 64 or is_scattered else 4, num_stages=2, PRECISION=precision,
    )  # fmt: skip

    def product(
        x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, inner = x.new_empty(M, N), x.new_empty(M, 2 * R)
        partial = x.new_empty(splits, M, 2 * R, dtype=torch.float32)
        launch_inner(x, S1, in_signs, partial)
        if launch_reduce is not None:
            launch_reduce(partial, inner)
        launch_outer(partial, out_signs, S2, bias, out, inner)
        return out, inner

    return product


def _places(n: int, R: int, B: int) -> tuple[int, int]:
    """Return the places of a group of features, and the tiles of B features that cover n features."""
    P = min(B, next_power_of_2(R))
    if P < R:
        return P, n // R * cdiv(R, P) + cdiv(n % R, P)
    return P, cdiv(cdiv(n, R), B // P)

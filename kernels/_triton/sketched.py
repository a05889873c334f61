"""The sketched product ``scale x [S1 | U2] [U1 ; S2] + bias``, as one kernel or two.

*Fused*, for many rows and a small rank: a program takes some rows, keeps their ``x [S1 | U2]`` in registers, and
computes the output, so that x is read once and only the output is written. *Pair*, for fewer rows: the first kernel
splits the input features over programs to use all multiprocessors, and the second kernel adds the partial sums in a
fixed order, without atomics, before the outer product.

Operands are x (rows, in), S1 (in, R), S2 (R, out) and a contiguous bias (out,). The signs U1 (R, out) and U2 (in, R)
are dense, or packed, 32 to an int32 word along the features, (R, features / 32) for both, and then contiguous.
"""

__all__ = [
    "SketchedProduct", "fused_plan", "inner_launch", "is_addressable", "outer_launch", "pair_plan", "reduce_launch",
]  # fmt: skip

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import (
    cdiv,
    dot_operand,
    dot_precision,
    has_tensor_memory,
    has_warpgroups,
    is_hip,
    multiprocessors,
    next_power_of_2,
    pipeline_stages,
)
from ._launch import Launch
from .signs import expand

# Maps x, S1, U1, S2, U2 and the bias to the output (rows, out) and to ``scale x [S1 | U2]`` (rows, 2R).
SketchedProduct = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

_MAX_RANK_TILE = 64
# Largest rank of one float32 product. Three TF32 products need twice the tiles, so a larger rank would spill registers.
_SINGLE_SLICE = 32
_PACKED_SINGLE_SLICE = 16  # For the fused kernel with packed signs, which are unpacked in registers.
# Rows from which the pair takes tiles of 128 rows in half precision.
_TALL_ROWS = 4096
# Partial sums that are loaded at once, and entries that a program of the reduction computes.
_PARTS = tl.constexpr(4)
_BLOCK = 256
# If all programs read at most this many bytes of partial sums in total, each program adds them itself: reading them
# from the L2 cache at 5 TB/s takes as long as one more launch, 2.5 us. This is predicted, not measured.
_REDUCED_BYTES = 12 << 20


@triton.jit
def _load(A, i, j, I, J, stride_i, stride_j):  # noqa: E741
    """Load the entries in rows ``i`` and columns ``j`` of a matrix (I, J); entries outside are 0."""
    inside = (i[:, None] < I) & (j[None, :] < J)
    return tl.load(A + i[:, None].to(tl.int64) * stride_i + j[None, :] * stride_j, mask=inside, other=0.0)


@triton.jit
def _unpack(U, f0, r, F, R, BF: tl.constexpr, RP: tl.constexpr):
    """Unpack the signs (RP, BF) of ranks ``r`` and of the features from ``f0``, of F in all."""
    w = f0 // 32 + tl.arange(0, BF // 32)
    inside = (w[None, :] * 32 < F) & (r[:, None] < R)
    words = tl.load(U + r[:, None].to(tl.int64) * tl.cdiv(F, 32) + w[None, :], mask=inside, other=0)
    return expand(words, RP, BF // 32)


@triton.jit
def _inner_tile(
    x, S1, U2, m, k_start, k_stop, r0, M, K, R,
    sx_m, sx_k, s1_k, s1_r, u2_k, u2_r,
    BM: tl.constexpr, BK: tl.constexpr, RP: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``x S1`` and ``x U2`` over input features from ``k_start`` to ``k_stop``, each (BM, RP), in float32."""
    r = r0 + tl.arange(0, RP)
    left = tl.zeros((BM, RP), tl.float32)
    right = tl.zeros((BM, RP), tl.float32)
    for k0 in range(k_start, k_stop, BK):
        k = k0 + tl.arange(0, BK)
        a = _load(x, m, k, M, K, sx_m, sx_k)
        s = _load(S1, k, r, K, R, s1_k, s1_r)
        u = tl.trans(_unpack(U2, k0, r, K, R, BK, RP)) if PACKED else _load(U2, k, r, K, R, u2_k, u2_r)
        u = u.to(a.dtype)
        a = dot_operand(a)
        left = tl.dot(a, dot_operand(s), left, input_precision=PRECISION)
        right = tl.dot(a, dot_operand(u), right, input_precision=PRECISION)
    return left, right


@triton.jit
def _outer_tile(
    left, right, U1, S2, acc, n0, r0, N, R, u1_r, u1_n, s2_r, s2_n,
    BN: tl.constexpr, RP: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``acc + left U1 + right S2`` for the output features from ``n0``."""
    n = n0 + tl.arange(0, BN)
    r = r0 + tl.arange(0, RP)
    s = _load(S2, r, n, R, N, s2_r, s2_n)
    u = (_unpack(U1, n0, r, N, R, BN, RP) if PACKED else _load(U1, r, n, R, N, u1_r, u1_n)).to(left.dtype)
    acc = tl.dot(dot_operand(left), dot_operand(u), acc, input_precision=PRECISION)
    return tl.dot(dot_operand(right), dot_operand(s), acc, input_precision=PRECISION)


@triton.jit
def _bias_tile(bias, n0, N, BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr):
    acc = tl.zeros((BM, BN), tl.float32)
    if HAS_BIAS:
        n = n0 + tl.arange(0, BN)
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _store_inner(inner, left, right, m, r0, M, R, RP: tl.constexpr):
    r = r0 + tl.arange(0, RP)
    inside = (m[:, None] < M) & (r[None, :] < R)
    at = inner + m[:, None].to(tl.int64) * (2 * R) + r[None, :]
    tl.store(at, left, mask=inside)
    tl.store(at + R, right, mask=inside)


@triton.jit
def _load_inner(inner, m, r0, M, R, RP: tl.constexpr):
    r = r0 + tl.arange(0, RP)
    inside = (m[:, None] < M) & (r[None, :] < R)
    at = inner + m[:, None].to(tl.int64) * (2 * R) + r[None, :]
    return tl.load(at, mask=inside, other=0.0), tl.load(at + R, mask=inside, other=0.0)


@triton.jit
def _store_out(out, acc, m, n0, M, N, BN: tl.constexpr):
    n = n0 + tl.arange(0, BN)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out + m[:, None].to(tl.int64) * N + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fused_kernel(
    x, S1, U1, S2, U2, bias, out, inner, scale, M, K, N, R,
    sx_m, sx_k, s1_k, s1_r, u1_r, u1_n, s2_r, s2_n, u2_k, u2_r,
    RP: tl.constexpr, PACKED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, SLICE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    left, right = _inner_tile(
        x, S1, U2, m, 0, K, 0, M, K, R, sx_m, sx_k, s1_k, s1_r, u2_k, u2_r, BM, BK, RP, PACKED, PRECISION
    )
    left = (left * scale).to(inner.dtype.element_ty)
    right = (right * scale).to(inner.dtype.element_ty)
    _store_inner(inner, left, right, m, 0, M, R, RP)
    if SLICE < RP:
        tl.debug_barrier()
    for n0 in range(0, N, BN):
        acc = _bias_tile(bias, n0, N, BM, BN, HAS_BIAS)
        if SLICE == RP:
            acc = _outer_tile(
                left, right, U1, S2, acc, n0, 0, N, R, u1_r, u1_n, s2_r, s2_n, BN, RP, PACKED, PRECISION
            )  # fmt: skip
        else:
            for r0 in range(0, RP, SLICE):
                a, b = _load_inner(inner, m, r0, M, R, SLICE)
                acc = _outer_tile(
                    a, b, U1, S2, acc, n0, r0, N, R, u1_r, u1_n, s2_r, s2_n, BN, SLICE, PACKED, PRECISION
                )  # fmt: skip
        _store_out(out, acc, m, n0, M, N, BN)


@triton.jit
def _pair_inner_kernel(
    x, S1, U2, partial, M, K, R, split_k, part_stride,
    sx_m, sx_k, s1_k, s1_r, u2_k, u2_r,
    RP: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    r0 = tl.program_id(1) * RP
    split = tl.program_id(2)
    k_start = split * split_k
    k_stop = tl.minimum(k_start + split_k, K)
    left, right = _inner_tile(
        x, S1, U2, m, k_start, k_stop, r0, M, K, R, sx_m, sx_k, s1_k, s1_r, u2_k, u2_r, BM, BK, RP, PACKED, PRECISION
    )
    _store_inner(partial + split.to(tl.int64) * part_stride, left, right, m, r0, M, R, RP)


@triton.jit
def _reduce(partial, m, r0, M, R, splits, part_stride, scale, like, BM: tl.constexpr, RP: tl.constexpr):
    """Add the parts of ``x S1`` and ``x U2`` in a fixed order, and scale and round them to the inner result."""
    r = r0 + tl.arange(0, RP)
    rows = (m[:, None] < M) & (r[None, :] < R)
    at = m[:, None].to(tl.int64) * (2 * R) + r[None, :]
    left = tl.zeros((BM, RP), tl.float32)
    right = tl.zeros((BM, RP), tl.float32)
    for start in tl.range(0, splits, _PARTS, num_stages=3):  # Pipelined: no product waits for them.
        part = start + tl.arange(0, _PARTS)[:, None, None]
        inside = (part < splits) & rows[None, :, :]
        here = partial + part.to(tl.int64) * part_stride + at[None, :, :]
        left += tl.sum(tl.load(here, mask=inside, other=0.0), axis=0)
        right += tl.sum(tl.load(here + R, mask=inside, other=0.0), axis=0)
    return (left * scale).to(like), (right * scale).to(like)


@triton.jit
def _pair_reduce_kernel(partial, inner, scale, n, splits, part_stride, BLOCK: tl.constexpr):
    """Reduce as ``_reduce`` does, in a separate kernel, if there are too many sums for every program to read."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, splits, _PARTS, num_stages=3):
        part = start + tl.arange(0, _PARTS)[:, None]
        inside = (part < splits) & (i[None, :] < n)
        total += tl.sum(tl.load(partial + part.to(tl.int64) * part_stride + i[None, :], mask=inside, other=0.0), axis=0)
    tl.store(inner + i, (total * scale).to(inner.dtype.element_ty), mask=i < n)


@triton.jit
def _pair_outer_kernel(
    partial, U1, S2, bias, out, inner, scale, M, N, R, splits, part_stride, tiles,
    u1_r, u1_n, s2_r, s2_n,
    RP: tl.constexpr, RANK_TILES: tl.constexpr, REDUCE: tl.constexpr, PACKED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n0 = tl.program_id(1) * tiles * BN
    like = inner.dtype.element_ty
    if REDUCE and RANK_TILES == 1:
        left, right = _reduce(partial, m, 0, M, R, splits, part_stride, scale, like, BM, RP)
        if n0 == 0:
            _store_inner(inner, left, right, m, 0, M, R, RP)
    for _ in range(tiles):
        acc = _bias_tile(bias, n0, N, BM, BN, HAS_BIAS)
        if REDUCE and RANK_TILES == 1:
            acc = _outer_tile(
                left, right, U1, S2, acc, n0, 0, N, R, u1_r, u1_n, s2_r, s2_n, BN, RP, PACKED, PRECISION
            )  # fmt: skip
        else:
            for r0 in range(0, RANK_TILES * RP, RP):
                if REDUCE:
                    a, b = _reduce(partial, m, r0, M, R, splits, part_stride, scale, like, BM, RP)
                    if n0 == 0:
                        _store_inner(inner, a, b, m, r0, M, R, RP)
                else:
                    a, b = _load_inner(inner, m, r0, M, R, RP)
                acc = _outer_tile(
                    a, b, U1, S2, acc, n0, r0, N, R, u1_r, u1_n, s2_r, s2_n, BN, RP, PACKED, PRECISION
                )  # fmt: skip
        _store_out(out, acc, m, n0, M, N, BN)
        n0 += BN


def fused_plan(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
) -> SketchedProduct:
    """Return the product of these operands in one kernel, for many rows and a rank of at most 64."""
    (M, K), (R, N) = x.shape, S2.shape
    half, RP = x.element_size() == 2, _rank_tile(R)
    packed = _is_packed(U1)
    tile = _fused_tile(M, half, packed, multiprocessors(x.device))
    most = _MAX_RANK_TILE if half else _PACKED_SINGLE_SLICE if packed else _SINGLE_SLICE
    launch = Launch(
        _fused_kernel, (cdiv(M, tile["BM"]),), scale, M, K, N, R,
        *x.stride(), *S1.stride(), *_strides(U1), *S2.stride(), *_strides(U2),
        RP=RP, PACKED=packed, HAS_BIAS=bias is not None, PRECISION=dot_precision(x.dtype),
        SLICE=_rank_tile(R, most), **tile,
    )  # fmt: skip

    def product(
        x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, inner = x.new_empty(M, N), x.new_empty(M, 2 * R)
        launch(x, S1, U1, S2, U2, bias, out, inner)
        return out, inner

    return product


def pair_plan(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
) -> SketchedProduct:
    """Return the product of these operands, of any rank, in two kernels, or three for many partial sums."""
    M, (R, N) = len(x), S2.shape
    half = x.element_size() == 2
    is_tall = half and M >= _TALL_ROWS
    # The factors are read once for each tile of rows. For thousands of rows this takes longer than reading x, unless
    # tiles are tall, and then the input features are divided to have enough programs.
    most_rows = 128 if is_tall else 64 if half else 32
    BN = (64 if is_tall else 128) if half else 32
    launch_inner, splits = inner_launch(x, S1, U2, most_rows)
    reduce = 8 * R * M * splits * min(cdiv(N, BN), multiprocessors(x.device)) <= _REDUCED_BYTES
    launch_reduce = None if reduce else reduce_launch(2 * M * R, splits, scale)
    launch_outer = outer_launch(x, U1, S2, bias, scale, most_rows, BN, splits, 2 * M * R, reduce=reduce)

    def product(
        x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, inner = x.new_empty(M, N), x.new_empty(M, 2 * R)
        partial = x.new_empty(splits, M, 2 * R, dtype=torch.float32)
        launch_inner(x, S1, U2, partial)
        if launch_reduce is not None:
            launch_reduce(partial, inner)
        launch_outer(partial, U1, S2, bias, out, inner)
        return out, inner

    return product


def inner_launch(x: Tensor, S1: Tensor, U2: Tensor, most_rows: int) -> tuple[Launch, int]:
    """Return the launch on x, S1, U2 and the partial sums (splits, rows, 2R) of ``x [S1 | U2]``, and the splits."""
    (M, K), R = x.shape, S1.shape[1]
    half = x.element_size() == 2
    RP = _rank_tile(R, _MAX_RANK_TILE if half else _SINGLE_SLICE)
    rank_tiles, BK = cdiv(R, RP), 64 if half else 32
    BM = _row_tile(M, most_rows)
    row_tiles = cdiv(M, BM)
    # A partial sum covers two tiles of input features or more. There are at most 32, because the next kernel reads them
    # many times.
    splits = max(1, min(32, multiprocessors(x.device) // (row_tiles * rank_tiles), cdiv(K, 2 * BK)))
    split_k = cdiv(cdiv(K, splits), BK) * BK
    splits = cdiv(K, split_k)
    launch = Launch(
        _pair_inner_kernel, (row_tiles, rank_tiles, splits), M, K, R, split_k, 2 * M * R,
        *x.stride(), *S1.stride(), *_strides(U2),
        RP=RP, BM=BM, BK=BK, num_warps=8 if BM >= 64 else 4, num_stages=pipeline_stages(3) if half else 2,
        PACKED=_is_packed(U2), PRECISION=dot_precision(x.dtype),
    )  # fmt: skip
    return launch, splits


def reduce_launch(size: int, splits: int, scale: float) -> Launch:
    """Return the launch on partial sums and a result of ``size`` numbers, which adds them in a fixed order."""
    return Launch(_pair_reduce_kernel, (cdiv(size, _BLOCK),), scale, size, splits, size, BLOCK=_BLOCK)


def outer_launch(
    like: Tensor,  # (rows, *)
    U1: Tensor,
    S2: Tensor,
    bias: Tensor | None,
    scale: float,
    most_rows: int,
    BN: int,
    splits: int,
    part_stride: int,
    *,
    reduce: bool,
) -> Launch:
    """Return the launch on the partial sums, U1, S2, the bias, the output and the inner product.

    With ``reduce`` it adds the partial sums to the inner product, which it reads otherwise.
    """
    M, (R, N) = len(like), S2.shape
    half, programs = like.element_size() == 2, multiprocessors(like.device)
    RP = _rank_tile(R, _MAX_RANK_TILE if half else _SINGLE_SLICE)
    rank_tiles, n_tiles = cdiv(R, RP), cdiv(N, BN)
    # Every tile of rows reads the factors, and every program reads the partial sums of its rows, both through the L2
    # cache. This height of a tile minimizes the bytes read.
    parts = splits if reduce else 1
    BM = _row_tile(M, most_rows, math.sqrt(M * N * like.element_size() / (4 * programs * parts)))
    row_tiles = cdiv(M, BM)
    tiles = min(n_tiles, cdiv(n_tiles * row_tiles, programs))
    # Packed signs with float32 as three TF32 products, and reducing several tiles of ranks, need more registers than
    # four warps have.
    warps = 8 if BM >= 64 or (_is_packed(U1) and not half) or (reduce and rank_tiles > 1) else 4
    return Launch(
        _pair_outer_kernel, (row_tiles, cdiv(n_tiles, tiles)), scale, M, N, R, splits, part_stride, tiles,
        *_strides(U1), *S2.stride(),
        RP=RP, RANK_TILES=rank_tiles, REDUCE=reduce, HAS_BIAS=bias is not None, BM=BM, BN=BN,
        num_warps=warps, num_stages=2, PACKED=_is_packed(U1), PRECISION=dot_precision(like.dtype),
    )  # fmt: skip


def _fused_tile(M: int, half: bool, packed: bool, multiprocessors: int) -> dict[str, int]:
    """Return the tile of the fused kernel, its warps and the depth of its pipeline.

    A rule instead of measurements in every process, so that all ranks choose alike. It is made from the registers and
    the shared memory of compiled kernels, and no GPU has confirmed it. A tile of more rows reads the factors less
    often. The rule takes the largest tile with which three quarters of the multiprocessors have a program. A
    multiprocessor needs about 20 KB of x on the way to fill the memory system of an H200: 4.3 TB/s shared by 132, and a
    latency of 0.6 us. The pipeline has one tile less on the way than it has stages: 20, 24 or 32 KB in half precision.
    """

    def fills(rows: int) -> bool:
        return 4 * cdiv(M, rows) >= 3 * multiprocessors

    if is_hip():
        BM, BK, BN, warps, stages = (64, 64, 128, 4, 1) if half else (64, 32, 64, 4, 1)
    elif not half:
        # Three TF32 products of dense operands fit the asynchronous matrix units of sm_90, which take 64 rows.
        BM, BK, BN, warps, stages = 64 if not packed and has_warpgroups() and fills(64) else 32, 32, 32, 8, 3
    else:
        BM, BK, BN = max((rows for rows in (128, 64) if fills(rows)), default=32), 64, 64
        warps, stages = {128: (8, 3), 64: (4, 4), 32: (4, 6)}[BM]
        if BM == 128 and not packed and has_tensor_memory():
            BN = 128  # Triton 3.9 spills two registers with 64.
    return {"BM": BM, "BK": BK, "BN": BN, "num_warps": warps, "num_stages": stages}


def _row_tile(M: int, most: int, target_rows: float = math.inf) -> int:
    """Return a power of two, at least 16, of at most about ``most``, M and ``target_rows`` rows."""
    rows: int = max(16, min(most, next_power_of_2(M), next_power_of_2(int(min(target_rows, most)))))
    return rows


def _rank_tile(R: int, most: int = _MAX_RANK_TILE) -> int:
    columns: int = min(most, max(16, next_power_of_2(R)))
    return columns


def is_addressable(operand: Tensor) -> bool:
    """Return whether the kernels can address an operand: its second index times the stride must fit 32 bits.

    Words of signs must be contiguous, because the kernels take no strides for them.
    """
    if _is_packed(operand):
        return operand.is_contiguous()
    return (operand.shape[1] - 1) * operand.stride(1) < 1 << 31


def _strides(U: Tensor) -> tuple[int, ...]:
    """Return the strides of dense signs, or zeros for packed words, whose layout is fixed."""
    return (0, 0) if _is_packed(U) else U.stride()


def _is_packed(U: Tensor) -> bool:
    return not U.is_floating_point()

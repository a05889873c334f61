"""The halves of the sketched product by the two kernels of the *pair*, launched separately, on dense signs."""

__all__ = ["pair_inner", "pair_outer"]

import math

import torch
from torch import Tensor

from . import sketched as pair
from ._device import cdiv, dot_precision, multiprocessors, pipeline_stages


def pair_inner(x: Tensor, S1: Tensor, U2: Tensor, scale: float) -> Tensor:  # (rows, 2R)
    """Return ``scale x [S1 | U2]``: parts over the input features, added in a fixed order by a second kernel."""
    (M, K), R = x.shape, S1.shape[1]
    x, S1, U2 = pair._addressable(x, S1, U2)
    half = x.element_size() == 2
    RP = pair._rank_tile(R, pair._MAX_RANK_TILE if half else pair._SINGLE_SLICE)
    rank_tiles, BK = cdiv(R, RP), 64 if half else 32
    BM = pair._row_tile(M, 64 if half else 32)
    row_tiles = cdiv(M, BM)
    splits = max(1, min(32, multiprocessors(x.device) // (row_tiles * rank_tiles), cdiv(K, 2 * BK)))
    split_k = cdiv(cdiv(K, splits), BK) * BK
    splits = cdiv(K, split_k)
    partial, inner = x.new_empty(splits, M, 2 * R, dtype=torch.float32), x.new_empty(M, 2 * R)
    pair._pair_inner_kernel[(row_tiles, rank_tiles, splits)](
        x, S1, U2, partial, M, K, R, split_k, partial.stride(0), *x.stride(), *S1.stride(), *U2.stride(),
        RP=RP, BM=BM, BK=BK, PACKED=False, PRECISION=dot_precision(x.dtype),
        num_warps=8 if BM == 64 else 4, num_stages=pipeline_stages(3) if half else 2,
    )  # fmt: skip
    pair._pair_reduce_kernel[(cdiv(M * 2 * R, pair._BLOCK),)](
        partial, inner, scale, M * 2 * R, splits, partial.stride(0), BLOCK=pair._BLOCK
    )
    return inner


def pair_outer(inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:  # (rows, out)
    """Return ``inner [U1 ; S2] + bias``."""
    M, (R, N) = len(inner), S2.shape
    inner = inner.contiguous()  # The kernel takes no strides for it.
    U1, S2 = pair._addressable(U1, S2)
    half = inner.element_size() == 2
    RP = pair._rank_tile(R, pair._MAX_RANK_TILE if half else pair._SINGLE_SLICE)
    rank_tiles, BN = cdiv(R, RP), 128 if half else 32
    programs = multiprocessors(inner.device)
    n_tiles = cdiv(N, BN)
    target_rows = math.sqrt(M * N * inner.element_size() / (4 * programs))
    BM = pair._row_tile(M, 64 if half else 32, target_rows)
    row_tiles = cdiv(M, BM)
    tiles = min(n_tiles, cdiv(n_tiles * row_tiles, programs))
    out = inner.new_empty(M, N)
    # ``inner`` also takes the place of the partial sums, which are not read without REDUCE.
    pair._pair_outer_kernel[(row_tiles, cdiv(n_tiles, tiles))](
        inner, U1, S2, bias, out, inner, 1.0, M, N, R, 1, 0, tiles, *U1.stride(), *S2.stride(),
        RP=RP, RANK_TILES=rank_tiles, REDUCE=False, HAS_BIAS=bias is not None, BM=BM, BN=BN, PACKED=False,
        PRECISION=dot_precision(inner.dtype), num_warps=8 if BM == 64 else 4, num_stages=2,
    )  # fmt: skip
    return out

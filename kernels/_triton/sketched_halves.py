"""The halves of the sketched product by the two kernels of the *pair*, launched separately, on dense signs."""

__all__ = ["pair_inner_plan", "pair_outer_plan"]

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import sketched as pair
from ._device import cdiv, dot_precision, multiprocessors, pipeline_stages
from ._launch import Launch


def pair_inner_plan(x: Tensor, S1: Tensor, U2: Tensor, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the function of x, S1 and U2 that computes ``scale x [S1 | U2]``.

    A kernel computes parts over the input features, and a second kernel adds them in a fixed order.
    """
    (M, K), R = x.shape, S1.shape[1]
    half = x.element_size() == 2
    RP = pair._rank_tile(R, pair._MAX_RANK_TILE if half else pair._SINGLE_SLICE)
    rank_tiles, BK = cdiv(R, RP), 64 if half else 32
    BM = pair._row_tile(M, 64 if half else 32)
    row_tiles = cdiv(M, BM)
    splits = max(1, min(32, multiprocessors(x.device) // (row_tiles * rank_tiles), cdiv(K, 2 * BK)))
    split_k = cdiv(cdiv(K, splits), BK) * BK
    splits = cdiv(K, split_k)
    part_stride = 2 * M * R
    launch_inner = Launch(
        pair._pair_inner_kernel, (row_tiles, rank_tiles, splits), M, K, R, split_k, part_stride,
        *x.stride(), *S1.stride(), *U2.stride(),
        RP=RP, BM=BM, BK=BK, PACKED=False, PRECISION=dot_precision(x.dtype),
        num_warps=8 if BM == 64 else 4, num_stages=pipeline_stages(3) if half else 2,
    )  # fmt: skip
    launch_reduce = Launch(
        pair._pair_reduce_kernel, (cdiv(part_stride, pair._BLOCK),), scale, part_stride, splits, part_stride,
        BLOCK=pair._BLOCK,
    )  # fmt: skip

    def product(x: Tensor, S1: Tensor, U2: Tensor) -> Tensor:
        partial, inner = x.new_empty(splits, M, 2 * R, dtype=torch.float32), x.new_empty(M, 2 * R)
        launch_inner(x, S1, U2, partial)
        launch_reduce(partial, inner)
        return inner

    return product


def pair_outer_plan(
    inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return the function of a contiguous ``inner``, U1, S2 and the bias that computes ``inner [U1 ; S2] + bias``."""
    M, (R, N) = len(inner), S2.shape
    half = inner.element_size() == 2
    RP = pair._rank_tile(R, pair._MAX_RANK_TILE if half else pair._SINGLE_SLICE)
    rank_tiles, BN = cdiv(R, RP), 128 if half else 32
    programs = multiprocessors(inner.device)
    n_tiles = cdiv(N, BN)
    target_rows = math.sqrt(M * N * inner.element_size() / (4 * programs))
    BM = pair._row_tile(M, 64 if half else 32, target_rows)
    row_tiles = cdiv(M, BM)
    tiles = min(n_tiles, cdiv(n_tiles * row_tiles, programs))
    launch = Launch(
        pair._pair_outer_kernel, (row_tiles, cdiv(n_tiles, tiles)), 1.0, M, N, R, 1, 0, tiles,
        *U1.stride(), *S2.stride(),
        RP=RP, RANK_TILES=rank_tiles, REDUCE=False, HAS_BIAS=bias is not None, BM=BM, BN=BN, PACKED=False,
        PRECISION=dot_precision(inner.dtype), num_warps=8 if BM == 64 else 4, num_stages=2,
    )  # fmt: skip

    def product(inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:
        out = inner.new_empty(M, N)
        # ``inner`` also takes the place of the partial sums, which are not read without REDUCE.
        launch(inner, U1, S2, bias, out, inner)
        return out

    return product

"""The gradients of the factors and the bias of a sketched product, in one kernel that reads x and the gradient once.

With ``grad`` (rows, out), the gradient of the output, these are ``dS1 = x' d_left`` (in, R), ``dS2 = right' grad``
(R, out) and the sum of ``grad`` over rows (out,), where ``right = scale x U2`` and ``d_left = scale grad U1'`` have R
columns. Each program computes the gradients of some input features or of some output features from all rows, so that
it adds without partial sums and atomic additions, so results do not depend on the order of programs.
"""

__all__ = ["gradients_plan"]

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from ._device import cdiv, dot_operand, dot_precision, multiprocessors, next_power_of_2, pipeline_stages
from ._launch import Launch
from .sketched import _load, _rank_tile, is_addressable

# Maps x, grad, the inner product (rows, 2R) and d_left to the gradients of S1, S2 and the bias.
FactorGradients = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]

# Rows up to which many ranks take several tiles, and rows up to which few programs take all rows.
_MAX_FEW_ROWS = 64
_MAX_ROWS_OF_A_SMALL_GRID = 512


@triton.jit
def _add_rows(
    A, left, n, r, acc, total, M, N, R, sa_m, sa_n, sl_m,
    BM: tl.constexpr, SUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``acc + A' left`` for columns ``n`` of A and ``r`` of ``left``, and ``total`` plus tiles of A if SUM."""
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        a = dot_operand(_load(A, m, n, M, N, sa_m, sa_n))
        b = dot_operand(_load(left, m, r, M, R, sl_m, 1))
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
        if SUM:
            total += a.to(tl.float32)
    return acc, total


@triton.jit
def _gradients_kernel(
    x, grad, inner, d_left, dS1, dS2, dbias, M, K, N, R, input_tiles, d_left_offset, d_left_stride,
    sx_m, sx_k, sg_m, sg_n,
    RP: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    r = tl.program_id(1) * RP + tl.arange(0, RP)
    acc = tl.zeros((BN, RP), tl.float32)
    total = tl.zeros((BM, BN), tl.float32)
    if tile < input_tiles:
        n = tile * BN + tl.arange(0, BN)
        acc, total = _add_rows(
            x, d_left + d_left_offset, n, r, acc, total, M, K, R, sx_m, sx_k, d_left_stride, BM, False, PRECISION
        )
        inside = (n[:, None] < K) & (r[None, :] < R)
        tl.store(dS1 + n[:, None].to(tl.int64) * R + r[None, :], acc.to(dS1.dtype.element_ty), mask=inside)
    else:
        n = (tile - input_tiles) * BN + tl.arange(0, BN)
        acc, total = _add_rows(
            grad, inner + R, n, r, acc, total, M, N, R, sg_m, sg_n, 2 * R, BM, HAS_BIAS, PRECISION
        )  # fmt: skip
        inside = (n[:, None] < N) & (r[None, :] < R)
        tl.store(dS2 + r[None, :].to(tl.int64) * N + n[:, None], acc.to(dS2.dtype.element_ty), mask=inside)
        if HAS_BIAS:  # noqa: SIM102  decided when it is compiled
            if tl.program_id(1) == 0:
                tl.store(dbias + n, tl.sum(total, 0).to(dbias.dtype.element_ty), mask=n < N)


def _takes(x: Tensor, R: int, N: int) -> bool:
    """Return whether one kernel should compute the gradients of x (rows, in), factors of rank R and N output features.

    Every tile of ranks reads x and the gradient of the output again, so only few rows take more than one. If there are
    too few features for a program on every multiprocessor, the products of torch, which divide the rows, are faster for
    many rows.
    """
    M, K = x.shape
    if M <= _MAX_FEW_ROWS:
        return True
    if _rank_tile(R) < R:
        return False
    return M <= _MAX_ROWS_OF_A_SMALL_GRID or 4 * (cdiv(K, 64) + cdiv(N, 64)) >= 3 * multiprocessors(x.device)


def gradients_plan(
    x: Tensor,  # (rows, in)
    grad: Tensor,  # (rows, out)
    inner: Tensor,  # (rows, 2R)
    has_both_halves: bool,
    need_bias: bool,
) -> FactorGradients | None:
    """Return the function that computes the gradients of S1, S2 and the bias from one pass over x and ``grad``.

    It returns None where products of torch are faster, or if the kernel cannot address the operands. ``inner`` is
    ``scale x [S1 | U2]``; with ``has_both_halves``, ``d_left`` is the second half of a contiguous matrix of 2R columns.
    """
    (M, K), N, R = x.shape, grad.shape[1], inner.shape[1] // 2
    if grad.dtype is not x.dtype or not inner.is_contiguous() or 0 in (M, K, N, R):
        return None
    if not (is_addressable(x) and is_addressable(grad) and _takes(x, R, N)):
        return None
    d_width = 2 * R if has_both_halves else R
    half, RP = x.element_size() == 2, _rank_tile(R)
    # Without alignment, entries are loaded one by one, and their addresses take registers.
    aligned = K % 16 == N % 16 == R % 16 == 0
    BM, BN, warps, stages = _tile(M, K, N, half, aligned, multiprocessors(x.device))
    input_tiles = cdiv(K, BN)
    launch = Launch(
        _gradients_kernel, (input_tiles + cdiv(N, BN), cdiv(R, RP)), M, K, N, R, input_tiles, d_width - R, d_width,
        *x.stride(), *grad.stride(),
        RP=RP, HAS_BIAS=need_bias, PRECISION=dot_precision(x.dtype), BM=BM, BN=BN, num_warps=warps, num_stages=stages,
    )  # fmt: skip

    def gradients(x: Tensor, grad: Tensor, inner: Tensor, d_left: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        dS1, dS2 = x.new_empty(K, R), x.new_empty(R, N)
        dbias = x.new_empty(N) if need_bias else None
        launch(x, grad, inner, d_left, dS1, dS2, dbias)
        return dS1, dS2, dbias

    return gradients


def _tile(M: int, K: int, N: int, half: bool, aligned: bool, multiprocessors: int) -> tuple[int, int, int, int]:
    """Return the rows and features of a tile, the warps and the stages of the pipeline.

    A tile of more features reads the factors less often, and must leave programs for three quarters of the
    multiprocessors.
    """
    rows = max(16, min(64 if half and aligned else 32, next_power_of_2(M)))
    if not half:
        return rows, 32, 4, pipeline_stages(3)
    if 4 * (cdiv(K, 128) + cdiv(N, 128)) >= 3 * multiprocessors and M > _MAX_FEW_ROWS and aligned:
        return rows, 128, 8, pipeline_stages(3)
    return rows, 64, 4, pipeline_stages(4)

"""The grids of quantized weights: scales and zero points of groups, with searched clipping, and factors in int8."""

__all__ = ["MAXIMUM_CODE", "quantization_grid", "quantize", "round_factors"]

import torch
from torch import Tensor

from panther.kernels.ops.quantized_operands import spread
from panther.nn.factors import fittable

MAXIMUM_CODE = 127  # The codes of factors are symmetric about zero.
_SMALLEST_STEP = 1e-38  # about the least normal number of bfloat16
_CANDIDATES = 24
# The zero point of a group of zeros in 8 bits. Kernels read codes minus this number, which are then zeros.
_MIDDLE = 128
_BLOCK = 1 << 20  # Weights per block, so that the temporaries of a candidate stay in the caches.


def quantize(
    weight: Tensor, scales: Tensor, zeros: Tensor, group_size: int | None, bits: int
) -> Tensor:  # (out, in), uint8
    """Return the nearest code of each weight on the grid ``scales * (codes - zeros)``."""
    columns = weight.shape[1]
    steps = spread(scales.to(weight.dtype), group_size, columns)
    codes = (weight / steps).round_().add_(spread(zeros, group_size, columns))
    return codes.clamp_(0, 2**bits - 1).to(torch.uint8)


def quantization_grid(
    weight: Tensor,  # (out, in)
    bits: int,
    group_size: int | None = None,
    *,
    importance: Tensor | None = None,  # (in,)
    candidates: int = _CANDIDATES,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:  # (out, groups) bfloat16, (out, groups) uint8
    r"""Return scales and zero points of least squared error when each weight goes to its nearest code.

    For each group, the search shrinks the range from the least to the largest weight (and zero) by ``candidates``
    factors, down to the best factor for a normal distribution at this width; 1 takes the whole range. The scale is
    rounded to bfloat16 before the error is computed, as in the stored grid. ``importance`` weighs the squared error of
    each column. With ``symmetric`` every zero point is the middle code ``2^(bits - 1)``, as kernels for signed codes
    need it. Raise ValueError for entries that are NaN, infinite or too large for bfloat16.
    """
    A = fittable(weight.detach())
    rows, columns = A.shape
    size = min(group_size or columns, columns)
    groups = -(-columns // size)
    if groups * size > columns:  # Padding zeros cause no error, because every grid represents zero.
        A = torch.nn.functional.pad(A, (0, groups * size - columns))
    counts = None
    if importance is not None:
        counts = torch.nn.functional.pad(importance.detach().to(A), (0, groups * size - columns)).reshape(groups, size)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=A.device)
    zeros = torch.empty(rows, groups, dtype=torch.uint8, device=A.device)
    step = max(1, _BLOCK // max(1, groups * size))
    for start in range(0, rows, step):
        block = slice(start, start + step)
        scales[block], zeros[block] = _searched(
            A[block].unflatten(1, (groups, size)), bits, counts, candidates, symmetric=symmetric
        )
    if not scales.isfinite().all():
        raise ValueError("the weight has entries too large for bfloat16 (3.4e38), which holds the scales: scale it")
    return scales, zeros


def _searched(
    A: Tensor,  # (rows, groups, group_size)
    bits: int,
    counts: Tensor | None,  # (groups, group_size)
    candidates: int,
    *,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    low, high = A.amin(-1).clamp_max(0), A.amax(-1).clamp_min(0)
    if symmetric:  # the range that has both ends and the middle code at zero
        step = torch.maximum(-low / middle, high / max(middle - 1, 1))
        low, high = -step * middle, step * (top - middle)
    # For a normal distribution, the best range at 2, 3, 4 and 8 bits is 0.5, 0.7, 0.85 and 1 of the range of a long
    # group.
    least = max(0.3, 1.0 - 2.0 ** (1 - bits)) if bits > 1 else 0.2
    best_error = best_scale = best_zero = None
    for index in range(candidates):
        shrink = 1.0 - (1.0 - least) * index / max(1, candidates - 1)
        # Each end is divided, because their difference may overflow.
        scale = (high / top - low / top).mul_(shrink).to(torch.bfloat16)
        is_empty = scale <= _SMALLEST_STEP  # a group that is zero, or nearly
        scale = torch.where(is_empty, 1.0, scale)
        s = scale.to(A.dtype)
        zero = torch.full_like(s, middle) if symmetric else (-low * shrink / s).round_().clamp_(0, top)
        if bits == 8:
            zero = torch.where(is_empty, _MIDDLE, zero)
        codes = (A / s[..., None]).round_().add_(zero[..., None]).clamp_(0, top)
        error = codes.sub_(zero[..., None]).mul_(s[..., None]).sub_(A).square_()
        total = (error if counts is None else error.mul_(counts)).sum(-1)
        if best_error is None:
            best_error, best_scale, best_zero = total, scale, zero
            continue
        better = total < best_error
        best_error = torch.where(better, total, best_error)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)  # type: ignore[arg-type]
    return best_scale, best_zero.to(torch.uint8)  # type: ignore[return-value, union-attr]


def round_factors(
    left: Tensor,  # (out, r)
    right: Tensor,  # (r, in)
) -> tuple[Tensor, Tensor, Tensor]:  # (out, r) int8, (r, in) int8, (r,) bfloat16
    """Return ``left @ right`` as ``L diag(c) R`` with integers in L and R and one scale for each rank-one term.

    The largest entry of a column of L and of a row of R is 127, up to the rounding of c to bfloat16, which L
    compensates.
    """
    left, right = fittable(left.detach()), fittable(right.detach())
    a, b = left.abs().amax(0) / MAXIMUM_CODE, right.abs().amax(1) / MAXIMUM_CODE
    c = (a * b).to(torch.bfloat16)
    c = torch.where(c.to(a.dtype) < a * b, torch.nextafter(c, c.new_tensor(torch.inf)), c)
    c = torch.where(c > _SMALLEST_STEP, c, 1.0)
    b = torch.where(b > 0, b, 1.0)
    L = (left / (c.to(a.dtype) / b)).round_().clamp_(-MAXIMUM_CODE, MAXIMUM_CODE)
    R = (right / b[:, None]).round_().clamp_(-MAXIMUM_CODE, MAXIMUM_CODE)
    return L.to(torch.int8), R.to(torch.int8), c

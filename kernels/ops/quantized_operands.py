"""A quantized weight as plain tensors, and the dense matrices that it stands for, by differentiable operations."""

__all__ = [
    "FACTOR_UNIT",
    "QuantizedCodes",
    "QuantizedFactors",
    "QuantizedOperands",
    "dense_weight",
    "expanded_codes",
    "requantized_steps",
    "rounded_input",
    "rounded_rows",
    "rounded_weight",
    "wide_factors",
]

from typing import NamedTuple

import torch
from torch import Tensor

from ..reference.codes import spread, unpack_codes
from .library import is_exporting

FACTOR_UNIT = 1 / 128  # The product L 128 diag(c) (R / 128) does not overflow float16.
# The largest entry of a row of x becomes this integer.
_LARGEST = 127
# The largest entry of a row of the weight becomes this number. It is less than 127 and prime to all products of codes
# and steps, so that no number of the group with the largest scale lies halfway between two integers. Every order of
# computing such a number then rounds to the same integer.
_LARGEST_WEIGHT = 126.97
_LEAST_STEP = 1e-30  # the step of a row of zeros


class QuantizedCodes(NamedTuple):
    """The matrix ``Q[i, j] = scales[i, g] (code[i, j] - zeros[i, g])`` for the group ``g = j // group_size``."""

    packed: Tensor
    """Codes (out, bytes), uint8, as :func:`~panther.kernels.pack_codes` packs them; contiguous."""
    bits: int
    """Width of a code, 2 to 8."""
    scales: Tensor
    """Scales (out, groups), contiguous."""
    zeros: Tensor
    """The code of the number 0 for each group (out, groups), uint8, contiguous."""
    group_size: int
    """Neighbouring columns that share a scale; the last group may be smaller."""


class QuantizedFactors(NamedTuple):
    """The matrix ``left diag(scales) right``."""

    left: Tensor
    """Left factor (out, r), int8."""
    right: Tensor
    """Right factor (r, in), int8."""
    scales: Tensor
    """One scale for each rank-one term, (r,)."""


class QuantizedOperands(NamedTuple):
    """A quantized weight: the sum of a matrix of codes and a low-rank correction. One of the two may be missing."""

    columns: int
    """Number of inputs."""
    codes: QuantizedCodes | None
    """The codes, or None for a weight of factors alone."""
    factors: QuantizedFactors | None = None
    """The factors of the correction, or None."""


def expanded_codes(codes: QuantizedCodes, columns: int, dtype: torch.dtype) -> Tensor:  # (out, in)
    """Return Q, differentiable by the scales."""
    packed, bits, group_scales, zeros, group_size = codes
    # Scales can be as small as 6e-8, the least number of float16. Differences of integers are exact in every dtype.
    work = torch.float32 if dtype is torch.float16 else dtype
    numbers = unpack_codes(packed, bits, columns).to(work)
    if is_exporting():
        return _by_groups(numbers, group_scales.to(work), zeros.to(work), group_size, columns).to(dtype)
    zeros, scales = (spread(t, group_size, columns) for t in (zeros.to(work), group_scales.to(work)))
    return ((numbers - zeros) * scales).to(dtype)


def wide_factors(factors: QuantizedFactors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # (out, r), (r, in)
    """Return L diag(c) and R as numbers, scaled so that products with either do not overflow float16."""
    wide = torch.promote_types(factors.scales.dtype, torch.float32)  # float64 if scales are float64
    left = factors.left * (factors.scales.to(wide) / FACTOR_UNIT)
    return left.to(dtype), factors.right.to(dtype) * FACTOR_UNIT


def dense_weight(weight: QuantizedOperands, dtype: torch.dtype) -> Tensor:  # (out, in)
    """Return the weight as one matrix, differentiable by all scales."""
    dense = None if weight.codes is None else expanded_codes(weight.codes, weight.columns, dtype)
    if weight.factors is not None:
        left, right = wide_factors(weight.factors, dtype)
        dense = left @ right if dense is None else dense + left @ right
    assert dense is not None  # a weight has codes or a correction
    return dense


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:  # (*, in) -> (*, in), (*, 1)
    """Return the rows of x as integers of 8 bits, and their steps, both in float32 or float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    steps = (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_LEAST_STEP)
    return (x / steps).round_(), steps


def requantized_steps(scales: Tensor, zeros: Tensor, bits: int) -> Tensor:  # (out, 1)
    """Return the step for rounding each row of the weight again, from the largest number that its codes can encode."""
    wide = scales.to(torch.promote_types(scales.dtype, torch.float32))
    largest = torch.maximum(zeros, 2**bits - 1 - zeros)
    return ((wide.abs() * largest).amax(1, keepdim=True) / _LARGEST_WEIGHT).clamp_min(_LEAST_STEP)


def rounded_input(x: Tensor) -> Tensor:  # (*, in)
    """Return x with each row rounded to 255 numbers, with the derivative of x."""
    if x.is_nested and x.layout is torch.strided:  # nn.TransformerEncoder passes such batches; they have no amax
        return torch.nested.as_nested_tensor([rounded_input(sequence) for sequence in x.unbind()])
    with torch.no_grad():
        numbers, steps = rounded_rows(x)
        rounded = (numbers * steps).to(x.dtype)
    return _through(x, rounded)


def rounded_weight(Q: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:  # (out, in)
    """Return Q with each row rounded to 255 numbers, as in integer products, with the derivative of Q."""
    with torch.no_grad():
        steps = requantized_steps(scales, zeros, bits)
        rounded = (Q / steps).round() * steps
    return _through(Q, rounded)


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded`` with the derivative of x: the straight-through estimator (Y. Bengio et al., arXiv:1308.3432).

    The difference of x to itself is an exact zero, except for infinite numbers, whose rows are not finite anyway.
    """
    return rounded + (x - x.detach())


def _by_groups(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int, columns: int) -> Tensor:  # (out, in)
    """Return Q without expanding scales to columns, because exporters would store the expanded scales."""
    full_groups = columns // group_size
    runs = codes[:, : full_groups * group_size].unflatten(1, (full_groups, group_size))
    first: Tensor = ((runs - zeros[:, :full_groups, None]) * scales[:, :full_groups, None]).flatten(1)
    if full_groups * group_size == columns:
        return first
    return torch.cat(
        (first, (codes[:, full_groups * group_size :] - zeros[:, full_groups:]) * scales[:, full_groups:]), 1
    )

"""The product of a quantized weight and an input that is rounded to 8 bits, by integers.

Each row of x is rounded to int8 with a step of its own. A weight with one group a row is multiplied by its codes; one
with several is rounded once more, to int8 with one step a row, because a product for each group takes up to twice as
long: torch orders the weight anew for each call.
"""

__all__ = ["integer_matmul", "multiplies_exactly", "multiplies_integers", "requantized_steps", "rounded_rows"]

import functools

import torch
from torch import Tensor

from .._torch import int_mm
from ..reference.codes import MIDDLE
from .quantized import _blocks, _by_groups, _integers, _memory

_LARGEST = 127  # of an entry of x
# Of an entry of a weight that is rounded again. Less than 127 and prime to all products of codes and steps, so that
# no number of the group with the largest scale lies between two integers: then all ways to compute it round alike.
_LARGEST_WEIGHT = 126.97
_LEAST_STEP = 1e-30  # a row of zeros has this one
_MOST_COLUMNS = 1 << 17  # sums of more products could leave int32


@functools.cache
def multiplies_exactly() -> bool:
    """Return whether torch's product of integers is exact and fast on this CPU.

    oneDNN adds pairs of products in 16 bits where the processor has no instruction for four (AVX2 without VNNI), and
    they saturate there. Without oneDNN torch multiplies in a plain loop.
    """
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    with torch.inference_mode(False):
        for rows in (1, 5, 32):
            x = torch.full((rows, 64), 127, dtype=torch.int8, device="cpu")
            if (int_mm(x, x[:1].expand(16, 64).contiguous().mT) != 64 * 127**2).any():
                return False
    return True


def multiplies_integers(x: Tensor) -> bool:
    """Return whether integers are multiplied for this input; elsewhere rounded numbers are, in floating point."""
    # Of a transposed matrix with one column int_mm reads the wrong numbers, as its strides are (1, 1).
    return x.is_cpu and 1 < x.shape[-1] <= _MOST_COLUMNS and multiplies_exactly()


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:  # (*, in) -> (*, in), (*, 1)
    """Return the rows of x as integers and their steps, both as floating numbers, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    steps = (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_LEAST_STEP)
    return (x / steps).round_(), steps


def requantized_steps(scales: Tensor, zeros: Tensor, bits: int) -> Tensor:  # (out, 1)
    """Return the step of each row of a weight that is rounded again, from the largest number that its codes can be."""
    wide = scales.to(torch.promote_types(scales.dtype, torch.float32))
    largest = torch.maximum(zeros, 2**bits - 1 - zeros)
    return ((wide.abs() * largest).amax(1, keepdim=True) / _LARGEST_WEIGHT).clamp_min(_LEAST_STEP)


def integer_matmul(
    x: Tensor,  # (n, in) int8
    steps: Tensor,  # (n, 1)
    codes: Tensor,  # (out, bytes), see pack_codes
    bits: int,
    scales: Tensor,  # (out, groups)
    zeros: Tensor,  # (out, groups) uint8
    group_size: int,
    bias: Tensor | None,  # (out,)
    dtype: torch.dtype,
) -> Tensor:  # (n, out)
    """Return ``steps x Q^T + bias``, without derivatives."""
    columns, rows = x.shape[1], len(scales)
    y = steps.new_empty(len(x), rows) if dtype is steps.dtype else _memory("wide", steps.dtype, len(x) * rows)
    y = y.view(len(x), rows)
    several = scales.shape[1] > 1
    weight_steps = requantized_steps(scales, zeros, bits) if several else scales.to(steps.dtype)
    factors = scales / weight_steps if several else weight_steps
    # Codes of 8 bits are multiplied as they are stored, all at once.
    for block in [slice(None)] if bits == 8 and not several else _blocks(rows, columns):
        form = codes[block], bits, columns
        if several:
            integers = _requantized(*form, factors[block], zeros[block], group_size)
        else:
            integers = _integers(*form, zeros[block], group_size)
        sums = _memory("sums", torch.int32, len(x) * len(integers)).view(len(x), len(integers))
        y[:, block].copy_(int_mm(x, integers.mT, out=sums))
    if bits == 8 and not several:  # so far only MIDDLE was subtracted from the zero points: subtract the rest
        y.addcmul_(x.sum(1, keepdim=True, dtype=torch.int32).to(y.dtype), zeros.mT.to(y.dtype).sub_(MIDDLE), value=-1)
    y.mul_(weight_steps.mT)
    if bias is None:
        y.mul_(steps)
    else:
        torch.addcmul(bias.to(y.dtype), y, steps, out=y)
    return y.to(dtype)


def _requantized(
    codes: Tensor, bits: int, columns: int, factors: Tensor, zeros: Tensor, group_size: int
) -> Tensor:  # (rows, in) int8
    integers = _integers(codes, bits, columns, zeros, group_size)
    numbers = _memory("weight", torch.float32, integers.numel()).view(-1, columns).copy_(integers)
    if bits == 8:
        _by_groups(Tensor.sub_, numbers, zeros.float().sub_(MIDDLE), group_size)
    _by_groups(Tensor.mul_, numbers, factors, group_size)
    # Not to the memory of the codes: those of 8 bits are the layer's own.
    return _memory("rounded", torch.int8, integers.numel()).view(-1, columns).copy_(numbers.round_())

"""Integer products of a quantized weight and an input that is rounded to 8 bits.

Each row of x is rounded to int8 with one step for the row. If a row of the weight has one group, the codes are
multiplied directly. A row with more groups is rounded again, to int8 with one step for the row: a product for each
group would take up to twice as long, because torch rearranges the weight in each call.
"""

__all__ = ["integer_matmul", "multiplies_exactly", "multiplies_integers"]

import functools

import torch
from torch import Tensor

from .._torch import int_mm
from ..ops.quantized_operands import QuantizedCodes, requantized_steps
from ..reference.codes import MIDDLE
from .quantized import blocks_of, integers_of, memory, scaled_rows

_MOST_COLUMNS = 1 << 17  # A sum of more products could overflow int32.


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
    """Return whether this input is multiplied as integers. Otherwise the rounded numbers are multiplied as floats."""
    # int_mm reads wrong numbers from a transposed matrix with one column, because its strides are (1, 1).
    return x.is_cpu and 1 < x.shape[-1] <= _MOST_COLUMNS and multiplies_exactly()


def integer_matmul(
    x: Tensor,  # (n, in) int8
    steps: Tensor,  # (n, 1)
    codes: QuantizedCodes,
    bias: Tensor | None,  # (out,)
    dtype: torch.dtype,
) -> Tensor:  # (n, out)
    """Return ``steps x Q^T + bias``, without derivatives."""
    _, bits, scales, zeros, _ = codes
    columns, rows = x.shape[1], len(scales)
    y = steps.new_empty(len(x), rows) if dtype is steps.dtype else memory("wide", steps.dtype, len(x), rows)
    has_groups = scales.shape[1] > 1
    weight_steps = requantized_steps(scales, zeros, bits) if has_groups else scales.to(steps.dtype)
    factors = scales / weight_steps if has_groups else weight_steps
    # Codes of 8 bits need no unpacking, so one product takes all of them.
    for block in [slice(None)] if bits == 8 and not has_groups else blocks_of(rows, columns):
        if has_groups:
            numbers = scaled_rows(codes, block, columns, factors, torch.float32).round_()
            # The result must not overwrite the codes, which belong to the layer if they have 8 bits.
            integers = memory("rounded", torch.int8, *numbers.shape).copy_(numbers)
        else:
            integers = integers_of(codes, block, columns)
        sums = memory("sums", torch.int32, len(x), len(integers))
        y[:, block].copy_(int_mm(x, integers.mT, out=sums))
    if bits == 8 and not has_groups:  # The stored codes contain only -MIDDLE: subtract the rest of the zero points.
        y.addcmul_(x.sum(1, keepdim=True, dtype=torch.int32).to(y.dtype), zeros.mT.to(y.dtype).sub_(MIDDLE), value=-1)
    y.mul_(weight_steps.mT)
    if bias is None:
        y.mul_(steps)
    else:
        torch.addcmul(bias.to(y.dtype), y, steps, out=y)
    return y.to(dtype)

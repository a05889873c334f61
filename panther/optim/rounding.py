"""Stochastic rounding of parameters to bfloat16, whose random bits are the same in every layout."""

__all__ = ["copy_rounded"]

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from panther.kernels import word_block
from panther.optim.matrix_updates import local_part
from panther.sketch.streams import Kind, tag

_FACTORS = (0x9E3779B9 - (1 << 32), 0xBB67AE85 - (1 << 32))  # odd, with bits of the golden ratio and of the root of 3


def copy_rounded(parameter: Any, values: Tensor, group: dict[str, Any], name: str, step: int) -> None:
    """Copy the new values of a parameter to its shard on this rank.

    Values are rounded to the nearest number of the parameter's dtype. If the group has ``bf16_stochastic_round`` and
    the dtype is bfloat16, a value between two numbers becomes either, the upper one with the probability that keeps
    the mean. The random bits of an entry depend on the seed, the name, the step and the index in the complete
    parameter.

    Args:
        parameter: The parameter, sharded or not.
        values: The values of the shard, float32 for bfloat16.
        group: The settings of its group.
        name: The name of the parameter, which is the same in every layout.
        step: The number of steps of this parameter.
    """
    target = local_part(parameter)
    if group.get("bf16_stochastic_round") and target.dtype is torch.bfloat16:
        # The upper half of a float32 number is the bfloat16 number below it in absolute value.
        rounded = values.view(torch.int32) + _bits(parameter, f"{group.get('seed', 0)} {step} {name}")
        rounded = rounded.bitwise_and_(-1 << 16).view(torch.float32)
        values = torch.where(values == values, rounded, values)  # some NaN would become a number
    target.copy_(values)


def _bits(parameter: Any, key: str) -> Tensor:
    """Return 16 random bits for each entry of this rank's shard, in int32.

    Philox draws a word for each row and each column, and two multiplications mix them. Drawing a word for each entry
    takes ten times as long. The spectral norm of the rounding errors of a matrix is that of independent errors.
    """
    local = local_part(parameter)
    offsets, sizes = [0] * local.dim(), list(local.shape)
    if local is not parameter:
        from panther._torch import local_offsets

        offsets = list(local_offsets(parameter))
    inner = math.prod(parameter.shape[2:])
    starts, lengths = [*offsets, 0, 0], [*sizes, 1, 1]
    parts = range(starts[0], starts[0] + lengths[0]), range(starts[1] * inner, (starts[1] + lengths[1]) * inner)
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1
    start = min(part.start for part in parts)
    places = range(start, max(part.stop for part in parts))
    words = word_block(seed, 0, tag(Kind.ROUNDING), range(2), places, device=local.device).sub_(1 << 31).int()
    rows, columns = (words[i, part.start - start : part.stop - start] for i, part in enumerate(parts))
    bits = rows[:, None] ^ columns
    bits.mul_(_FACTORS[0])
    bits ^= bits >> 15
    bits = bits.mul_(_FACTORS[1]).bitwise_right_shift_(16).bitwise_and_((1 << 16) - 1)
    bits = bits.view(lengths[0], lengths[1], *parameter.shape[2:])
    for dim in range(2, local.dim()):
        bits = bits.narrow(dim, offsets[dim], sizes[dim])
    return bits.reshape(local.shape)

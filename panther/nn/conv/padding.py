"""The padding of convolutions: the sizes of each kind."""

__all__ = ["CONVOLUTIONS", "is_plain", "pad_input", "padding_sides"]

from collections.abc import Sequence
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor

from panther.nn.sketch_sizes import Padding

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)

_Sides = tuple[tuple[int, int], ...]


def is_plain(padding: Padding) -> TypeGuard[tuple[int, ...]]:
    """Return whether padding is one size for each dimension, which torch's functions take."""
    return not isinstance(padding, str) and all(isinstance(size, int) for size in padding)


def padding_sides(
    padding: Padding, size: Sequence[int], kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> _Sides:
    """Return how much is added before and after each dimension of an input of a size.

    ``"same_upper"`` (the name of ONNX) gives outputs of ``ceil(size / stride)``, as in TensorFlow. If the total is odd,
    more is added after, as for torch's ``"same"``.
    """
    if padding == "valid":
        return ((0, 0),) * len(kernel_size)
    if isinstance(padding, str):
        totals = [step * (taps - 1) for taps, step in zip(kernel_size, dilation, strict=True)]
        if padding == "same_upper":
            steps = zip(size, stride, totals, strict=True)
            totals = [max((-(-extent // step) - 1) * step + reach + 1 - extent, 0) for extent, step, reach in steps]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((sides, sides) if isinstance(sides, int) else (sides[0], sides[1]) for sides in padding)


def pad_input(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    padding_mode: str,
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input, padded as far as a convolution cannot do it, and the padding that it can do itself."""
    if padding_mode == "zeros" and is_plain(padding):
        return x, padding
    sides = padding_sides(padding, x.shape[-len(kernel_size) :], kernel_size, stride, dilation)
    # For unequal padding before and after, torch would also pad a copy, and warn about it.
    if padding_mode == "zeros" and all(before == after for before, after in sides):
        return x, tuple(before for before, _ in sides)
    mode = "constant" if padding_mode == "zeros" else padding_mode
    return F.pad(x, [side for pair in reversed(sides) for side in pair], mode), (0,) * len(sides)

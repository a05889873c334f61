"""The padding of convolutions: the sizes of each kind, and dense layers with those that torch.nn does not have."""

__all__ = [
    "CONVOLUTIONS", "PaddedConv1d", "PaddedConv2d", "PaddedConv3d", "dense_conv", "is_plain", "only_convolves",
    "pad_input",
]  # fmt: skip

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from panther._torch import has_forward_of_convolution
from panther.nn.sketch_sizes import Padding, check_padding

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)

_Sides = tuple[tuple[int, int], ...]


def is_plain(padding: Padding) -> TypeGuard[tuple[int, ...]]:
    """Return whether padding is one size for each dimension, which torch's functions take."""
    return not isinstance(padding, str) and all(isinstance(size, int) for size in padding)


def _padding_sides(
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
    sides = _padding_sides(padding, x.shape[-len(kernel_size) :], kernel_size, stride, dilation)
    # For unequal padding before and after, torch would also pad a copy, and warn about it.
    if padding_mode == "zeros" and all(before == after for before, after in sides):
        return x, tuple(before for before, _ in sides)
    mode = "constant" if padding_mode == "zeros" else padding_mode
    return F.pad(x, [side for pair in reversed(sides) for side in pair], mode), (0,) * len(sides)


class _PaddedConv:
    """A convolution of torch.nn that takes ``padding="same_upper"`` or a pair (before, after) for each dimension.

    Compressed layers with such a padding become this layer where they become dense again.
    """

    def __init__(self, *args: Any, padding: Any = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        layer: Any = self
        layer.padding = check_padding(padding, layer.stride, len(layer.kernel_size))

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of the padded input."""
        layer: Any = self
        x, padding = pad_input(
            input, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.padding_mode
        )
        conv: Any = CONVOLUTIONS[len(padding) - 1]
        output: Tensor = conv(x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
        return output


class PaddedConv1d(_PaddedConv, nn.Conv1d):
    """nn.Conv1d with ``padding="same_upper"`` or a pair (before, after)."""


class PaddedConv2d(_PaddedConv, nn.Conv2d):
    """nn.Conv2d with ``padding="same_upper"`` or a pair (before, after) for each dimension.

    Example:
        >>> import torch
        >>> PaddedConv2d(3, 8, 3, stride=2, padding="same_upper")(
        ...     torch.randn(1, 3, 7, 8)
        ... ).shape
        torch.Size([1, 8, 4, 4])
    """


class PaddedConv3d(_PaddedConv, nn.Conv3d):
    """nn.Conv3d with ``padding="same_upper"`` or a pair (before, after) for each dimension."""


def dense_conv(dim: int, *args: Any, padding: Any = 0, **options: Any) -> Any:
    """Return a convolution of torch.nn, or a subclass of it if torch.nn does not take the padding."""
    words = ("same", "valid")
    takes = padding in words if isinstance(padding, str) else isinstance(padding, int) or is_plain(tuple(padding))
    classes: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d) if takes else (PaddedConv1d, PaddedConv2d, PaddedConv3d)
    return classes[dim - 1](*args, padding=padding, **options)


def only_convolves(conv: nn.Module) -> bool:
    """Return whether a convolution has the forward of torch.nn or of this module, and not that of a subclass."""
    return has_forward_of_convolution(conv) or getattr(type(conv), "forward", None) is _PaddedConv.forward

"""Dense convolutions with the paddings of compressed convolutions that torch.nn does not have."""

__all__ = ["PaddedConv1d", "PaddedConv2d", "PaddedConv3d", "dense_conv", "only_convolves"]

from typing import Any

from torch import Tensor, nn

from panther._torch import has_forward_of_convolution
from panther.nn.conv.padding import CONVOLUTIONS, is_plain, pad_input
from panther.nn.sketch_sizes import check_padding


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

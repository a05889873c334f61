"""The arguments and the input of a convolution, checked and padded as torch's layers do it."""

__all__ = ["ConvGeometry", "check_input", "is_channels_last", "take_format_"]

import math
from typing import Any

import torch
from torch import Tensor, nn

from panther.errors import DTypeError, ShapeError, check_size
from panther.kernels.ops.library import is_autocasting
from panther.nn.conv.padded import dense_conv
from panther.nn.pairs import ConvPair, copied_parameter
from panther.nn.protocol import CompressedModule
from panther.nn.sketch_sizes import Padding, check_padding, divisible, per_dim

_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class ConvGeometry(CompressedModule):
    """The arguments that a compressed convolution shares with torch's, checked and shown, and its way back.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: One integer, or one for each dimension; all up to ``padding_mode`` are as in torch's layer.
        stride: As ``kernel_size``.
        padding: As ``kernel_size``; ``"same"``, for even kernels too, or ``"valid"``; ``"same_upper"``, which gives
            outputs of ``ceil(input / stride)`` as TensorFlow does; or a pair (before, after) for each dimension.
        dilation: As ``kernel_size``.
        groups: Number of groups of channels.
        bias: Whether to add a bias.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        device: None is torch's default.
        dtype: Floating dtype of input, output and bias; None is torch's default.

    Raises:
        ShapeError: If a size is out of range, or channels are not divisible by ``groups``.
        ValueError: If ``padding`` or ``padding_mode`` is unknown.
        TypeError: If an argument has the wrong type.
        DTypeError: If ``dtype`` is not floating.
    """

    dense_arguments: tuple[str, ...] = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias", "padding_mode",
    )  # fmt: skip
    dim: int
    padding: Padding

    def _set_geometry(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
        groups: int, padding_mode: str,
    ) -> None:  # fmt: skip
        self.groups = check_size("groups", groups, least=1)
        self.in_channels = divisible("in_channels", in_channels, self.groups)
        self.out_channels = divisible("out_channels", out_channels, self.groups)
        self.kernel_size = per_dim("kernel_size", kernel_size, self.dim, least=1)
        self.stride = per_dim("stride", stride, self.dim, least=1)
        self.dilation = per_dim("dilation", dilation, self.dim, least=1)
        self.padding = check_padding(padding, self.stride, self.dim)
        if padding_mode not in _PADDING_MODES:
            raise ValueError(
                f"padding_mode={padding_mode!r} is unknown: use one of {', '.join(map(repr, _PADDING_MODES))}"
            )
        self.padding_mode = padding_mode

    def extra_repr(self) -> str:
        """Return the geometry, as print shows torch's convolutions, and the sizes that say how much is stored."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        usual = {"padding": (0,) * self.dim, "dilation": (1,) * self.dim, "groups": 1, "padding_mode": "zeros"}
        parts += [f"{name}={getattr(self, name)!r}" for name in usual if getattr(self, name) != usual[name]]
        if self.bias is None:
            parts.append("bias=False")
        return ", ".join([*parts, *(f"{name}={getattr(self, name)}" for name in self.size_arguments)])

    def _new_dense(self, **arguments: Any) -> Any:
        return dense_conv(self.dim, **arguments)

    def to_dense(self) -> Any:
        """Return the dense convolution with copies of kernel and bias, in the memory format of a layer of factors."""
        conv = super().to_dense()
        if self.factor_names:
            take_format_(conv, getattr(self, self.factor_names[0]))
        return conv

    def to_conv(self) -> Any:
        """Return torch.nn's convolution with this layer's effective kernel and bias, copied; see :meth:`to_dense`.

        Example:
            >>> import torch
            >>> from panther.nn import SKConv2d
            >>> layer, x = SKConv2d(64, 128, padding=1), torch.randn(2, 64, 8, 8)
            >>> torch.allclose(layer(x), layer.to_conv()(x), atol=1e-5)
            True
        """
        return self.to_dense()

    @torch.no_grad()
    def pair_of(
        self,
        kernel: Tensor,  # (r, in / groups, *kernel)
        mix: Tensor,  # (r, out / groups)
        trained: bool,
    ) -> ConvPair:
        """Return the convolution with copies of a kernel and the convolution of width 1 that mixes its channels."""
        rank = len(kernel)
        mix = mix.unflatten(0, (self.groups, -1)).mT.reshape(self.out_channels, -1)
        first = dense_conv(
            self.dim, self.in_channels, rank, self.kernel_size, self.stride, padding=self.padding,
            dilation=self.dilation, groups=self.groups, bias=False, padding_mode=self.padding_mode, device="meta",
        )  # fmt: skip
        second = dense_conv(
            self.dim, rank, self.out_channels, 1, groups=self.groups, bias=self.bias is not None, device="meta"
        )
        first.weight = copied_parameter(kernel, trained)
        second.weight = copied_parameter(mix.reshape(*mix.shape, *[1] * self.dim), trained)
        if self.bias is not None:
            second.bias = copied_parameter(self.bias, self.bias.requires_grad)
        return ConvPair(first, second)


def check_input(x: Tensor, in_channels: int, dim: int, dtype: torch.dtype) -> None:
    """Raise unless the input fits a layer of ``dim`` dimensions and this dtype."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a tensor, not {type(x).__name__}: use torch.as_tensor")
    if x.dim() not in (dim + 1, dim + 2) or x.shape[-dim - 1] != in_channels:
        size = ("L", "H, W", "D, H, W")[dim - 1]
        raise ShapeError(
            f"the input must be (N, {in_channels}, {size}) or ({in_channels}, {size}) for in_channels={in_channels}, "
            f"not {tuple(x.shape)}: reshape it"
        )
    if x.dtype != dtype and not is_autocasting(x.device):
        other = f", or the layer, layer.to({x.dtype}), or run under torch.autocast" if x.is_floating_point() else ""
        raise DTypeError(f"the input is {x.dtype} and the layer {dtype}: cast the input, x.to({dtype}){other}")


def is_channels_last(kernel: Tensor) -> bool:
    """Return whether a kernel is channels_last for torch, from its strides, which also exist under torch.vmap."""
    if kernel.dim() < 4 or kernel.stride(1) != 1:
        return False
    return kernel.stride(-1) != 1 or (kernel.shape[1] == 1 and math.prod(kernel.shape[2:]) > 1)


def take_format_(module: nn.Module, kernel: Tensor) -> None:
    """Put the module in channels_last if the kernel is."""
    if is_channels_last(kernel):
        last = torch.channels_last if kernel.dim() == 4 else torch.channels_last_3d
        module.to(memory_format=last)  # type: ignore[call-overload]

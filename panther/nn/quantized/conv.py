"""QuantizedConv2d, a convolution with a weight of 2 to 8 bits an entry, a low-rank correction in int8, or both."""

__all__ = ["QuantizedConv2d"]

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from panther._docstrings import inherit_arguments
from panther.kernels import quantized_weight
from panther.kernels.ops.library import autocast
from panther.nn.conv.geometry import ConvGeometry, check_input
from panther.nn.conv.product import convolve, convolve_dense
from panther.nn.factors import check_dense
from panther.nn.protocol import allow_saving
from panther.nn.quantized.linear import QuantizedLinear
from panther.nn.quantized.matrix import QuantizedMatrix


@inherit_arguments(ConvGeometry, QuantizedMatrix)
class QuantizedConv2d(ConvGeometry, QuantizedMatrix):
    r"""A drop-in for :class:`torch.nn.Conv2d` whose weight is stored in few bits.

    The weight, unfolded to a matrix (out, in / groups * kernel) whose columns run over channels, then rows, then
    columns of the kernel, is stored as in :class:`QuantizedLinear`:

    .. math:: W = Q + L\,\mathrm{diag}(c)\,R, \qquad Q_{ij} = s_{ig}\,(q_{ij} - z_{ig}), \quad
        g = \lfloor j / \mathtt{group\_size} \rfloor

    so each output channel has its scales, in grouped and depthwise convolutions too. Tensors, training, casts and files
    are also those of :class:`QuantizedLinear`.

    A new layer has random weights with nn.Conv2d's variance; :meth:`from_conv` rounds a dense layer.

    Args:
        low_rank: Rank r of the correction of the whole matrix, even with groups of channels.

    Shape:
        Input ``(N, in_channels, H, W)`` or ``(in_channels, H, W)``, output as nn.Conv2d's; channels_last is kept.

    Raises:
        ValueError: If ``padding`` or ``padding_mode`` is unknown, or ``bits`` is None and ``low_rank`` 0.

    Cost: each call expands the weight, which takes its memory in ``dtype``, and convolves with it. A layer with codes
    saves bytes, but no time. The expansion takes as long as the convolution for some positions of the output, so it
    matters if there are few positions, for example for one image in the last layers of a network. Without codes and
    groups, the layer computes two convolutions, the second with a 1 x 1 kernel, if this is less work.

    Example:
        >>> import torch
        >>> layer = QuantizedConv2d(64, 128, kernel_size=3, padding=1, bits=4)
        >>> layer(torch.randn(8, 64, 32, 32)).shape
        torch.Size([8, 128, 32, 32])
        >>> (
        ...     sum(t.nbytes for t in [layer.bias, *layer.buffers()]),
        ...     4 * 128 * (64 * 9 + 1),
        ... )
        (39320, 295424)
    """

    dense_class = nn.Conv2d
    dim = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Any = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        bits: int | None = 4,
        group_size: int | None = 128,
        low_rank: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._set_geometry(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode)
        columns = self.in_channels // self.groups * self.kernel_size[0] * self.kernel_size[1]
        self._allocate(self.out_channels, columns, bits, group_size, low_rank, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, in_channels, H, W)`` to ``(N, out_channels, H', W')``; also without N."""
        check_input(input, self.in_channels, 2, self.dtype)
        self.check_writes()
        x, bias = autocast(input.device, input, self.bias)
        geometry = (bias, self.stride, self.padding, self.dilation, self.groups)
        if self.bits is None and self.groups == 1:
            left, right = self.wide_factors(x.dtype)
            return convolve(x, self._unfolded(right), left.mT, *geometry, 1.0, self.padding_mode)
        weight = quantized_weight(x, self._operands(), bias)
        return convolve_dense(x, self._unfolded(weight), *geometry, self.padding_mode)

    @property
    def weight(self) -> Tensor:  # (out, in / groups, *kernel)
        """The dense effective weight, for inspection: differentiable, made anew at each access."""
        return self._unfolded(super().weight)

    def _unfolded(self, matrix: Tensor) -> Tensor:  # (rows, in / groups * kernel) -> (rows, in / groups, *kernel)
        kernels: Tensor = matrix.unflatten(1, (self.in_channels // self.groups, *self.kernel_size))
        return kernels

    @classmethod
    @inherit_arguments(QuantizedLinear.from_linear)
    def from_conv(
        cls, conv: nn.Conv2d, bits: int | None = 4, *, group_size: int | None = 128, low_rank: int = 0
    ) -> Self:
        """Return a quantized approximation of a dense convolution, on its device and in its dtype.

        As :meth:`QuantizedLinear.from_linear` for the unfolded weight.

        Args:
            conv: The layer to approximate. It is not changed.

        Raises:
            TypeError: If ``conv`` is not an nn.Conv2d.

        Cost: about 250 passes over the weight; with a correction 1000 passes and four truncated SVDs.

        Example:
            >>> import torch
            >>> dense = torch.nn.Conv2d(32, 64, 3, padding=1)
            >>> layer = QuantizedConv2d.from_conv(dense, bits=4, group_size=48)
            >>> bool(
            ...     (layer.weight - dense.weight).norm() < 0.1 * dense.weight.norm()
            ... )
            True
        """
        check_dense(conv, nn.Conv2d, "from_conv")
        return cls._fitted_to(conv, bits=bits, group_size=group_size, low_rank=low_rank)

    def factors(self) -> tuple[Tensor, Tensor] | None:  # (out, r), (r, in * kernel)
        """Return the factors of a layer without codes and without groups of channels; None of all other layers."""
        return None if self.groups > 1 else super().factors()

    @torch.no_grad()
    def plain(self) -> nn.Module:
        """Return the dense layer of the weight, or a pair of convolutions for a layer that has :meth:`factors`."""
        if (factors := self.factors()) is None:
            return super().plain()
        left, right = factors
        return self.pair_of(self._unfolded(right), left.mT, self._is_trained)

    @property
    def _form(self) -> list[int]:
        """The form and the kernel's shape, because kernels of 3 x 1 and 1 x 3 have tensors of the same shapes."""
        return [*super()._form, self.in_channels // self.groups, *self.kernel_size]

    def _described(self, form: list[int]) -> str:
        return f"{super()._described(form[:3])}, {form[3]} channels in a group, kernel_size={tuple(form[4:])}"


allow_saving(QuantizedConv2d)

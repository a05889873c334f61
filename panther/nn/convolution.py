"""Convolutions of compressed layers: their arguments, and the computation in two steps or by the dense kernel."""

__all__ = [
    "ConvGeometry",
    "check_input",
    "convolve",
    "convolve_dense",
    "dense_kernel",
    "is_channels_last",
    "pad_input",
    "runs_dense",
    "same_padding",
]

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther.errors import DTypeError, ShapeError, check_size
from panther.nn.base import is_autocasting
from panther.nn.sketch_sizes import check_padding, divisible, per_dim

_VECTOR = 16  # channels in a vector of oneDNN's blocked layout
# Flops that take as long as writing and reading a number of the intermediate result (measured).
_TRAFFIC = 24
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class ConvGeometry:
    """The arguments that a compressed convolution shares with torch's, checked and shown."""

    dense_arguments: tuple[str, ...] = (
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias", "padding_mode",
    )  # fmt: skip
    dim: int
    padding: str | tuple[int, ...]
    bias: nn.Parameter | None

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

    def _geometry_parts(self) -> list[str]:
        """Return what print shows of the geometry: torch's convolutions show the same."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        usual = {"padding": (0,) * self.dim, "dilation": (1,) * self.dim, "groups": 1, "padding_mode": "zeros"}
        parts += [f"{name}={getattr(self, name)!r}" for name in usual if getattr(self, name) != usual[name]]
        if self.bias is None:
            parts.append("bias=False")
        return parts


def same_padding(kernel_size: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Return the padding before and after each dimension for ``padding="same"``; if odd, more after, as in torch."""
    totals = [step * (size - 1) for size, step in zip(kernel_size, dilation, strict=True)]
    return [(total // 2, total - total // 2) for total in totals]


def dense_kernel(S: Tensor, U: Tensor, groups: int, scale: float) -> Tensor:  # (out, in / groups, *kernel)
    """Return the kernel of the dense convolution that a sketched one equals."""
    if scale != 1.0:
        S = S * scale
    last = is_channels_last(S)
    if last:  # The result then has this layout, too.
        S = S.movedim(1, -1)
    if groups == 1:
        kernel = torch.mm(U.mT, S.flatten(1)).view(-1, *S.shape[1:])
    else:
        Ut = U.unflatten(0, (groups, -1)).mT  # (groups, out / groups, rows / groups)
        kernel = (Ut @ S.flatten(1).unflatten(0, (groups, -1))).reshape(-1, *S.shape[1:])
    return kernel.movedim(-1, 1) if last else kernel


def is_channels_last(kernel: Tensor) -> bool:
    """Return whether a kernel is channels_last for torch, from its strides, which also exist under torch.vmap."""
    if kernel.dim() < 4 or kernel.stride(1) != 1:
        return False
    return kernel.stride(-1) != 1 or (kernel.shape[1] == 1 and math.prod(kernel.shape[2:]) > 1)


def runs_dense(S: Tensor, U: Tensor, groups: int) -> bool:
    """Return whether forming the dense kernel and convolving with it is faster: a rule of the factors' shapes.

    As measured on a CPU. Rows cost as much as the next multiple of a vector. Forming the kernel costs as much as the
    dense convolution does for ``rows / groups`` positions, which is little, because a batch has thousands.
    """
    (rows, out), inner = U.shape, math.prod(S.shape[1:])
    vectors = -(-rows // (groups * _VECTOR))
    return vectors * _VECTOR * (inner + out + _TRAFFIC) >= inner * out


def convolve(
    x: Tensor,  # (N, in, *size) or (in, *size)
    S: Tensor,  # (rows, in / groups, *kernel)
    U: Tensor,  # (rows, out / groups)
    bias: Tensor | None,  # (out,)
    stride: tuple[int, ...],
    padding: str | tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    scale: float,
    padding_mode: str = "zeros",
) -> Tensor:  # (N, out, *size) or (out, *size)
    """Compute :func:`~panther.nn.functional.sketched_conv`, with everything except the input checked before."""
    dim = S.dim() - 2
    check_input(x, S.shape[1] * groups, dim, S.dtype)
    if x.dim() == dim + 1:
        return convolve(x[None], S, U, bias, stride, padding, dilation, groups, scale, padding_mode)[0]
    if padding_mode != "zeros" or isinstance(padding, str):
        x, padding = pad_input(x, S.shape[2:], padding, dilation, padding_mode)
    conv = _CONVOLUTIONS[dim - 1]
    if runs_dense(S, U, groups):
        return conv(x, dense_kernel(S, U, groups, scale), bias, stride, padding, dilation, groups)
    if groups > 1 and S.shape[0] // groups % _VECTOR:  # Without padding NCHW is two to three times slower.
        S, U = _pad_rows(S, groups), _pad_rows(U, groups)
    rows, out = U.shape
    if scale != 1.0:
        # In half precision, a power of two keeps the signs exact, and near 1/sqrt(rows) it keeps both products in
        # range.
        power = 2.0 ** -round(math.log2(rows // groups) / 2)
        S, U = S * (scale / power), U * power
    z = conv(x, S, None, stride, padding, dilation, groups)  # (N, rows, *size)
    if groups > 1 or z.stride(1) == 1:  # A 1 x 1 convolution keeps channels_last.
        mix = U.unflatten(0, (groups, -1)).mT.reshape(groups * out, rows // groups, *[1] * dim)
        y = conv(z, mix, bias, groups=groups)
        # In three dimensions torch's convolution does not keep it.
        return y.movedim(1, -1).contiguous().movedim(-1, 1) if dim == 3 and z.stride(1) == 1 else y
    mix, flat = U.mT.expand(z.shape[0], -1, -1), z.flatten(2)
    y = torch.bmm(mix, flat) if bias is None else torch.baddbmm(bias[:, None], mix, flat)
    images: Tensor = y.unflatten(2, z.shape[2:])
    return images


def convolve_dense(
    x: Tensor,  # (N, in, *size) or (in, *size)
    kernel: Tensor,  # (out, in / groups, *kernel)
    bias: Tensor | None,  # (out,)
    stride: tuple[int, ...],
    padding: str | tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    padding_mode: str,
) -> Tensor:  # (N, out, *size) or (out, *size)
    """Compute torch's convolution for any padding of torch's layers. The arguments must be checked already."""
    if padding_mode != "zeros" or isinstance(padding, str):
        x, padding = pad_input(x, kernel.shape[2:], padding, dilation, padding_mode)
    return _CONVOLUTIONS[kernel.dim() - 3](x, kernel, bias, stride, padding, dilation, groups)


def _pad_rows(factor: Tensor, groups: int) -> Tensor:
    """Append rows of zeros to each group, up to a multiple of _VECTOR rows."""
    last = is_channels_last(factor)
    rows = (factor.movedim(1, -1) if last else factor).unflatten(0, (groups, -1))
    padded = F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, -rows.shape[1] % _VECTOR]).flatten(0, 1)
    return padded.movedim(-1, 1) if last else padded


def pad_input(
    x: Tensor, kernel_size: Sequence[int], padding: str | tuple[int, ...], dilation: tuple[int, ...], padding_mode: str
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input, padded as far as a convolution cannot do it, and the padding that it can do itself."""
    if isinstance(padding, str):
        sides = same_padding(kernel_size, dilation) if padding == "same" else [(0, 0)] * len(kernel_size)
    else:
        sides = [(size, size) for size in padding]
    # For unequal padding before and after, torch would also pad a copy, and warn about it.
    if padding_mode == "zeros" and all(before == after for before, after in sides):
        return x, tuple(before for before, _ in sides)
    mode = "constant" if padding_mode == "zeros" else padding_mode
    return F.pad(x, [side for pair in reversed(sides) for side in pair], mode), (0,) * len(sides)


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
    if x.dtype != dtype and not is_autocasting(x.device.type):
        other = f", or the layer, layer.to({x.dtype}), or run under torch.autocast" if x.is_floating_point() else ""
        raise DTypeError(f"the input is {x.dtype} and the layer {dtype}: cast the input, x.to({dtype}){other}")

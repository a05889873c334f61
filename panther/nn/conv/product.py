"""Convolutions by two factors, in two steps or by the dense kernel that they stand for."""

__all__ = ["convolve", "convolve_dense", "dense_kernel", "runs_dense"]

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from panther.kernels.ops.library import is_autocasting
from panther.nn.conv.geometry import check_input, is_channels_last
from panther.nn.conv.padded import CONVOLUTIONS, pad_input
from panther.nn.sketch_sizes import Padding

_VECTOR = 16  # channels in a vector of oneDNN's blocked layout
# Flops that take as long as writing and reading a number of the intermediate result (measured).
_TRAFFIC = 24


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
    padding: Padding,
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
    x, sizes = pad_input(x, S.shape[2:], stride, padding, dilation, padding_mode)
    conv = CONVOLUTIONS[dim - 1]
    if runs_dense(S, U, groups):
        return conv(x, dense_kernel(S, U, groups, scale), bias, stride, sizes, dilation, groups)
    if groups > 1 and S.shape[0] // groups % _VECTOR:  # Without padding NCHW is two to three times slower.
        S, U = _pad_rows(S, groups), _pad_rows(U, groups)
    rows, out = U.shape
    # Without gradients and in full precision, the last product takes the scale, which spares two operations.
    takes_scale = x.dtype.itemsize > 2 and not (torch.is_grad_enabled() or is_autocasting(x.device))
    if scale != 1.0 and not takes_scale:
        # In half precision, a power of two keeps the signs exact, and near 1/sqrt(rows) it keeps both products in
        # range.
        power = 2.0 ** -round(math.log2(rows // groups) / 2)
        S, U, scale = S * (scale / power), U * power, 1.0
    z = conv(x, S, None, stride, sizes, dilation, groups)  # (N, rows, *size)
    if groups > 1 or z.stride(1) == 1:  # A 1 x 1 convolution keeps channels_last.
        mix = U.unflatten(0, (groups, -1)).mT.reshape(groups * out, rows // groups, *[1] * dim)
        mix = mix if scale == 1.0 else mix * scale
        y = conv(z, mix, bias, groups=groups)
        # In three dimensions torch's convolution does not keep it.
        return y.movedim(1, -1).contiguous().movedim(-1, 1) if dim == 3 and z.stride(1) == 1 else y
    mix, flat = U.mT.expand(z.shape[0], -1, -1), z.flatten(2)
    if bias is None and scale == 1.0:
        y = torch.bmm(mix, flat)
    elif bias is None:
        y = torch.baddbmm(flat.new_zeros(()), mix, flat, beta=0, alpha=scale)
    else:
        y = torch.baddbmm(bias[:, None], mix, flat, alpha=scale)
    images: Tensor = y.unflatten(2, z.shape[2:])
    return images


def convolve_dense(
    x: Tensor,  # (N, in, *size) or (in, *size)
    kernel: Tensor,  # (out, in / groups, *kernel)
    bias: Tensor | None,  # (out,)
    stride: tuple[int, ...],
    padding: Padding,
    dilation: tuple[int, ...],
    groups: int,
    padding_mode: str,
) -> Tensor:  # (N, out, *size) or (out, *size)
    """Compute torch's convolution for any padding of torch's layers. The arguments must be checked already."""
    x, sizes = pad_input(x, kernel.shape[2:], stride, padding, dilation, padding_mode)
    return CONVOLUTIONS[kernel.dim() - 3](x, kernel, bias, stride, sizes, dilation, groups)


def _pad_rows(factor: Tensor, groups: int) -> Tensor:
    """Append rows of zeros to each group, up to a multiple of _VECTOR rows."""
    last = is_channels_last(factor)
    rows = (factor.movedim(1, -1) if last else factor).unflatten(0, (groups, -1))
    padded = F.pad(rows, [0, 0] * (rows.dim() - 2) + [0, -rows.shape[1] % _VECTOR]).flatten(0, 1)
    return padded.movedim(-1, 1) if last else padded

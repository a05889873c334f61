"""The sketched product ``scale (x S1 U1 + x U2 S2) + bias`` in plain torch, in two orders, and with packed signs."""

__all__ = ["chained_matmul", "joined_matmul", "packed_matmul", "sketched_matmul"]

import torch
from torch import Tensor

from .packing import unpack_signs

# Entries of a sketch that are unpacked at once: they stay in a core's cache for the product they are used in.
_UNPACKED = 1 << 17


def sketched_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out)
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (in, R)
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> Tensor:  # (rows, out)
    """The product as four matrix products, in an order autograd prices right.

    Gradients of U1 and U2 are computed only if they require them, so fixed sketches cost no product backward.

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_matmul(ones, ones, ones, ones, ones, scale=0.5)
        tensor([[4., 4.],
                [4., 4.]])
    """
    left, right = x @ S1, x @ U2
    if bias is None:
        return torch.addmm((left * scale) @ U1, right, S2, alpha=scale)
    return torch.addmm(torch.addmm(bias, left, U1, alpha=scale), right, S2, alpha=scale)


def chained_matmul(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, 2R)
    """The same four products without autograd's needs, and ``scale x [S1 | U2]``, scaled before it is rounded.

    Example:
        >>> ones = torch.ones(1, 2)
        >>> chained_matmul(ones, ones.mT, ones, ones, ones.mT, scale=0.5)
        (tensor([[2., 2.]]), tensor([[1., 1.]]))
    """
    left, right = _scaled_product(x, S1, scale), _scaled_product(x, U2, scale)
    out = left @ U1 if bias is None else torch.addmm(bias, left, U1)
    return torch.addmm(out, right, S2), torch.cat((left, right), 1)


def joined_matmul(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, 2R)
    """The product as two on concatenated factors, and ``scale x [S1 | U2]``, scaled before it is rounded.

    Example:
        >>> ones = torch.ones(1, 2)
        >>> joined_matmul(ones, ones.mT, ones, ones, ones.mT, scale=0.5)
        (tensor([[2., 2.]]), tensor([[1., 1.]]))
    """
    inner = _scaled_product(x, torch.cat((S1, U2), 1), scale)
    outer = torch.cat((U1, S2), 0)
    return (inner @ outer if bias is None else torch.addmm(bias, inner, outer)), inner


def packed_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out / 32), int32
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (R, in / 32), int32
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, 2R)
    """The product with signs as :func:`~panther.kernels.pack_signs` packs them, unpacked block by block.

    Example:
        >>> ones, plus = torch.ones(1, 2), torch.zeros(1, 1, dtype=torch.int32)
        >>> packed_matmul(ones, ones.mT, plus, ones, plus, scale=0.5)
        (tensor([[2., 2.]]), tensor([[1., 1.]]))
    """
    (rows, n_in), (R, n_out) = x.shape, S2.shape
    right = x.new_zeros(rows, R, dtype=torch.promote_types(x.dtype, torch.float32))
    for block, words in _blocks(n_in, R):
        right += _scaled_product(x[:, block], unpack_signs(U2[:, words], _length(block), x.dtype).mT, scale)
    inner = torch.cat((_scaled_product(x, S1, scale), right.to(x.dtype)), 1)
    left, right = inner[:, :R], inner[:, R:]
    out = x.new_empty(rows, n_out)
    for block, words in _blocks(n_out, R):
        part = left @ unpack_signs(U1[:, words], _length(block), x.dtype)
        torch.addmm(part if bias is None else part.add_(bias[block]), right, S2[:, block], out=out[:, block])
    return out, inner


def _scaled_product(x: Tensor, A: Tensor, scale: float) -> Tensor:
    """``scale x A``, in half precision scaled before it is rounded, which may overflow."""
    if x.dtype.itemsize > 2:
        return (x @ A) * scale
    return torch.addmm(x.new_zeros(()).expand(x.shape[0], A.shape[1]), x, A, beta=0, alpha=scale)


def _blocks(n: int, R: int) -> list[tuple[slice, slice]]:
    """Ranges of features that are unpacked together, and their words."""
    step = max(1, _UNPACKED // (32 * max(R, 1)))
    words = [slice(start, min(start + step, -(-n // 32))) for start in range(0, -(-n // 32), step)]
    return [(slice(32 * part.start, min(32 * part.stop, n)), part) for part in words]


def _length(block: slice) -> int:
    return block.stop - block.start

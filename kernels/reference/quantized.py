"""The product with a quantized weight and its low-rank correction, by expanding the weight."""

__all__ = ["quantized_matmul"]

import torch
from torch import Tensor

from .codes import unpack_codes


def quantized_matmul(
    x: Tensor,
    codes: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    inner: Tensor | None = None,
    left: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``x Q^T + inner left^T + bias`` with ``Q = scales * (codes - zeros)`` by groups, summed in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    columns = x.shape[1]
    numbers = unpack_codes(codes, bits, columns).to(wide)
    s, z = (part.to(wide).repeat_interleave(group_size, 1)[:, :columns] for part in (scales, zeros))
    weight = ((numbers - z) * s).to(x.dtype)
    y = x.to(wide) @ weight.to(wide).mT
    if inner is not None and left is not None:
        y = y + inner.to(wide) @ left.to(wide).mT
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)

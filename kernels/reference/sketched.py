"""The sketched product ``scale (x S1 U1 + x U2 S2) + bias`` in plain torch, and its two halves.

Between the halves ranks can exchange the 2R numbers of a row.
"""

__all__ = ["scaled_product", "sketched_inner", "sketched_matmul", "sketched_outer"]

import torch
from torch import Tensor


def sketched_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out)
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (in, R)
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> Tensor:  # (rows, out)
    """Return the product as four matrix products, ordered so that backward computes no product that is not needed.

    Gradients of U1 and U2 are computed only if they require them, so fixed sketches cost no product backward.
    """
    left, right = x @ S1, x @ U2
    if bias is None:
        return torch.addmm((left * scale) @ U1, right, S2, alpha=scale)
    return torch.addmm(torch.addmm(bias, left, U1, alpha=scale), right, S2, alpha=scale)


def sketched_inner(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U2: Tensor,  # (in, R)
    scale: float = 1.0,
) -> Tensor:  # (rows, 2R)
    """Return ``scale x [S1 | U2]`` by one product per factor, so that only factors that require a gradient get one."""
    return torch.cat([scaled_product(x, S1, scale), scaled_product(x, U2, scale)], 1)


def sketched_outer(
    inner: Tensor,  # (rows, 2R)
    U1: Tensor,  # (R, out)
    S2: Tensor,  # (R, out)
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (rows, out)
    """Return ``inner [U1 ; S2] + bias`` as two products, so that U1 gets a gradient only if it requires one."""
    left, right = inner[:, : len(U1)], inner[:, len(U1) :]
    return torch.addmm(left @ U1 if bias is None else torch.addmm(bias, left, U1), right, S2)


def scaled_product(x: Tensor, A: Tensor, scale: float) -> Tensor:
    """Return ``scale x A``, in half precision scaled before it is rounded, because the rounded product may overflow."""
    if x.dtype.itemsize > 2:
        return x @ A if scale == 1.0 else (x @ A) * scale
    return torch.addmm(x.new_zeros(()).expand(x.shape[0], A.shape[1]), x, A, beta=0, alpha=scale)

"""The sketched product ``scale (x S1 U1 + x U2 S2) + bias`` in plain torch."""

__all__ = ["sketched_matmul"]

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

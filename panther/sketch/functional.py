"""Function forms: sketches as tensors, and a tensor sketched along one dimension."""

__all__ = ["scaled_sign_sketch"]

import torch
from torch import Tensor

from panther.sketch.dense import SignSketch


def scaled_sign_sketch(
    m: int,
    n: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    seed: int | None = None,
) -> Tensor:  # (m, n)
    r"""A random sign matrix of shape (m, n), entries :math:`\pm 1/\sqrt m`, as a tensor.

    Args:
        m: Number of rows, the sketch size.
        n: Number of columns.
        device: None is torch's default.
        dtype: Floating dtype; None is torch's default.
        seed: None draws one from torch's default CPU generator.

    Example:
        >>> scaled_sign_sketch(4, 3, seed=0).abs().unique()
        tensor([0.5000])
    """
    return SignSketch(m, n, seed=seed, device=device, dtype=dtype).dense()

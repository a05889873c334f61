"""The sketched product in two halves, for layers that exchange its 2R inner numbers of a row between ranks."""

__all__ = ["sketched_inner", "sketched_outer"]

import torch
from torch import Tensor

from .. import reference
from ..cpu import sketched as joined
from ._crossover import choose_path
from .folded import folded_inner, folded_outer
from .library import needs_torch


def sketched_inner(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U2: Tensor,  # (in, R)
    scale: float = 1.0,
) -> Tensor:  # (rows, 2R)
    """Return ``scale x [S1 | U2]``, the first half of :func:`sketched_matmul`.

    Args:
        x: Input, two-dimensional.
        S1: Trained factor on the input side.
        U2: Sketch on the input side, dense, or the signs (in,) of a sparse one.
        scale: Multiplies the product; in half precision, before the product is rounded.

    Returns:
        A tensor of shape ``(rows, 2R)``.

    Raises:
        RuntimeError: Torch's, if shapes do not fit together, or operands are on several devices.

    Cost: ``4 R in`` flops a row, and 1.5 times that backward when U2 is fixed.

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_inner(ones, ones, ones, 0.5).shape
        torch.Size([2, 4])
    """
    if U2.dim() == 1:
        return folded_inner(x, S1, U2, scale)
    if torch.compiler.is_compiling() or needs_torch() or choose_path(len(x), S1.shape[1], triton=False) == "chain":
        return reference.sketched_inner(x, S1, U2, scale)
    inner: Tensor = joined.InnerProduct.apply(x, S1, U2, scale)  # type: ignore[no-untyped-call]
    return inner


def sketched_outer(
    inner: Tensor,  # (rows, 2R)
    U1: Tensor,  # (R, out)
    S2: Tensor,  # (R, out)
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (rows, out)
    """Return ``inner [U1 ; S2] + bias``, the second half of :func:`sketched_matmul`.

    Args:
        inner: Result of :func:`sketched_inner`, or its sum over ranks.
        U1: Sketch on the output side, dense, or the signs (out,) of a sparse one.
        S2: Trained factor on the output side.
        bias: Added to every row.

    Returns:
        A tensor of shape ``(rows, out)``.

    Raises:
        RuntimeError: Torch's, if shapes do not fit together, or operands are on several devices.

    Cost: ``4 R out`` flops a row, and 1.5 times that backward when U1 is fixed.

    Example:
        >>> sketched_outer(
        ...     torch.ones(3, 4), torch.ones(2, 5), torch.ones(2, 5)
        ... )[0]
        tensor([4., 4., 4., 4., 4.])
    """
    if U1.dim() == 1:
        return folded_outer(inner, U1, S2, bias)
    if torch.compiler.is_compiling() or needs_torch() or choose_path(len(inner), len(U1), triton=False) == "chain":
        return reference.sketched_outer(inner, U1, S2, bias)
    outer: Tensor = joined.OuterProduct.apply(inner, U1, S2, bias)  # type: ignore[no-untyped-call]
    return outer

"""The one dispatch between the torch reference and what is faster for a shape.

Two exact orders of the same sums exist for a sketched product. The *chain* is the reference: four products, each
writing its result. The *joined* one concatenates factors, reads the input once and writes the output once; it pays
when the batch outweighs copying the factors.
"""

__all__ = ["sketched_matmul"]

from typing import Any

import torch
from torch import Tensor

from . import reference

# Measured on two cores (batch 1 to 512, R 16 and 128, fp32 and bf16): joining wins from about 4 R rows on.
_JOIN_ROWS_PER_RANK = 4


def sketched_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out)
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (in, R)
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> Tensor:  # (rows, out)
    """``scale (x S1 U1 + x U2 S2) + bias`` by the faster of two orders; see the module's text.

    Args:
        x: Input, two-dimensional.
        S1: Trained factor on the input side.
        U1: Sketch on the output side.
        S2: Trained factor on the output side.
        U2: Sketch on the input side.
        bias: Added to every row.
        scale: Multiplies both products.

    Returns:
        The output of shape ``(rows, out)``.

    Cost: ``4 R (in + out)`` flops a row, and 1.5 times that backward when U1 and U2 are fixed.

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_matmul(ones, ones, ones, ones, ones, scale=0.5).shape
        torch.Size([2, 2])
    """
    # A compiled graph may serve any batch, so it must not branch on one; Inductor fuses what the chain writes twice.
    if torch.compiler.is_compiling() or x.shape[0] < _JOIN_ROWS_PER_RANK * S1.shape[1]:
        return reference.sketched_matmul(x, S1, U1, S2, U2, bias, scale)
    if U1.requires_grad or U2.requires_grad:  # all four are trained: joining wastes nothing under plain autograd
        return _joined(x, torch.cat((S1, U2), 1), torch.cat((U1, S2), 0), bias, scale)[0]
    return _JoinedWithFixedSketches.apply(x, S1, U1, S2, U2, bias, scale)


def _joined(x: Tensor, A: Tensor, B: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """``scale x A B + bias`` and ``x A``."""
    inner = x @ A
    if bias is None:
        return (inner * scale) @ B, inner
    return torch.addmm(bias, inner, B, alpha=scale), inner


class _JoinedWithFixedSketches(torch.autograd.Function):
    """The joined product whose backward spends nothing on the gradients of U1 and U2.

    Backward and jvp are made of differentiable operations on the inputs alone, so that double backward and
    torch.func work.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        return _joined(x, torch.cat((S1, U2), 1), torch.cat((U1, S2), 0), bias, scale)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, _, ctx.scale = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, S1, U1, S2, U2 = ctx.saved_tensors
        R = S1.shape[1]
        inner = (grad @ torch.cat((U1, S2), 0).mT) * ctx.scale  # (rows, 2R), gradient of x [S1 | U2]
        need_x, need_S1, _, need_S2, _, need_bias, _ = ctx.needs_input_grad
        return (
            inner @ torch.cat((S1, U2), 1).mT if need_x else None,
            x.mT @ inner[:, :R] if need_S1 else None,
            None,
            ((x @ U2) * ctx.scale).mT @ grad if need_S2 else None,
            None,
            grad.sum(0) if need_bias else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Any, dS1: Any, dU1: Any, dS2: Any, dU2: Any, dbias: Any, _: Any) -> Tensor:
        x, S1, U1, S2, U2 = ctx.saved_tensors
        out = torch.zeros_like(x[:, :1] @ S2[:1])
        for left, right in ((dx, S1), (x, dS1)):
            if left is not None and right is not None:
                out = out + ctx.scale * (left @ right @ U1)
        if dx is not None:
            out = out + ctx.scale * (dx @ U2 @ S2)
        if dS2 is not None:
            out = out + ctx.scale * (x @ U2 @ dS2)
        return out if dbias is None else out + dbias

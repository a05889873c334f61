"""The halves of the sketched product on joined factors, with gradients that need fewer products than autograd's."""

__all__ = ["InnerProduct", "OuterProduct", "joined_inner", "joined_outer"]

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..reference.sketched_halves import scaled_product


def joined_inner(x: Tensor, factors: Sequence[Tensor], scale: float) -> Tensor:  # (rows, columns of all)
    """Return ``scale x [factors]`` as one product."""
    return scaled_product(x, torch.cat(tuple(factors), 1), scale)


def joined_outer(inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:  # (rows, out)
    """Return ``inner [U1 ; S2] + bias`` as one product."""
    outer = torch.cat((U1, S2), 0)
    return inner @ outer if bias is None else torch.addmm(bias, inner, outer)


class InnerProduct(torch.autograd.Function):
    """The first half of the sketched product.

    Its gradients use differentiable operations, so that they can be differentiated again.
    """

    @staticmethod
    def forward(x: Tensor, scale: float, *factors: Tensor) -> Tensor:  # all S1, then all U2
        """Return ``scale x [factors]``."""
        return joined_inner(x, factors, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the operands."""
        x, ctx.scale, *factors = inputs
        ctx.save_for_backward(x, *factors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands that need one."""
        x, *factors = ctx.saved_tensors
        needed = ctx.needs_input_grad
        d = grad if ctx.scale == 1.0 else grad * ctx.scale
        dx = d @ torch.cat(factors, 1).mT if needed[0] else None
        # Neighbouring factors that need a gradient share a product: all S1, and all U2 if they are trained.
        gradients: list[Tensor | None] = [None] * len(factors)
        start = 0
        for need, run in groupby(range(len(factors)), key=lambda i: needed[2 + i]):
            members = list(run)
            widths = [factors[i].shape[1] for i in members]
            if need:
                gradient = x.mT @ d[:, start : start + sum(widths)]
                for i, part in zip(members, gradient.split(widths, 1), strict=True):
                    gradients[i] = part
            start += sum(widths)
        return dx, None, *gradients


class OuterProduct(torch.autograd.Function):
    """The second half of the sketched product."""

    @staticmethod
    def forward(inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``inner [U1 ; S2] + bias``."""
        return joined_outer(inner, U1, S2, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the operands without the bias."""
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands that need one."""
        inner, U1, S2 = ctx.saved_tensors
        need_inner, need_U1, need_S2, need_bias = ctx.needs_input_grad
        R = len(U1)
        return (
            grad @ torch.cat((U1, S2), 0).mT if need_inner else None,
            inner[:, :R].mT @ grad if need_U1 else None,
            inner[:, R:].mT @ grad if need_S2 else None,
            grad.sum(0) if need_bias else None,
        )

"""The sketched product with sparse sketches in as many passes over the input and the output as a pair of layers takes.

The output is written by :func:`~..reference.folded.tile`, with the bias, and the product with S2 is added in place.
"""

__all__ = ["folded_inner", "folded_matmul", "folded_outer"]

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._torch import are_transforms_active, is_differentiated_forward
from ..reference.folded import fold, tile
from ..reference.sketched import scaled_product


def folded_matmul(
    x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None, scale: float
) -> Tensor:  # (rows, out)
    """Return ``scale (x S1 U1 + x U2 S2) + bias`` for the sketches of these signs, (out,) and (in,).

    Cost: ``2 R (in + out)`` flops a row and twice that backward, and a pass over input and output. Backward keeps x and
    R numbers a row. Half precision is computed in float32 on a CPU that has no products in it, which takes a tenth of
    the time.
    """
    if torch.compiler.is_compiling() or is_differentiated_forward() or are_transforms_active():
        return reference.folded_matmul(x, S1, out_signs, S2, in_signs, bias, scale)
    if torch.is_grad_enabled():
        product: Tensor = FoldedProduct.apply(x, S1, out_signs, S2, in_signs, bias, scale)  # type: ignore[no-untyped-call]
        return product
    return _product(x, S1, out_signs, S2, in_signs, bias, scale)[0]


def folded_inner(x: Tensor, S1: Tensor, in_signs: Tensor, scale: float) -> Tensor:  # (rows, 2R)
    """Return ``scale x [S1 | U2]``."""
    return torch.cat([scaled_product(x, S1, scale), _scaled_fold(x, in_signs, S1.shape[1], scale)], 1)


def folded_outer(inner: Tensor, out_signs: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:  # (rows, out)
    """Return ``inner [U1 ; S2] + bias``."""
    R = len(S2)
    return torch.addmm(tile(inner[:, :R], out_signs, bias), inner[:, R:], S2)


def _product(
    x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, R)
    """Return the product, and ``x U2``, in float16 scaled."""
    dtype = x.dtype
    x, S1, out_signs, S2, in_signs, bias = _computed(x, S1, out_signs, S2, in_signs, bias)
    out = tile(torch.mm(x, S1), out_signs, bias, scale)
    if x.dtype is torch.float16:
        right = _scaled_fold(x, in_signs, S1.shape[1], scale)
        return out.addmm_(right, S2), right
    right = fold(x, in_signs, S1.shape[1])
    out.addmm_(right, S2, alpha=scale)
    return (out, right) if x.dtype is dtype else (out.to(dtype), right.to(dtype))


def _computed(*operands: Tensor | None) -> list[Any]:
    """Return the operands in the dtype in which products are fast."""
    if operands[0].dtype.itemsize > 2 or not operands[0].is_cpu or _has_products(operands[0].dtype):  # type: ignore[union-attr]
        return list(operands)
    return [operand if operand is None else operand.float() for operand in operands]


@cache
def _has_products(dtype: torch.dtype) -> bool:
    """Return whether the processor multiplies matrices of a dtype of half precision."""
    ending = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return any(name.endswith(ending) and bool(value) for name, value in torch.cpu.get_capabilities().items())


def _scaled_fold(x: Tensor, signs: Tensor, rank: int, scale: float) -> Tensor:
    # In float16 sums could overflow before they are scaled.
    return fold(x, signs * scale, rank) if x.dtype is torch.float16 else fold(x, signs, rank) * scale


class FoldedProduct(torch.autograd.Function):
    """The product, whose output and whose gradient of the input are each written once and added to in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        S1: Tensor,
        out_signs: Tensor,
        S2: Tensor,
        in_signs: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Return the output."""
        out, right = _product(x, S1, out_signs, S2, in_signs, bias, scale)
        need_x, need_S1, _, need_S2, *_ = ctx.needs_input_grad
        # Tensors that were made in inference mode cannot be saved, and frozen factors need not be.
        kept_x = x if need_S1 or (need_x and need_S2) else None
        factors = (S1, S2) if need_x else (None, None)
        ctx.save_for_backward(kept_x, *factors, right if need_S2 else None, out_signs, in_signs)
        ctx.scale, ctx.rank = scale, S1.shape[1]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, by differentiable operations if they are differentiated again."""
        dtype = grad.dtype
        grad, x, S1, S2, right, out_signs, in_signs = _computed(grad, *ctx.saved_tensors)
        need_x, need_S1, _, need_S2, _, need_bias, _ = ctx.needs_input_grad
        R, scale, dx = ctx.rank, ctx.scale, None
        if need_x or need_S1:
            d_left = _scaled_fold(grad, out_signs, R, scale)
        if need_x:
            dx = tile(grad @ S2.mT, in_signs, None, scale)
            dx = torch.addmm(dx, d_left, S1.mT) if torch.is_grad_enabled() else dx.addmm_(d_left, S1.mT)
        if need_S2:
            if torch.is_grad_enabled() and need_x:  # The saved number is a constant.
                right = _scaled_fold(x, in_signs, R, scale)
            elif grad.dtype is not torch.float16:
                right = right * scale
        return (
            dx if dx is None else dx.to(dtype),
            (x.mT @ d_left).to(dtype) if need_S1 else None,
            None,
            (right.mT @ grad).to(dtype) if need_S2 else None,
            None,
            grad.sum(0).to(dtype) if need_bias else None,
            None,
        )

"""The product with a quantized weight that is not trained; its gradient expands the weight again and keeps nothing."""

__all__ = ["FrozenProduct"]

from typing import Any

import torch
from torch import Tensor


class FrozenProduct(torch.autograd.Function):
    """The layer's output, with gradients for the input and the bias.

    Autograd would keep the expanded weight of every layer from the forward to the backward. It would take the memory of
    the dense model, which adapters on a quantized model should save. The bias is an argument so that autograd sees it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        """Return the output, as without gradients: they are off here."""
        ctx.layer = layer
        ctx.bias_dtype = None if bias is None else bias.dtype
        output: Tensor = layer._without_gradients(x, bias)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of input and bias by differentiable operations."""
        (grad,) = grads
        layer, at_input = ctx.layer, None
        if layer.bits is not None:
            at_input = grad @ layer._expanded(grad.dtype)
        if layer.low_rank:
            left, right = layer._factors(grad.dtype)
            correction = (grad @ left) @ right
            at_input = correction if at_input is None else at_input + correction
        at_bias = None
        if ctx.needs_input_grad[1]:
            at_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=ctx.bias_dtype)
        return at_input, at_bias, None  # type: ignore[return-value]  # a layer has codes or factors

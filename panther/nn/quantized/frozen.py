"""The product with a frozen quantized weight, whose gradient expands the weight again in place of keeping it."""

__all__ = ["FrozenProduct"]

from typing import Any

import torch
from torch import Tensor


class FrozenProduct(torch.autograd.Function):
    """The layer's output, with a gradient for the input alone.

    Autograd would keep the expanded weight of every layer from the forward to the backward, which takes the memory of
    the dense model: just what adapters on a quantized model are to save.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        """Return the output, as without gradients: they are off here."""
        ctx.layer = layer
        output: Tensor = layer(x.detach())
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient at the input; of torch's operations, so that it has derivatives too."""
        (grad,) = grads
        layer, at_input = ctx.layer, None
        if layer.bits is not None:
            at_input = grad @ layer._expanded(grad.dtype)
        if layer.low_rank:
            left, right = layer._factors(grad.dtype)
            correction = (grad @ left) @ right
            at_input = correction if at_input is None else at_input + correction
        return at_input, None  # type: ignore[return-value]  # the constructor refuses a layer without either

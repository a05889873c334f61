"""Rounding of inputs to 8 bits a number, in operations that compilers trace and through which derivatives pass."""

__all__ = ["ACTIVATIONS", "check_activations", "rounded_input", "rounded_weight"]

import torch
from torch import Tensor

from panther.kernels.cpu.integers import requantized_steps, rounded_rows

ACTIVATIONS = (None, "int8")


def check_activations(activations: str | None) -> str | None:
    """Return the argument, or raise ValueError if it is unknown."""
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations={activations!r} must be None, which does not round inputs, or 'int8'")
    return activations


def rounded_input(x: Tensor) -> Tensor:  # (*, in)
    """Return x with each row rounded to 255 numbers, with the derivative of x."""
    if x.is_nested and x.layout is torch.strided:  # nn.TransformerEncoder passes such batches; they have no amax
        return torch.nested.as_nested_tensor([rounded_input(sequence) for sequence in x.unbind()])
    with torch.no_grad():
        numbers, steps = rounded_rows(x)
        rounded = (numbers * steps).to(x.dtype)
    return _through(x, rounded)


def rounded_weight(Q: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:  # (out, in)
    """Return Q with each row rounded to 255 numbers, as in integer products, with the derivative of Q."""
    with torch.no_grad():
        steps = requantized_steps(scales, zeros, bits)
        rounded = (Q / steps).round() * steps
    return _through(Q, rounded)


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded`` with the derivative of x: the straight-through estimator (Y. Bengio et al., arXiv:1308.3432).

    The difference of x to itself is an exact zero, except for infinite numbers, whose rows are not finite anyway.
    """
    return rounded + (x - x.detach())

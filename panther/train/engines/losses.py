"""The loss of a batch: where a model returns it, its value as a number, and checks of its type and shape."""

__all__ = ["check_loss", "loss_of_output", "value_of_loss", "zero_of_output"]

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from panther._torch import tree_leaves
from panther.errors import ConfigError


def loss_of_output(output: Any) -> Tensor:
    """Return the loss that a model computes itself: its output, or the entry or attribute ``loss`` of its output."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ConfigError(
            f"there is no loss_fn, and the model returned a {type(output).__name__} without a loss: pass loss_fn, or "
            "let the model return its loss"
        )
    return loss


def zero_of_output(output: Any, loss: Tensor) -> Tensor:
    """Return 0 as a function of a model's outputs; the loss is used only if the model has no other output."""
    parts = output
    if not isinstance(output, Tensor | Mapping | tuple | list):
        parts = getattr(output, "__dict__", output)
    leaves = [leaf for leaf in tree_leaves(dict(parts) if isinstance(parts, Mapping) else parts) if leaf is not loss]
    trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad] or [loss]
    # In this order no infinity is multiplied by 0, neither here nor in the gradient.
    return torch.stack([(leaf * 0.0).nan_to_num(0.0, 0.0, 0.0).sum() for leaf in trained]).sum()


def value_of_loss(loss: Tensor) -> float | Tensor:
    """Return a loss as a number, or as a detached tensor if it is on a GPU."""
    return loss.item() if loss.is_cpu else loss.detach().double()


def check_loss(loss: Any, from_loss_fn: bool) -> None:
    """Raise ConfigError unless a loss is a scalar tensor that depends on a trainable parameter."""
    if not isinstance(loss, Tensor):
        raise ConfigError(f"loss_fn returned a {type(loss).__name__}: it must return one tensor and nothing else")
    if loss.dim():
        fix = "reduce it" if from_loss_fn else "without loss_fn the model's output is the loss, so pass loss_fn"
        raise ConfigError(f"the loss has shape {tuple(loss.shape)} and must be a scalar: {fix}")
    if not loss.requires_grad:
        raise ConfigError("the loss depends on no trainable parameter: do not detach it or make it from numbers")

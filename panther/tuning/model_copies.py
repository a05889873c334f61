"""Copies of the user's model, which is only read, or new models from the user's function."""

__all__ = ["call_model_fn", "copy_model", "copy_or_call_again"]

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from panther.errors import TuningError


def call_model_fn(model_fn: Callable[..., nn.Module], arguments: Mapping[str, Any], where: str) -> nn.Module:
    """Call the user's function, and return its model.

    Raises:
        TuningError: If the function raises, or returns something else.
    """
    try:
        model = model_fn(**arguments)
    except Exception as error:
        raise TuningError(f"the model's function raised {type(error).__name__}: {error} for {where}") from error
    if not isinstance(model, nn.Module):
        raise TuningError(f"the model's function returned a {type(model).__name__}, and must return an nn.Module")
    return model


def copy_model(model: nn.Module, from_function: bool = False) -> nn.Module:
    """Return a copy of a model, or the model itself if it cannot be copied and ``from_function`` is true.

    Raises:
        TuningError: If the model cannot be copied and no function returned it.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        if from_function:
            return model
        raise TuningError(
            f"the model cannot be copied ({type(error).__name__}: {error}): pass a function that returns a new model, "
            "as in pr.tune(lambda: make_model(), ...)"
        ) from error


def copy_or_call_again(model: nn.Module, model_fn: Callable[[], nn.Module] | None) -> nn.Module:
    """Return a copy of a model. If it cannot be copied, call its function again.

    Raises:
        TuningError: If the second call does not return the same weights in a new model.
    """
    second = copy_model(model, model_fn is not None)
    if second is not model:
        return second
    assert model_fn is not None
    second = call_model_fn(model_fn, {}, "its second call")
    pairs = zip(model.state_dict().values(), second.state_dict().values(), strict=False)
    if (
        not set(second.modules()).isdisjoint(model.modules())
        or [name for name, _ in second.named_modules()] != [name for name, _ in model.named_modules()]
        or not all(torch.equal(tensor, other) for tensor, other in pairs if isinstance(tensor, Tensor))
    ):
        raise TuningError(
            "the model cannot be copied, and its function returned the same object or other weights when it was called "
            "again: it must return a new model with the same weights"
        )
    return second

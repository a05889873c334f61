"""The user's model: made by a function of theirs, or copied, so that the one that was given is only read."""

__all__ = ["another", "copied", "made"]

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from panther.errors import TuningError


def made(model_fn: Callable[..., nn.Module], arguments: Mapping[str, Any], where: str) -> nn.Module:
    """Return the model of a user's function.

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


def copied(model: nn.Module, from_function: bool = False) -> nn.Module:
    """Return a copy of a model; of one that cannot be copied, and that a function returned, the model itself.

    Raises:
        TuningError: If the model cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        if from_function:
            return model
        raise TuningError(
            f"the model cannot be copied ({type(error).__name__}: {error}): give a function that returns a new one, as "
            "in pr.tune(lambda: make_model(), ...)"
        ) from error


def another(model: nn.Module, model_fn: Callable[[], nn.Module] | None) -> nn.Module:
    """Return a copy of a model, or where it cannot be copied another one of its function, which is called again.

    Raises:
        TuningError: If that is not the same model.
    """
    found = copied(model, model_fn is not None)
    if found is not model:
        return found
    assert model_fn is not None
    found = made(model_fn, {}, "its second call")
    pairs = zip(model.state_dict().values(), found.state_dict().values(), strict=False)
    if (
        not set(found.modules()).isdisjoint(model.modules())
        or [name for name, _ in found.named_modules()] != [name for name, _ in model.named_modules()]
        or not all(torch.equal(one, other) for one, other in pairs if isinstance(one, Tensor))
    ):
        raise TuningError(
            "the model cannot be copied, and its function returned the same object or other weights when it was called "
            "again: it must return a new model with the same weights"
        )
    return found

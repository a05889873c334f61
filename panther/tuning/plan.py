"""Plans: the changes that trials make to a model; and copies of the user's model."""

__all__ = ["Plan", "TrialError", "call_model_fn", "copy_model"]

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from panther.errors import TuningError


class TrialError(TuningError):
    """The model of a plan cannot be made. The search continues with other trials."""


@dataclass(frozen=True)
class Plan:
    """The changes that a trial makes to the model, as plain values that storages and workers can have.

    Attributes:
        layers: ``form``, ``rank`` and ``bits`` by the names of layers. Other layers do not change.
        attention: ``kernel_fn`` and ``num_random_features`` by the names of attention modules. Other modules stay
            exact.
        heal: Settings of a :class:`~panther.compression.HealConfig`. If it is empty, nothing is healed.
    """

    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    attention: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heal: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return a JSON text, which is equal for equal plans."""
        return json.dumps({name: value for name, value in vars(self).items() if value}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan of :meth:`to_json`."""
        return cls(**json.loads(text))


def call_model_fn(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """Call the user's function, and return its model."""
    try:
        model = model_fn()
    except Exception as error:
        raise TuningError(f"the model's function raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise TuningError(f"the model's function returned a {type(model).__name__}, and must return an nn.Module")
    return model


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise TuningError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and trials run on a copy: remove what "
            "copy.deepcopy does not take, such as open files and parameters that are not leaves"
        ) from error

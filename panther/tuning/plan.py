"""Plans: the changes that trials make to a model; and what makes the models of plans."""

__all__ = ["Models", "Plan", "TrialError"]

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from torch import nn

from panther.compression import CompressionReport
from panther.compression.calibration.runner import Runner
from panther.compression.forms import Replacement
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
        heal: Settings of a :class:`panther.HealConfig`. If it is empty, nothing is healed.
        train: Settings of a :class:`panther.train.TrainConfig` for a model that is trained from scratch.
        model: Arguments of the function that makes a model that is trained from scratch.
    """

    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    attention: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heal: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return a JSON text, which is equal for equal plans."""
        return json.dumps({name: value for name, value in vars(self).items() if value}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan of :meth:`to_json`."""
        return cls(**json.loads(text))


class Models(Protocol):
    """Makes the models of plans: by compressing layers of one model, or by training new models."""

    @property
    def runner(self) -> Runner:
        """Return the model that is evaluated as the unchanged one, with the calibration batches."""

    @property
    def seconds(self) -> float:
        """Return the duration of the preparation that all trials share."""

    @property
    def attention_names(self) -> Mapping[nn.Module, str]:
        """Return the names of the attention modules that plans may replace."""

    def trial_layers(self, plan: Plan) -> Replacement:
        """Return the new modules of a plan for a trial."""

    def applied(self, plan: Plan, replacement: Replacement, where: str) -> AbstractContextManager[nn.Module]:
        """Yield the model of a plan, which exists only within the context."""

    def build(self, plan: Plan) -> tuple[nn.Module, CompressionReport | None]:
        """Return a new model of a plan, and the report of its layers."""

    def without_functions(self) -> "Models":
        """Return these models without functions that only the search's own process needs."""

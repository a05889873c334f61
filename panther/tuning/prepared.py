"""A private copy of the model with all that trials share: the layers, moments, decompositions and their losses.

A trial is then a truncation: components that are stored become factors of the rank that it takes.
"""

__all__ = ["Plan", "Prepared", "Settings", "TrialError", "prepare"]

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from panther._torch import children_of
from panther.compression.config import HealConfig
from panther.compression.conversion import Replacement, convert_all, convert_target
from panther.compression.forms.allocation import Allocation, allocated
from panther.compression.forms.choice import BYTES, Cost, seconds
from panther.compression.forms.fitting import Fits, fit_targets
from panther.compression.forms.options import DENSE, Choice, Forms, Option, Options
from panther.compression.forms.ridge import fitted_with_care
from panther.compression.forms.timing import timed_layers
from panther.compression.install import install_layers
from panther.compression.measurement import measure
from panther.compression.report import CompressionReport, HealResult
from panther.compression.runner import Runner
from panther.compression.survey import survey_targets
from panther.compression.targets import Survey, Target, replace_modules, select_targets, swap_modules
from panther.errors import CompressionError, TrainingError, TuningError
from panther.nn._specs import note_in_config_
from panther.nn.attention.linearized import CHILD, convert_attention
from panther.tuning.attention import Attention, calibrated, find, replacement_of
from panther.tuning.models import another

_MIDDLE = 0.25  # share of the bytes at which losses are measured: that of int8 in float32
_KEPT = 4.0  # bytes of kept layers over those of the dense ones; the decompositions take as much


class TrialError(TuningError):
    """A model of one plan cannot be made; the search continues without it."""


@dataclass(frozen=True)
class Plan:
    """What a trial does to the model; plain values, so that a storage holds it and a worker can be sent it.

    Attributes:
        layers: ``form``, ``rank`` and ``bits`` by the names of layers; others stay as they are.
        attention: ``kernel_fn`` and ``num_random_features`` by the names of attention modules; others stay exact.
        heal: Settings of a :class:`panther.HealConfig`; without any, nothing is healed.
        train: Settings of a :class:`panther.train.TrainConfig`, of a model that is trained from scratch.
        model: Arguments of the function that makes such a model.
    """

    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    attention: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heal: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return a text that is the same for equal plans."""
        return json.dumps({name: value for name, value in vars(self).items() if value}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan of :meth:`to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`panther.tune` that mean what they mean in :func:`panther.compress`."""

    forms: Forms
    include: Any = None
    exclude: Any = None
    forward_fn: Callable[[nn.Module, Any], Any] | None = None
    loss_fn: Any = None
    mask_fn: Any = None
    statistics_memory_bytes: int | None = None


@dataclass(frozen=True)
class Prepared:
    """A copy of the model, and what all trials share.

    Attributes:
        model: The copy, in eval mode.
        runner: It and the calibration batches.
        survey: Its layers.
        fits: Their components and codes, with predicted losses.
        options: What each layer can become, with the losses that choices are made by.
        cost: What a budget is of, bytes or seconds.
        seed: Of sketches and healing.
        seconds: What the preparation took.
        training: Which of the model's modules were in training mode.
        attention: The attention modules that can be replaced.
        model_fn: The user's function that returns the model, if there is one.
        allocations: Choices of :func:`panther.compress` that were made, by budget.
    """

    model: nn.Module
    runner: Runner
    survey: Survey
    fits: Fits
    options: Options
    cost: Cost
    seed: int
    seconds: float
    training: Sequence[bool] = ()
    attention: Attention = field(default_factory=lambda: Attention({}, {}))
    model_fn: Callable[[], nn.Module] | None = None
    allocations: dict[float, Allocation] = field(default_factory=dict, repr=False)
    _layers: dict[Any, tuple[int, Replacement]] = field(default_factory=dict, repr=False)
    """Bytes and new layers by target, form and rank, those of the last trials last."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Return the layers that can become something else."""
        return self.survey.targets

    @property
    def dense(self) -> float:
        """Return what all layers cost as they are."""
        return sum(map(self.cost.dense, self.targets))

    def allocation(self, budget: float) -> Allocation:
        """Return the choice of :func:`panther.compress` for a budget, a share of what the layers cost as they are.

        It is made once for each budget, because it runs candidates on the held-out batches.
        """
        if budget in self.allocations:
            return self.allocations[budget]
        kind = "global" if self.survey.gradients else "uniform"
        with self.runner.calibrating(self.seed):
            limit = budget * self.dense
            found = allocated(self.runner, self.survey, self.fits, kind, limit, None, self.seed, self.cost)
        self.allocations[budget] = found
        return found

    def plan_of(self, choice: Choice) -> Plan:
        """Return the plan of a choice."""
        layers = {}
        for target, option in choice.items():
            if option.form != DENSE:
                entries = {"form": option.form, "rank": option.rank, "bits": option.bits}
                layers[target.name] = {name: value for name, value in entries.items() if value is not None}
        return Plan(layers)

    def choice_of(self, plan: Plan) -> Choice:
        """Return the choice of a plan, with predicted losses."""
        found: Choice = {}
        for target in self.targets:
            wanted = plan.layers.get(target.name, {"form": DENSE})
            found[target] = next(
                (
                    option
                    for option in self.fits.options[target]
                    if (option.form, option.rank) == (wanted["form"], wanted.get("rank"))
                ),
                Option(DENSE, target.dense_bytes, error=0.0),
            )
        return found

    def trial_layers(self, plan: Plan) -> Replacement:
        """Return the new modules of a plan for a trial; they are shared with other trials, and must not be changed."""
        if plan.heal:
            return self.replacement(plan)[0]
        new: Replacement = {}
        seeds = self.survey.seeds(self.seed)
        for target, option in self.choice_of(plan).items():
            # Trials draw the same few ranks of a layer again and again: after ten trials most of them are here.
            key = target, option.form, option.rank
            if (found := self._layers.pop(key, None)) is None:
                found = option.bytes, convert_target(target, self.fits, option, seeds[target])
            self._layers[key] = found
            new |= found[1]
        most = _KEPT * sum(target.dense_bytes for target in self.targets)
        kept = sum(size for size, _ in self._layers.values())
        for key in list(self._layers):
            if kept <= most:
                break
            kept -= self._layers.pop(key)[0]
        return new | self._attention(plan, new)

    def replacement(self, plan: Plan) -> tuple[Replacement, HealResult | None]:
        """Make the new modules of a plan, healed if it says so.

        Raises:
            TuningError: If attention by features does not run in the model, or the model does not call it.
        """
        new = convert_all(self.survey, self.fits, self.choice_of(plan), self.seed)
        new |= self._attention(plan, new)
        if not plan.heal or not new:
            return new, None
        from panther.compression import healing  # here, because it loads the Trainer and torch.distributed's engines

        shared = [old for old in new if old in self.attention_names and not isinstance(old, nn.MultiheadAttention)]
        if shared:
            raise TuningError(
                f"attention {self.attention_names[shared[0]]!r} of transformers shares its weights with the original, "
                "and cannot be healed in a search: leave heal or the attention out"
            )
        try:
            healed, write_ = healing.heal(self.runner, new, HealConfig(**plan.heal), seed=self.seed)
        except (TrainingError, CompressionError) as error:
            raise TrialError(f"healing failed: {error}") from error
        write_()
        return new, healed

    def _attention(self, plan: Plan, new: Replacement) -> Replacement:
        """Make the attention modules of a plan, which hold the new layers in the place of their own."""
        if not plan.attention:
            return {}
        attention = replacement_of(self.attention.modules, plan.attention, self.seed)
        attention = calibrated(self.runner, attention, self.attention_names)
        for module in attention.values():  # copies have their own table of children
            for name, child in children_of(module).items():
                if child is not None and child in new:
                    children_of(module)[name] = new[child]
        return attention

    @property
    def attention_names(self) -> Mapping[nn.Module, str]:
        """Return the names of the attention modules."""
        return {module: name for name, module in self.attention.modules.items()}

    @contextmanager
    def applied(self, plan: Plan, replacement: Replacement, where: str) -> Iterator[nn.Module]:
        """Have the new modules in the model."""
        with replace_modules(self.model, replacement):
            yield self.model

    @torch.inference_mode(False)
    @torch.enable_grad()
    def build(self, plan: Plan) -> tuple[nn.Module, CompressionReport]:
        """Return a model of its own with the new layers, and the report of every layer."""
        choice = self.choice_of(plan)
        replacement, healed = self.replacement(plan)
        with self.runner.calibrating(self.seed):
            measured = measure(self.runner, self.targets, replacement, speed=False)
        model = another(self.model, self.model_fn)
        for module, training in zip(model.modules(), self.training, strict=True):
            module.training = training
        modules = dict(zip(self.model.modules(), model.modules(), strict=True))
        new = {one: replace(one, modules=tuple(modules[old] for old in one.modules)) for one in self.targets}
        targets = tuple(new.values())
        report = install_layers(
            model,
            replace(self.survey, targets=targets),
            self.fits,
            Allocation({new[target]: option for target, option in choice.items()}, "tuned"),
            {modules[old]: layer for old, layer in replacement.items() if old not in self.attention_names},
            replace(measured, errors={new[target]: error for target, error in measured.errors.items()}),
            healed,
            None,
            [
                *self.survey.notes,
                *(f"{name} is attention by features: {dict(v)}" for name, v in plan.attention.items()),
            ],
            "two_sided" if self.fits.passes else "svd",
            self.seed,
            allow_slower=True,
        )
        for name in plan.attention:
            twin, layer = model.get_submodule(name), replacement[self.attention.modules[name]]
            if not isinstance(twin, nn.MultiheadAttention):  # a copy of the module in the new model
                layer = convert_attention(twin, copy.deepcopy(layer.get_submodule(CHILD)))
            swap_modules(model, {twin: layer.train(twin.training)})
        if plan.attention:
            note_in_config_(model)
        return model, report


def prepare(
    runner: Runner,
    settings: Settings,
    *,
    timed: bool,
    training: Sequence[bool],
    seed: int,
    layers: bool = True,
    model_fn: Callable[[], nn.Module] | None = None,
) -> Prepared:
    """Fit all layers of a copied model; without ``layers``, only find its attention.

    With ``timed``, budgets are of seconds in place of bytes.

    Raises:
        CompressionError: If no layer is eligible, or the batches are too few, as for :func:`panther.compress`.
    """
    began = time.perf_counter()
    model, forms = runner.model, settings.forms
    attention = find(model)
    if not layers:
        return Prepared(
            model, runner, Survey((), ()), Fits(), {}, BYTES, seed, time.perf_counter() - began, training, attention,
            model_fn,
        )  # fmt: skip
    with runner.calibrating(seed):
        survey = select_targets(model, settings.include, settings.exclude, smallest=forms.smallest_bytes).check()
        if runner.batches:
            survey = survey_targets(runner, survey, gradients=True).check()
        if timed:
            forms = replace(forms, times=timed_layers(runner, survey.targets, forms))
        cost = seconds(forms.times) if timed else BYTES
        dense = sum(map(cost.dense, survey.targets))

        def fitted(ridge: float) -> Fits:
            return fit_targets(
                runner, survey, forms, None, memory=settings.statistics_memory_bytes, keep=False, heal=None,
                seed=seed, ridge=ridge,
            )  # fmt: skip

        def allocation_of(fits: Fits) -> Allocation:
            kind = "global" if survey.gradients else "uniform"
            limit = max(_MIDDLE * dense, cost.least(fits.options))
            return allocated(runner, survey, fits, kind, limit, None, seed, cost)

        fits, allocation = fitted_with_care(fitted, allocation_of)
    return Prepared(
        model,
        runner,
        survey,
        fits,
        _comparable(survey, fits, allocation),
        cost,
        seed,
        time.perf_counter() - began,
        training,
        attention,
        model_fn,
    )


def _comparable(survey: Survey, fits: Fits, allocation: Allocation) -> Options:
    """Return the options with losses that can be compared between layers.

    Where the output's gradients did not give them, they are the squared relative errors of the layers' own outputs.
    """
    if survey.gradients:
        return allocation.options
    return {
        target: [replace(option, loss=(option.error or 0.0) ** 2) for option in several]
        for target, several in fits.options.items()
    }

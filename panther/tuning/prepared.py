"""A copy of the model, and the layers, moments, decompositions and losses that all trials share.

A trial only truncates the stored components to factors of its ranks.
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

from panther._torch import children_of, put_child
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.survey import survey_targets
from panther.compression.calibration.targets import Survey, Target, replace_modules, select_targets, swap_modules
from panther.compression.config import HealConfig
from panther.compression.fitting import fit_targets
from panther.compression.forms import DENSE, Choice, Fits, FormSettings, Option, Options, Replacement
from panther.compression.forms.conversion import convert_all, convert_target
from panther.compression.install import Outcome, install_layers
from panther.compression.report import CompressionReport, HealResult
from panther.compression.selection.allocation import Allocation, allocate_forms
from panther.compression.selection.convex_hull import BYTES, Cost
from panther.compression.selection.measurement import measure
from panther.compression.selection.refit import fit_and_allocate
from panther.compression.selection.timing import Timing, seconds, time_layers
from panther.errors import CompressionError, TrainingError, TuningError
from panther.nn.attention.linearized import CHILD, convert_attention
from panther.nn.specs import note_in_config_
from panther.tuning.attention import Attention, calibrated, find, replacement_of
from panther.tuning.models import copy_or_call_again

_MIDDLE = 0.25  # Losses are measured at this share of the bytes, the share of int8 in float32.
# Bytes of cached layers over the bytes of the dense layers. The decompositions take as much memory.
_CACHED_SHARE = 4.0


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


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`panther.tune` that have the same meaning in :func:`panther.compress`."""

    forms: FormSettings
    include: Any = None
    exclude: Any = None
    forward_fn: Callable[[nn.Module, Any], Any] | None = None
    loss_fn: Any = None
    mask_fn: Any = None
    statistics_memory_bytes: int | None = None


@dataclass(frozen=True)
class Prepared:
    """A copy of the model, and the data that all trials share.

    Attributes:
        model: The copy, in eval mode.
        runner: The copy with the calibration batches.
        survey: The layers of the copy.
        fits: Components and codes of the layers, with predicted losses.
        options: The options of each layer, with the losses that determine choices.
        cost: The cost that budgets limit, bytes or seconds.
        seed: The seed of sketches and healing.
        seconds: Duration of the preparation.
        training: The training mode of each module of the original model.
        attention: The attention modules that can be replaced.
        model_fn: The user's function that returns the model, if there is one.
        allocations: Earlier choices of :func:`panther.compress`, by budget.
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
    """Bytes and new layers by target, form and rank, with recently used layers at the end."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Return the layers that can change."""
        return self.survey.targets

    @property
    def dense(self) -> float:
        """Return the cost of all unchanged layers."""
        return sum(map(self.cost.dense, self.targets))

    def allocation(self, budget: float) -> Allocation:
        """Return the choice of :func:`panther.compress` for a budget, a share of the unchanged layers' cost.

        Each choice is cached, because it runs candidates on the held-out batches.
        """
        if budget in self.allocations:
            return self.allocations[budget]
        kind = "global" if self.survey.gradients else "uniform"
        with self.runner.calibrating(self.seed):
            limit = budget * self.dense
            allocation = allocate_forms(self.runner, self.survey, self.fits, kind, limit, None, self.seed, self.cost)
        self.allocations[budget] = allocation
        return allocation

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
        choice: Choice = {}
        for target in self.targets:
            settings = plan.layers.get(target.name, {"form": DENSE})
            choice[target] = next(
                (
                    option
                    for option in self.fits.options[target]
                    if (option.form, option.rank) == (settings["form"], settings.get("rank"))
                ),
                Option(DENSE, target.dense_bytes, error=0.0),
            )
        return choice

    def trial_layers(self, plan: Plan) -> Replacement:
        """Return the new modules of a plan for a trial; other trials share them, so they must not be changed."""
        if plan.heal:
            return self.replacement(plan)[0]
        new: Replacement = {}
        seeds = self.survey.seeds(self.seed)
        for target, option in self.choice_of(plan).items():
            # Trials often draw the same ranks of a layer. After ten trials most of them are cached.
            key = target, option.form, option.rank
            if (cached := self._layers.pop(key, None)) is None:
                cached = option.bytes, convert_target(target, self.fits, option, seeds[target])
            self._layers[key] = cached
            new |= cached[1]
        max_bytes = _CACHED_SHARE * sum(target.dense_bytes for target in self.targets)
        cached_bytes = sum(size for size, _ in self._layers.values())
        for key in list(self._layers):
            if cached_bytes <= max_bytes:
                break
            cached_bytes -= self._layers.pop(key)[0]
        return new | self._attention(plan, new)

    def replacement(self, plan: Plan) -> tuple[Replacement, HealResult | None]:
        """Return the new modules of a plan, healed if the plan has ``heal``.

        Raises:
            TuningError: If attention by features does not run in the model, or the model does not call it.
        """
        new = convert_all(self.survey, self.fits, self.choice_of(plan), self.seed)
        new |= self._attention(plan, new)
        if not plan.heal or not new:
            return new, None
        from panther.compression.heal import healing  # lazy: it loads the Trainer and torch.distributed

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
        """Return the attention modules of a plan, which contain the new layers."""
        if not plan.attention:
            return {}
        attention = replacement_of(self.attention.modules, plan.attention, self.seed)
        attention = calibrated(self.runner, attention, self.attention_names)
        for module in attention.values():  # Copies have their own dictionary of children.
            for name, child in children_of(module).items():
                if child is not None and child in new:
                    put_child(module, name, new[child])
        return attention

    @property
    def attention_names(self) -> Mapping[nn.Module, str]:
        """Return the names of the attention modules."""
        return {module: name for name, module in self.attention.modules.items()}

    @contextmanager
    def applied(self, plan: Plan, replacement: Replacement, where: str) -> Iterator[nn.Module]:
        """Replace modules of the model temporarily."""
        with replace_modules(self.model, replacement):
            yield self.model

    @torch.inference_mode(False)
    @torch.enable_grad()
    def build(self, plan: Plan) -> tuple[nn.Module, CompressionReport]:
        """Return a new model with the layers of a plan, and the report of every layer."""
        choice = self.choice_of(plan)
        replacement, healed = self.replacement(plan)
        with self.runner.calibrating(self.seed):
            measured = measure(self.runner, self.targets, replacement, speed=False)
        model = copy_or_call_again(self.model, self.model_fn)
        for module, training in zip(model.modules(), self.training, strict=True):
            module.training = training
        modules = dict(zip(self.model.modules(), model.modules(), strict=True))
        new = {
            target: replace(target, modules=tuple(modules[old] for old in target.modules)) for target in self.targets
        }
        outcome = Outcome(
            replace(self.survey, targets=tuple(new.values())),
            Allocation({new[target]: option for target, option in choice.items()}, "tuned"),
            {modules[old]: layer for old, layer in replacement.items() if old not in self.attention_names},
            "two_sided" if self.fits.passes else "svd",
            self.seed,
            self.fits,
            replace(measured, errors={new[target]: error for target, error in measured.errors.items()}),
            healed,
            notes=[f"{name} is attention by features: {dict(v)}" for name, v in plan.attention.items()],
            allow_slower=True,
        )
        report = install_layers(model, outcome)
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

    With ``timed``, budgets limit seconds instead of bytes.

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
        options: Options = {target: forms.options(target) for target in survey.targets}
        cost = BYTES
        if timed:
            timing = Timing(time_layers(runner, survey.targets, forms))
            options = {target: timing.fast_options(target, options[target]) for target in options}
            cost = seconds(timing.times)
        dense = sum(map(cost.dense, survey.targets))

        def fitted(ridge: float) -> Fits:
            return fit_targets(
                runner, survey, forms, options, None, memory=settings.statistics_memory_bytes, keep=False, heal=None,
                seed=seed, ridge=ridge,
            )  # fmt: skip

        def allocation_of(fits: Fits) -> Allocation:
            kind = "global" if survey.gradients else "uniform"
            limit = max(_MIDDLE * dense, cost.least(fits.options))
            return allocate_forms(runner, survey, fits, kind, limit, None, seed, cost)

        fits, allocation = fit_and_allocate(fitted, allocation_of)
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

    Without gradients of the model's output, the losses are the squared relative errors of the layers' outputs.
    """
    if survey.gradients:
        return allocation.options
    return {
        target: [replace(option, loss=(option.error or 0.0) ** 2) for option in options]
        for target, options in fits.options.items()
    }

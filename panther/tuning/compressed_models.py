"""The models of a search that compresses one trained model: its moments and decompositions serve all trials.

A trial only truncates the stored components to factors of its ranks.
"""

__all__ = ["CompressedModels", "prepare_models"]

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from panther._model_libraries import layers_replaced
from panther._torch import children_of, put_child
from panther.compression._compress import Outcome, install_layers
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import Survey, Target, swap_modules
from panther.compression.config import CompressConfig, HealConfig
from panther.compression.forms import DENSE, Choice, Option, Options, Replacement
from panther.compression.linearization.survey import AttentionModules, find_attention
from panther.compression.preparation import Prepared, prepare_for_budgets
from panther.compression.report import CompressionReport, HealResult
from panther.compression.selection.allocation import Allocation
from panther.compression.selection.trials import convert_all, convert_target, measure
from panther.errors import CompressionError, TrainingError, TuningError
from panther.nn.attention.linearized import CHILD, convert_attention
from panther.tuning.attention import calibrated, replacement_of
from panther.tuning.plan import Plan, TrialError, copy_model

# Bytes of cached layers over the bytes of the dense layers. The decompositions take as much memory.
_CACHED_SHARE = 4.0


@dataclass(frozen=True, kw_only=True)
class CompressedModels(Prepared):
    """The models of plans, made from a fitted copy of the model, in eval mode."""

    attention: AttentionModules
    seconds: float
    training: Sequence[bool]
    """The training mode of each module of the original model."""
    allocations: dict[float, Allocation] = field(default_factory=dict, repr=False)
    """Earlier choices of :func:`panther.compress`, by budget."""
    _layers: dict[Any, tuple[int, Replacement]] = field(default_factory=dict, repr=False)
    """Bytes and new layers by target, form and rank, with recently used layers at the end."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Return the layers that can change."""
        return self.survey.targets

    @cached_property
    def options(self) -> Options:
        """Return the options of each layer, with the losses that determine choices."""
        return self.comparable_options()

    @property
    def attention_names(self) -> Mapping[nn.Module, str]:
        """Return the names of the attention modules that plans may replace."""
        return {module: name for name, module in self.attention.modules.items()}

    def choose(self, budget: float) -> Choice:
        """Return the choice of :func:`panther.compress` for a budget, a share of the unchanged layers' cost.

        Each choice is cached, because it runs candidates on the held-out batches.
        """
        if budget not in self.allocations:
            with self.runner.calibrating(self.seed):
                self.allocations[budget] = self.allocate(budget * self.dense_cost)
        return self.allocations[budget].choice

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
        return new | self._new_attention(plan, new)

    def replacement(self, plan: Plan) -> tuple[Replacement, HealResult | None]:
        """Return the new modules of a plan, healed if the plan has ``heal``."""
        new = convert_all(self.survey, self.fits, self.choice_of(plan), self.seed)
        new |= self._new_attention(plan, new)
        if not plan.heal or not new:
            return new, None
        from panther.compression import healing  # lazy: it loads the Trainer and torch.distributed

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

    def _new_attention(self, plan: Plan, new: Replacement) -> Replacement:
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

    @torch.inference_mode(False)
    @torch.enable_grad()
    def build(self, plan: Plan) -> tuple[nn.Module, CompressionReport]:
        """Return a new model with the layers of a plan, and the report of every layer."""
        choice = self.choice_of(plan)
        replacement, healed = self.replacement(plan)
        with self.runner.calibrating(self.seed):
            measured = measure(self.runner, self.targets, replacement, speed=False)
        model = copy_model(self.runner.model)
        for module, training in zip(model.modules(), self.training, strict=True):
            module.training = training
        modules = dict(zip(self.runner.model.modules(), model.modules(), strict=True))
        stacked: list[Any] = [target.modules[0] for target in self.targets if target.is_stacked]
        modules |= {layer: layer.twin(modules) for layer in stacked}
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
            layers_replaced(model)
        return model, report


def prepare_models(
    runner: Runner, config: CompressConfig | None, seed: int, *, by_time: bool, training: Sequence[bool]
) -> CompressedModels:
    """Fit all layers of a copied model, and find its attention; with no ``config``, only find its attention."""
    began = time.perf_counter()
    attention = find_attention(runner.model, None, None)
    prepared = Prepared(runner, Survey((), ()), seed)
    if config is not None:
        with runner.calibrating(seed):
            prepared = prepare_for_budgets(runner, config, seed, by_time=by_time)
    seconds = time.perf_counter() - began
    return CompressedModels(**vars(prepared), attention=attention, seconds=seconds, training=training)

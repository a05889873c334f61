"""A search over models that are trained from scratch: layer sizes, arguments of the model, training settings."""

__all__ = ["Scratch", "ScratchSpace", "tune_from_scratch"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from panther._random_state import preserved_generators, seed_generators
from panther.compression import SketchConfig, sketch_layers_
from panther.compression.calibration.runner import Runner
from panther.compression.forms import FormSettings, Replacement, default_forms
from panther.errors import CompressionError, ConfigError, TrainingError, TuningError
from panther.train import TrainConfig
from panther.tuning.evaluation import Evaluator
from panther.tuning.finish import finish_search
from panther.tuning.goal import Goal, check_unchanged
from panther.tuning.hashing import identity
from panther.tuning.models import call_model_fn
from panther.tuning.prepared import Plan, Settings, TrialError
from panther.tuning.result import TuneResult
from panther.tuning.runners import run_trials
from panther.tuning.search.run import Run
from panther.tuning.search.storage import check_agrees
from panther.tuning.search.study import Study
from panther.tuning.spaces.layers import LayerSpaceBase, Line, parse_lines
from panther.tuning.spaces.values import Spec, as_spec, grid, suggest
from panther.tuning.spaces.whole import middle

_FIRST = 5  # random trials, from which the sampler learns
_SKETCHED = "sketched"


@dataclass(frozen=True)
class Scratch:
    """The functions that make and train a model, with the interface of ``Prepared``."""

    model_fn: Callable[..., nn.Module]
    train: Callable[[nn.Module, TrainConfig], Any]
    runner: Runner
    seed: int
    seconds: float = 0.0
    attention_names: Mapping[nn.Module, str] = field(default_factory=dict)

    def trial_layers(self, plan: Plan) -> Replacement:
        """Return an empty dict, because each trial trains a new model and replaces no layers."""
        return {}

    @contextmanager
    def applied(self, plan: Plan, replacement: Replacement, where: str) -> Iterator[nn.Module]:
        """Yield the trained model of a plan."""
        with preserved_generators():
            model = self.make_model(plan, where)
        yield model

    def build(self, plan: Plan) -> tuple[nn.Module, None]:
        """Train the model of a plan again, with the same seed."""
        with preserved_generators():
            return self.make_model(plan, "the best trial"), None

    def make_model(self, plan: Plan, where: str) -> nn.Module:
        """Make, sketch and train a model.

        Raises:
            TuningError: If the user's functions raise, or do not return a model.
        """
        seed_generators(self.seed)
        model = call_model_fn(self.model_fn, plan.model, where)
        for index, (name, sizes) in enumerate(sorted(plan.layers.items())):
            config = SketchConfig(num_terms=sizes["num_terms"], low_rank=sizes["low_rank"], init="random")
            try:
                sketch_layers_(model, config, include=[name], seed=(self.seed + index) % 2**63)
            except CompressionError:  # The layer would not become smaller.
                continue
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self.train(model, TrainConfig(**plan.train))
        except TrainingError as error:  # Training diverged.
            raise TrialError(f"train raised TrainingError for {where}: {error}") from error
        except Exception as error:
            raise TuningError(f"train raised {type(error).__name__}: {error} for {where}: correct it") from error
        return model.eval()


class ScratchSpace(LayerSpaceBase):
    """Sizes of layers that are sketched before training, arguments of the model's function, and training settings."""

    least = 0.5  # There are no budgets. The first trial has the middle of all values.

    def __init__(self, lines: Sequence[Line], model: Mapping[str, Spec], train: Mapping[str, Spec]) -> None:
        self.lines, self.model, self.train = lines, model, train

    def draw(self, trial: Any) -> Plan:
        """Draw the plan of an Optuna trial."""
        layers: dict[str, Any] = {}
        for line in self.lines:
            settings = {name: suggest(trial, f"{line.label}/{name}", spec) for name, spec in line.specs.items()}
            if settings["low_rank"]:  # With 0 the layers stay dense.
                sizes = {"form": _SKETCHED, "num_terms": settings.get("num_terms", 1), "low_rank": settings["low_rank"]}
                layers |= dict.fromkeys(line.names, sizes)
        parts = {
            part: {name: suggest(trial, f"{part}/{name}", spec) for name, spec in specs.items()}
            for part, specs in (("model", self.model), ("train", self.train))
        }
        return Plan(layers, **parts)

    def at_budget(self, budget: float) -> dict[str, Any]:
        """Return the middle of all values."""
        params = {f"{line.label}/{name}": middle(spec) for line in self.lines for name, spec in line.specs.items()}
        for part, specs in (("model", self.model), ("train", self.train)):
            params |= {f"{part}/{name}": middle(spec) for name, spec in specs.items()}
        return params


def tune_from_scratch(
    model_fn: Any, evaluate: Callable[[nn.Module], Any], train: Any, space: Any, goal: Goal, run: Run
) -> TuneResult:
    """Search as :func:`panther.tune` does, where each trial trains a new model.

    Raises:
        ConfigError: If an argument is not understood, or not allowed with ``train``.
        TuningError: As for :func:`panther.tune`, or if ``train`` or the model's function raises.
    """
    if isinstance(model_fn, nn.Module) or not callable(train):
        raise ConfigError(
            "with train= each trial trains a new model: give a function that returns one, and a function of a model "
            "and a TrainConfig"
        )
    if goal.timed:
        raise ConfigError("latency is not measured for models that are trained: use objective='size' or a function")
    model_specs, train_specs, layers = _parsed(space)
    middles = {name: middle(spec) for name, spec in model_specs.items()}
    plain = Plan(model=middles, train={name: middle(spec) for name, spec in train_specs.items()})
    with preserved_generators():
        seed_generators(run.new_seed)
        fresh = call_model_fn(model_fn, middles, "the space")
    lines = parse_lines(fresh, layers, scratch=True) if layers else []
    words = identity(fresh, None, goal, lines, Settings(FormSettings(default_forms())), run.repeats)
    words["model"] = type(fresh).__name__  # The weights depend on the seed.
    words["space"] += f"; model {dict(model_specs)}; train {dict(train_specs)}"
    with run.opened(goal, words) as opened, preserved_generators():
        seed = run.seed_of(opened)
        scratch = Scratch(model_fn, train, Runner(fresh, None, None, None, None, run.progress), seed)
        unsketched = scratch.make_model(plain, "the unchanged model")
        scratch = Scratch(model_fn, train, Runner(unsketched, None, None, None, None, run.progress), seed)
        evaluator = Evaluator(scratch.runner, seed, evaluate, goal, run.repeats, run.catch)
        unchanged, evaluate_s = evaluator.measure_unchanged()
        check_unchanged(goal, unchanged)
        check_agrees(opened, goal, unchanged, seed)
        scratch_space = ScratchSpace(lines, model_specs, train_specs)
        first = _FIRST if run.first is None else run.first
        search = Study(opened.study, scratch_space, goal, unchanged, run.sampler, seed, first)
        shared: Any = scratch  # It has the interface of Prepared.
        why = run_trials(search, evaluator, shared, run.trials, run.deadline, run.parallel)
        return finish_search(search, evaluator, shared, evaluate_s, run, why, seed, opened.notes)


def _parsed(space: Any) -> tuple[dict[str, Spec], dict[str, Spec], dict[Any, Any]]:
    """Return the specifications of the model's arguments and of the training settings, and the space of the layers."""
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(
            f"space={space!r} must be a dict of layers, 'train' and 'model' if models are trained, because there are "
            "no spectra for 'auto'"
        )
    layers = dict(space)
    parts = []
    for name in ("model", "train"):
        settings = layers.pop(name, {})
        if not isinstance(settings, Mapping):
            raise ConfigError(f"space[{name!r}]={settings!r} must be a dict of settings and their values")
        parts.append({key: as_spec(f"space[{name!r}][{key!r}]", value) for key, value in settings.items()})
    for key, spec in parts[1].items():
        for value in grid(spec):
            TrainConfig(**{key: value})
    return parts[0], parts[1], layers

"""The models of a search that trains each model: layer sizes, arguments of the model, training settings."""

__all__ = ["TrainedModels", "TrainingSpace", "TrainingTask"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from panther._random_state import preserved_generators, seed_generators
from panther.compression import SketchConfig, sketch_layers_
from panther.compression.calibration.runner import Runner
from panther.compression.forms import Replacement
from panther.errors import CompressionError, ConfigError, TrainingError, TuningError
from panther.train import TrainConfig
from panther.tuning.config import TuneConfig
from panther.tuning.plan import Plan, TrialError, call_model_fn
from panther.tuning.space.layers import LayerSpaceBase
from panther.tuning.space.lines import Line, parse_lines
from panther.tuning.space.values import Spec, as_spec, grid, middle, suggest
from panther.tuning.study.storage import describe_search

_SKETCHED = "sketched"


@dataclass(frozen=True)
class TrainedModels:
    """The models of plans, made and trained by the user's functions.

    Attributes:
        model_fn: The user's function that returns a new model.
        train: The user's function that trains a model.
        seed: Seed of sketches, initial values and training.
        runner: The unchanged model, whose layers are not sketched.
        seconds: Zero, because trials share no preparation.
        attention_names: Empty, because no attention is replaced.
    """

    model_fn: Callable[..., nn.Module]
    train: Callable[[nn.Module, TrainConfig], Any]
    seed: int
    runner: Runner
    seconds: float = 0.0
    attention_names: Mapping[nn.Module, str] = field(default_factory=dict)

    def without_functions(self) -> Self:
        """Return these models, because each trial needs their functions."""
        return self

    def trial_layers(self, plan: Plan) -> Replacement:
        """Return an empty dict, because each trial trains a new model and replaces no layers."""
        return {}

    @contextmanager
    def applied(self, plan: Plan, replacement: Replacement, where: str) -> Iterator[nn.Module]:
        """Yield the trained model of a plan."""
        with preserved_generators():
            model = make_model(self.model_fn, self.train, plan, self.seed, where)
        yield model

    def build(self, plan: Plan) -> tuple[nn.Module, None]:
        """Train the model of a plan again, with the same seed."""
        with preserved_generators():
            return make_model(self.model_fn, self.train, plan, self.seed, "the best trial"), None


def make_model(
    model_fn: Callable[..., nn.Module],
    train: Callable[[nn.Module, TrainConfig], Any],
    plan: Plan,
    seed: int,
    where: str,
) -> nn.Module:
    """Make, sketch and train a model.

    Raises:
        TuningError: If the user's functions raise, or do not return a model.
    """
    seed_generators(seed)
    model = call_model_fn(model_fn, plan.model, where)
    for index, (name, sizes) in enumerate(sorted(plan.layers.items())):
        config = SketchConfig(num_terms=sizes["num_terms"], low_rank=sizes["low_rank"], init="random")
        try:
            sketch_layers_(model, config, include=[name], seed=(seed + index) % 2**63)
        except CompressionError:  # The layer would not become smaller.
            continue
    try:
        with torch.inference_mode(False), torch.enable_grad():
            train(model, TrainConfig(**plan.train))
    except TrainingError as error:  # Training diverged.
        raise TrialError(f"train raised TrainingError for {where}: {error}") from error
    except Exception as error:
        raise TuningError(f"train raised {type(error).__name__}: {error} for {where}: correct it") from error
    return model.eval()


class TrainingSpace(LayerSpaceBase):
    """Sizes of layers that are sketched before training, arguments of the model's function, and training settings."""

    least = 0.5  # Such a search has no budgets. The first trial has the middle of all values.

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


class TrainingTask:
    """A search in which each trial trains a new model, as :func:`panther.tune` describes.

    Raises:
        ConfigError: If the space is not understood, or the model is not a function.
        TuningError: If the model's function raises.
    """

    num_first = 5  # random trials, from which the sampler learns

    def __init__(self, model_fn: Any, config: TuneConfig) -> None:
        if isinstance(model_fn, nn.Module):
            raise ConfigError("with train= each trial trains a new model: give a function that returns one")
        self._model_fn, self._config = model_fn, config
        self._model_specs, self._train_specs, layers = _parsed(config.space)
        middles = {name: middle(spec) for name, spec in self._model_specs.items()}
        self._unsketched = Plan(model=middles, train={name: middle(spec) for name, spec in self._train_specs.items()})
        with preserved_generators():
            seed_generators(config.new_seed)
            fresh = call_model_fn(model_fn, middles, "the space")
        self._lines = parse_lines(fresh, layers, training=True) if layers else []
        parts = [*map(str, self._lines), f"model {self._model_specs}", f"train {self._train_specs}"]
        # The model's weights depend on the seed.
        self.description = describe_search(config, fresh, "; ".join(parts), model=type(fresh).__name__)

    def make_runner(self, seed: int) -> Runner:
        """Return the unchanged model, trained with the middles of all values."""
        train: Any = self._config.train
        model = make_model(self._model_fn, train, self._unsketched, seed, "the unchanged model")
        return Runner(model, None, None, None, None, self._config.progress)

    def prepare(self, runner: Runner, seed: int) -> tuple[TrainedModels, TrainingSpace]:
        """Return the models of plans, and the space of plans."""
        train: Any = self._config.train
        models = TrainedModels(self._model_fn, train, seed, runner)
        return models, TrainingSpace(self._lines, self._model_specs, self._train_specs)


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

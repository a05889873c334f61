"""Evaluation of a trial: put a plan's layers into the model, measure the objective, call the user's function."""

__all__ = ["SAME", "Evaluator", "Outcome", "Steps", "failed", "run_steps"]

import inspect
import math
import os
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from panther._process_settings import preserved_generators, seed_generators
from panther.compression.calibration.descriptions import hash_of
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import replace_modules
from panther.compression.forms import Replacement
from panther.compression.selection.allocation import model_bytes
from panther.compression.selection.trials import model_speed
from panther.errors import TuningError
from panther.tuning.compressed_models import CompressedModels
from panther.tuning.goal import Figures, Goal
from panther.tuning.plan import Plan, TrialError

# Relative difference of two equal evaluations, because sums in a different order round differently.
SAME = 1e-6

_Result = TypeVar("_Result")
Steps = Generator[tuple[int, Figures], bool, _Result]
"""Yields the step and the figures with each partial metric, receives whether to end, and returns a result."""


def run_steps(steps: Steps[_Result], ends: Callable[[int, Figures], bool] = lambda step, figures: False) -> _Result:
    """Run steps until they return their result. ``ends`` says whether to end after a partial metric."""
    try:
        partial = next(steps)
        while True:
            partial = steps.send(ends(*partial))
    except StopIteration as stop:
        result: _Result = stop.value
        return result
    finally:
        steps.close()  # if `ends` raises


@dataclass(frozen=True)
class Outcome:
    """The result of a trial; the metric of a pruned trial is its last partial metric, and of a failed one NaN."""

    figures: Figures
    state: str
    partial: tuple[float, ...] = ()
    build_s: float = 0.0
    evaluate_s: float = 0.0
    reason: str = ""


def failed(reason: str) -> Outcome:
    """Return the outcome of a trial without measurements."""
    return Outcome(_only_metric(math.nan), "failed", reason=reason)


def _only_metric(metric: float) -> Figures:
    return Figures(metric, 0, None, math.nan)


@dataclass
class Evaluator:
    """Runs plans on a copy of the model."""

    runner: Runner
    seed: int
    evaluate: Callable[[nn.Module], Any]
    goal: Goal
    repeats: int = 1
    catch: tuple[type[Exception], ...] = ()
    unchanged: Figures | None = None
    """Figures of the unchanged model, once they are measured."""

    def measure_unchanged(self) -> tuple[Figures, float]:
        """Evaluate the unchanged model twice. Return its figures and the mean seconds of an evaluation."""
        subject = _Subject(self.runner.model, "the unchanged model")
        figures_of = self._measure(subject, self._latency({}))
        began = time.perf_counter()
        metrics = []
        for _ in range(2):
            metrics.append(run_steps(self._metric(subject)))
            if not math.isfinite(metrics[-1]):
                raise TuningError(
                    f"evaluate returned {metrics[-1]} for {subject.label}, and must return a finite number: look for "
                    "NaN in the model's output"
                )
        seconds = (time.perf_counter() - began) / 2
        first, second = metrics
        # With repeats > 1 the user expects the function to vary.
        if self.repeats == 1 and abs(first - second) > SAME * max(abs(first), abs(second)):
            raise TuningError(
                f"evaluate is not deterministic: it returned {first:.6g} and then {second:.6g} for {subject.label}: "
                "fix the order of its data and its random numbers (torch's, Python's and NumPy's generators are seeded "
                "before each call), or set repeats= to use the mean of more calls"
            )
        self.unchanged = figures_of(first)
        return self.unchanged, seconds

    def trial(self, models: CompressedModels, plan: Plan, number: int) -> Steps[Outcome]:
        """Run one trial, step by step."""
        try:
            return (yield from self._trial(models, plan, f"trial {number}"))
        except TrialError as error:
            return failed(str(error))
        except TuningError as error:  # The cause is the exception of a user's function.
            if isinstance(error.__cause__, self.catch):
                return failed(str(error).removesuffix(": correct it"))
            raise

    def _trial(self, models: CompressedModels, plan: Plan, label: str) -> Steps[Outcome]:
        began = time.perf_counter()
        with preserved_generators():  # Making layers draws random numbers.
            replacement = models.trial_layers(plan)
        latency = self._latency(replacement)
        partial = list[float]()
        with replace_modules(self.runner.model, replacement):
            subject = _Subject(self.runner.model, label)
            figures_of = self._measure(subject, latency)
            ready = time.perf_counter()

            def record(metric: float) -> Figures:
                partial.append(metric)
                return figures_of(metric)

            metric = yield from self._metric(subject, record)
        ended = time.perf_counter()
        figures, state, reason = figures_of(partial[-1] if metric is None else metric), "complete", ""
        if not math.isfinite(figures.metric):
            state, reason = "failed", f"evaluate returned {figures.metric}"
        elif not math.isfinite(figures.objective):
            state, reason = "failed", f"the objective is {figures.objective}"
        elif metric is None:
            state = "pruned"
        return Outcome(figures, state, tuple(partial), ready - began, ended - ready, reason)

    def _latency(self, replacement: Replacement) -> float | None:
        """Return the seconds per batch: the unchanged model's time divided by the measured speedup."""
        if not self.goal.timed:
            return None
        with self.runner.calibrating(self.seed):
            seconds, speedup = model_speed(self.runner, replacement)
        if self.unchanged is None or self.unchanged.latency is None:
            return seconds
        return self.unchanged.latency / speedup

    def _measure(self, subject: "_Subject", latency: float | None) -> Callable[[float], Figures]:
        """Measure the size and the objective of a model, and return a function that adds a metric to them."""
        size, objective = model_bytes(subject.model), self.goal.objective
        if isinstance(objective, str):
            value = {"size": size, "latency": latency}.get(objective)
        else:
            with self._calling("objective", subject, self.seed):
                value = _number(objective(subject.model), "objective", subject.label)
        return lambda metric: Figures(metric, size, latency, metric if value is None else float(value))

    def _metric(self, subject: "_Subject", figures_of: Callable[[float], Figures] = _only_metric) -> Steps[Any]:
        """Return the mean of the user's function over its repeats, or None if the trial is to end early.

        Only the first call reports partial metrics, because later calls would repeat the steps.
        """
        first = yield from self._once(subject, self.seed, figures_of)
        if first is None:
            return None
        later_seeds = range(self.seed + 1, self.seed + self.repeats)
        later: list[Any] = [run_steps(self._once(subject, seed, _only_metric)) for seed in later_seeds]
        return sum([first, *later]) / self.repeats

    def _once(self, subject: "_Subject", seed: int, figures_of: Callable[[float], Figures]) -> Steps[float | None]:
        """Call the user's function once. Return its metric, or None if the trial is to end early."""
        with self._calling("evaluate", subject, seed):
            returned = self.evaluate(subject.model)
            if not inspect.isgenerator(returned):
                return _number(returned, "evaluate", subject.label)
            metric: float | None = None
            step = 0
            try:
                while True:
                    metric = _number(next(returned), "evaluate", subject.label)
                    step += 1
                    if (yield step, figures_of(metric)):
                        return None
            except StopIteration as stop:
                if stop.value is not None:
                    return _number(stop.value, "evaluate", subject.label)
            finally:
                returned.close()
            if metric is None:
                raise TuningError("evaluate yielded nothing: yield partial metrics; the last one is the metric")
            return metric

    @contextmanager
    def _calling(self, name: str, subject: "_Subject", seed: int) -> Iterator[None]:
        """Call a user's function in the block: with seeded generators, and TuningError for its exceptions.

        The training modes of modules are restored. All other changes of the model raise TuningError.
        """
        with _restored_modes(subject.model):
            try:
                # A user's function can compute gradients in any mode of the caller.
                with preserved_generators(), torch.inference_mode(False), torch.enable_grad():
                    seed_generators(seed)
                    yield
            except Exception as error:
                cause = error.__cause__ if isinstance(error, TuningError) else error
                if isinstance(cause, self.catch):
                    # The search continues with this model, so the exception must not have left hooks or changed
                    # weights.
                    subject.check_unchanged(f"{name}, which raised {cause!r},")
                if isinstance(error, TuningError):
                    raise
                frame = traceback.extract_tb(error.__traceback__)[-1]
                place = f"({os.path.basename(frame.filename)}, line {frame.lineno})"
                raise TuningError(
                    f"{name} raised {type(error).__name__}: {error} for {subject.label} {place}: correct it"
                ) from error
        subject.check_unchanged(name)


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return the values that a user's function must not change, by name.

    They are the modules, forwards that are set on modules, hooks, hashes of tensors, and which parameters are trained.
    """
    entries: dict[str, Any] = {}
    for name, module in model.named_modules():
        attributes, label = vars(module), f"module {name!r}" if name else "the model"
        entries[label] = id(module)
        if not isinstance(module, torch.jit.ScriptModule):  # It sets its forward in the first call.
            entries[f"forward of {label}"] = id(attributes.get("forward"))
        # In torch the names of all tables of hooks end so. The keys are unique in a process.
        entries[f"hooks of {label}"] = [
            (key, *table) for key, table in attributes.items() if key.endswith("_hooks") and isinstance(table, Mapping)
        ]
    for name, parameter in model.named_parameters():
        entries[f"parameter {name!r}"] = hash_of(parameter)
        entries[f"requires_grad of parameter {name!r}"] = parameter.requires_grad
    return entries | {f"buffer {name!r}": hash_of(buffer) for name, buffer in model.named_buffers()}


class _Subject:
    """A model that the user's functions get, what messages call it, and what they must not change."""

    def __init__(self, model: nn.Module, label: str) -> None:
        self.model, self.label = model, label
        self._fingerprint = _fingerprint(model)

    def check_unchanged(self, function: str) -> None:
        """Raise TuningError if a user's function has changed the model."""
        earlier, now = self._fingerprint, _fingerprint(self.model)
        if changed_names := [name for name in {**now, **earlier} if earlier.get(name) != now.get(name)]:
            raise TuningError(
                f"{function} changed {changed_names[0]} of {self.label}, and must not change the model: train or "
                "convert a copy.deepcopy of it, and remove hooks"
            )


@contextmanager
def _restored_modes(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _number(value: Any, name: str, label: str) -> float:
    """Return the result of a user's function as a float."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TuningError(
            f"{name} returned a {type(value).__name__} for {label}, and must return a number: return a float"
        ) from None

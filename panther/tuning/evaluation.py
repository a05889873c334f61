"""Evaluation of a trial: put a plan's layers into the model, measure the objective, call the user's function."""

__all__ = ["SAME", "Evaluator", "Outcome", "Steps", "failed", "run_steps"]

import inspect
import math
import os
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from panther._random_state import preserved_generators, seed_generators
from panther.compression.calibration.runner import Runner
from panther.compression.forms import Replacement
from panther.compression.selection.allocation import model_bytes
from panther.compression.selection.measurement import model_speed
from panther.errors import TuningError
from panther.nn.quantized.stacked import StackedExperts
from panther.tuning.compressed_models import CompressedModels
from panther.tuning.goal import Figures, Goal
from panther.tuning.guards import STILL_REFERENCED, Usage, difference, fingerprint, recording_usage
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
    """The result of a trial.

    Attributes:
        figures: Figures of the model. The metric is the last partial metric if the trial was pruned, or NaN if it
            failed.
        state: ``"complete"``, ``"pruned"`` or ``"failed"``.
        partial: Partial metrics.
        build_s: Seconds for making the layers and for measurements except for the metric.
        evaluate_s: Seconds of the user's function.
        reason: Why the trial failed.
        uncalled: Names of layers whose replacements were used for the first time, and that the function did not call.
    """

    figures: Figures
    state: str
    partial: tuple[float, ...] = ()
    build_s: float = 0.0
    evaluate_s: float = 0.0
    reason: str = ""
    uncalled: tuple[str, ...] = ()


def failed(reason: str) -> Outcome:
    """Return the outcome of a trial without measurements."""
    return Outcome(_only_metric(math.nan), "failed", reason=reason)


def _only_metric(metric: float) -> Figures:
    return Figures(metric, 0, None, math.nan)


@dataclass
class Evaluator:
    """Runs plans on a copy of the model.

    Attributes:
        runner: The copy and its calibration batches.
        seed: The seed of generators before each call of the user's function.
        evaluate: The user's function.
        goal: The objective and the constraints.
        repeats: Number of calls of ``evaluate`` for a model. Its metric is the mean.
        catch: Exceptions of the user's functions that make a trial fail and do not end the search.
        unchanged: Figures of the unchanged model, once they are measured.
        checked_layers: Layers for which a trial has shown whether their replacements are called.
    """

    runner: Runner
    seed: int
    evaluate: Callable[[nn.Module], Any]
    goal: Goal
    repeats: int = 1
    catch: tuple[type[Exception], ...] = ()
    unchanged: Figures | None = None
    checked_layers: set[nn.Module] = field(default_factory=set, repr=False)

    def measure_unchanged(self) -> tuple[Figures, float]:
        """Evaluate the unchanged model twice. Return its figures and the mean seconds of an evaluation.

        Raises:
            TuningError: If ``evaluate`` raises, returns no finite number, changes the model, or returns different
                numbers for the same model.
        """
        where, model = "the unchanged model", self.runner.model
        before = fingerprint(model)
        latency = None
        if self.goal.timed:
            with self.runner.calibrating(self.seed):
                latency, _ = model_speed(self.runner, {})
        began = time.perf_counter()
        values = []
        for _ in range(2):
            values.append(run_steps(self._metric(model, where, before)))
            if not math.isfinite(values[-1]):
                raise TuningError(
                    f"evaluate returned {values[-1]} for {where}, and must return a finite number: look for NaN in the "
                    "model's output"
                )
        seconds = (time.perf_counter() - began) / 2
        first, second = values
        # With repeats > 1 the user expects the function to vary.
        if self.repeats == 1 and abs(first - second) > SAME * max(abs(first), abs(second)):
            raise TuningError(
                f"evaluate is not deterministic: it returned {first:.6g} and then {second:.6g} for {where}: fix the "
                "order of its data and its random numbers (torch's, Python's and NumPy's generators are seeded before "
                "each call), or set repeats= to use the mean of more calls"
            )
        size = model_bytes(model)
        figures = Figures(first, size, latency, self._objective(model, size, latency, first, where, before))
        self.unchanged = figures
        return figures, seconds

    def metric_of(self, model: nn.Module, where: str) -> float:
        """Return the metric of a model that was built again, in eval mode as in trials."""
        flags = {module: module.training for module in model.modules()}
        metric = float(run_steps(self._metric(model.eval(), where, fingerprint(model))))
        for module, flag in flags.items():
            module.training = flag
        return metric

    def trial(self, models: CompressedModels, plan: Plan, number: int) -> Steps[Outcome]:
        """Run one trial, step by step.

        Raises:
            TuningError: If ``evaluate`` changes the model or raises what is not in ``catch``, or an old layer still
                runs.
        """
        try:
            return (yield from self._trial(models, plan, f"trial {number}"))
        except TrialError as error:
            return failed(str(error))
        except TuningError as error:  # The cause is the exception of a user's function.
            if isinstance(error.__cause__, self.catch):
                return failed(str(error).removesuffix(": correct it"))
            raise

    def _trial(self, models: CompressedModels, plan: Plan, where: str) -> Steps[Outcome]:
        assert self.unchanged is not None
        began = time.perf_counter()
        with preserved_generators():  # Making layers draws random numbers.
            replacement = models.trial_layers(plan)
        latency = self._latency(replacement)
        names = {module: name for name, module in self.runner.model.named_modules()}
        stacked = [layer for layer in replacement if isinstance(layer, StackedExperts)]
        names |= {layer: f"{names[place[0]]}.{place[1]}" for layer in stacked if (place := layer.place)}
        with models.applied(replacement) as model:
            size = model_bytes(model)
            before = fingerprint(model)
            objective = self._objective(model, size, latency, math.nan, where, before)
            ready = time.perf_counter()
            partial: list[float] = []

            def figures_of(value: float) -> Figures:
                partial.append(value)
                return Figures(value, size, latency, objective)

            new = {old: layer for old, layer in replacement.items() if old not in self.checked_layers}
            usage = Usage()
            watch = recording_usage(model, new, usage) if new else None
            metric = yield from self._metric(model, where, before, figures_of, watch)
        ended = time.perf_counter()
        pruned = metric is None
        uncalled = self._uncalled(new, usage, pruned, models.attention_names, names, where)
        value = partial[-1] if metric is None else metric
        if self.goal.objective == "metric":
            objective = value
        bad = not math.isfinite(value) or not math.isfinite(objective)
        reason = f"evaluate returned {value}" if not math.isfinite(value) else f"the objective is {objective}"
        return Outcome(
            Figures(value, size, latency, objective),
            "failed" if bad else "pruned" if pruned else "complete",
            tuple(partial),
            ready - began,
            ended - ready,
            reason if bad else "",
            uncalled,
        )

    def _uncalled(
        self,
        new: Replacement,
        usage: Usage,
        pruned: bool,
        attention: Mapping[nn.Module, str],
        names: Mapping[nn.Module, str],
        where: str,
    ) -> tuple[str, ...]:
        """Return the names of new layers that were not called, or raise TuningError if an old layer is still used."""
        for old in new:
            # Old attention of transformers shares its weights with the new module, so only calls can show its use.
            if old in usage.held or (not pruned and old in attention and old not in usage.called):
                problem = "is not called" if old not in usage.called else "is called in addition to the old layer"
                raise TuningError(
                    f"layer {names[old]!r} was replaced, and the new layer {problem} by evaluate in {where}: "
                    f"{STILL_REFERENCED}"
                )
        if pruned:
            self.checked_layers |= usage.called
            return ()
        self.checked_layers |= new.keys()
        return tuple(names[old] for old in new if old not in usage.called)

    def _latency(self, replacement: Replacement) -> float | None:
        """Return the seconds per batch: the unchanged model's time divided by the measured speedup."""
        if not self.goal.timed:
            return None
        assert self.unchanged is not None
        assert self.unchanged.latency is not None
        with self.runner.calibrating(self.seed):
            return self.unchanged.latency / model_speed(self.runner, replacement)[1]

    def _objective(
        self, model: nn.Module, size: int, latency: float | None, metric: float, where: str, before: dict[str, Any]
    ) -> float:
        objective = self.goal.objective
        if not isinstance(objective, str):
            with self._unchanging(model, "objective", where, before), self._user("objective", where, self.seed):
                return _number(objective(model), "objective", where)
        if objective == "latency":
            assert latency is not None
            return latency
        return float(size) if objective == "size" else metric

    def _metric(
        self,
        model: nn.Module,
        where: str,
        before: dict[str, Any],
        figures_of: Callable[[float], Figures] = _only_metric,
        watch: AbstractContextManager[None] | None = None,
    ) -> Steps[Any]:
        """Return the mean of the user's function over its repeats, or None if the trial is to end early."""
        values = []
        for repeat in range(self.repeats):
            with self._unchanging(model, "evaluate", where, before), (watch if repeat == 0 else None) or nullcontext():
                # Only the first call reports partial values, because later calls would repeat the steps.
                if repeat == 0:
                    value = yield from self._once(model, where, self.seed, figures_of)
                else:
                    value = run_steps(self._once(model, where, self.seed + repeat))
            if value is None:
                return None
            values.append(value)
        return sum(values) / len(values)

    @contextmanager
    def _unchanging(self, model: nn.Module, name: str, where: str, before: dict[str, Any]) -> Iterator[None]:
        """Raise TuningError if a user's function changes the model; restore the training mode of modules."""
        flags = {module: module.training for module in model.modules()}
        try:
            yield
        except TuningError as error:
            if not isinstance(error.__cause__, self.catch):
                raise
            # The search continues with this model, so the exception must not have left hooks or changed weights.
            self._check_unchanged(model, f"{name}, which raised {error.__cause__!r},", where, before)
            raise
        finally:
            for module, flag in flags.items():
                module.training = flag
        self._check_unchanged(model, name, where, before)

    def _check_unchanged(self, model: nn.Module, name: str, where: str, before: dict[str, Any]) -> None:
        if changed := difference(before, fingerprint(model)):
            raise TuningError(
                f"{name} changed {changed} of {where}, and must not change the model: train or convert a "
                "copy.deepcopy of it, and remove hooks"
            )

    @contextmanager
    def _user(self, name: str, where: str, seed: int) -> Iterator[None]:
        """Run a user's function: with seeded generators, and convert its exceptions to TuningError."""
        # A user's function can compute gradients in any mode of the caller.
        with preserved_generators(), torch.inference_mode(False), torch.enable_grad():
            seed_generators(seed)
            try:
                yield
            except TuningError:
                raise
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                place = f" ({os.path.basename(frame.filename)}, line {frame.lineno})"
                raise TuningError(
                    f"{name} raised {type(error).__name__}: {error} for {where}{place}: correct it"
                ) from error

    def _once(
        self,
        model: nn.Module,
        where: str,
        seed: int,
        figures_of: Callable[[float], Figures] = _only_metric,
    ) -> Steps[float | None]:
        """Call the user's function once. Return its metric, or None if the trial is to end early."""
        with self._user("evaluate", where, seed):
            result = self.evaluate(model)
            if not inspect.isgenerator(result):
                return _number(result, "evaluate", where)
            last: float | None = None
            step = 0
            try:
                while True:
                    last = _number(next(result), "evaluate", where)
                    step += 1
                    if (yield step, figures_of(last)):
                        return None
            except StopIteration as stop:
                if stop.value is not None:
                    return _number(stop.value, "evaluate", where)
            finally:
                result.close()
            if last is None:
                raise TuningError("evaluate yielded nothing: yield partial metrics; the last one is the metric")
            return last


def _number(value: Any, name: str, where: str) -> float:
    """Return the result of a user's function as a float."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TuningError(
            f"{name} returned a {type(value).__name__} for {where}, and must return a number: return a float"
        ) from None

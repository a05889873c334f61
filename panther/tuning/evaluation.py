"""One trial: the layers of a plan in the model, the objective measured, and the user's function called on it."""

__all__ = ["SAME", "Evaluator", "Outcome", "Report", "failed"]

import inspect
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from panther._random_state import preserved_generators, seed_generators
from panther.compression.conversion import Replacement
from panther.compression.forms.allocation import model_bytes
from panther.compression.measurement import model_speed
from panther.compression.runner import Runner
from panther.errors import TuningError
from panther.tuning.goal import Figures, Goal
from panther.tuning.hashing import difference, fingerprint
from panther.tuning.prepared import Plan, Prepared, TrialError
from panther.tuning.usage import HELD, Usage, watched

SAME = 1e-6  # relative difference of two evaluations of one model: rounding, in sums of a different order

Report = Callable[[int, Figures], bool]
"""Takes the step and the figures, with a partial metric, and returns whether to end the trial."""


@dataclass(frozen=True)
class Outcome:
    """What a trial found.

    Attributes:
        figures: Of the model; the metric is the last partial one where the trial was pruned, NaN where it failed.
        state: ``"complete"``, ``"pruned"`` or ``"failed"``.
        partial: Partial metrics.
        build_s: Seconds for the new layers and what was measured besides the metric.
        evaluate_s: Seconds of the user's function.
        reason: Why the trial failed.
        uncalled: Names of new layers that were looked at for the first time, and that the function did not call.
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
    return Outcome(Figures(math.nan, 0, None, math.nan), "failed", reason=reason)


@dataclass
class Evaluator:
    """Runs plans on a copy of the model.

    Attributes:
        runner: The copy and its calibration batches.
        seed: Of generators, before each call of the user's function.
        evaluate: The user's function.
        goal: What is measured besides its result.
        repeats: How often it is called for one model; the mean counts.
        catch: What the user's functions may raise in a trial, which is then a failed one.
        unchanged: Figures of the model as it is, once they are known.
        seen: Layers whose replacements are known to be called, or not to be.
    """

    runner: Runner
    seed: int
    evaluate: Callable[[nn.Module], Any]
    goal: Goal
    repeats: int = 1
    catch: tuple[type[Exception], ...] = ()
    unchanged: Figures | None = None
    seen: set[nn.Module] = field(default_factory=set, repr=False)

    def measure_unchanged(self) -> tuple[Figures, float]:
        """Return the figures of the model as it is, and the seconds of one evaluation, of two that are made.

        Raises:
            TuningError: If ``evaluate`` raises, returns no finite number, changes the model, or a different number for
                the same one.
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
            values.append(self._metric(model, where, before, None))
            if not math.isfinite(values[-1]):
                raise TuningError(
                    f"evaluate returned {values[-1]} for {where}, and must return a finite number: look for NaN in the "
                    "model's output"
                )
        seconds = (time.perf_counter() - began) / 2
        first, second = values
        # A mean of several is of a function that is known to vary.
        if self.repeats == 1 and abs(first - second) > SAME * max(abs(first), abs(second)):
            raise TuningError(
                f"evaluate is not deterministic: it returned {first:.6g} and then {second:.6g} for {where}: fix its "
                "order and its random numbers (torch's, Python's and NumPy's generators are seeded before each call), "
                "or set repeats=, and the mean counts"
            )
        size = model_bytes(model)
        figures = Figures(first, size, latency, self._objective(model, size, latency, first, where, before))
        self.unchanged = figures
        return figures, seconds

    def metric_of(self, model: nn.Module, where: str) -> float:
        """Return the metric of a model that was built again, in eval mode as trials are."""
        flags = {module: module.training for module in model.modules()}
        found = float(self._metric(model.eval(), where, fingerprint(model), None))
        for module, flag in flags.items():
            module.training = flag
        return found

    def run(self, prepared: Prepared, plan: Plan, number: int, report: Report) -> Outcome:
        """Run one trial.

        Raises:
            TuningError: If ``evaluate`` changes the model or raises what is not in ``catch``, or an old layer still
                runs.
        """
        try:
            return self._run(prepared, plan, f"trial {number}", report)
        except TrialError as error:
            return failed(str(error))
        except TuningError as error:  # what a user's function raised is its cause
            if isinstance(error.__cause__, self.catch):
                return failed(str(error).removesuffix(": correct it"))
            raise

    def _run(self, prepared: Prepared, plan: Plan, where: str, report: Report) -> Outcome:
        assert self.unchanged is not None
        began = time.perf_counter()
        with preserved_generators():  # making layers draws numbers, which are then replaced
            replacement = prepared.trial_layers(plan)
        latency = self._latency(replacement)
        names = {module: name for name, module in self.runner.model.named_modules()}
        with prepared.applied(plan, replacement, where) as model:
            size = model_bytes(model)
            before = fingerprint(model)
            objective = self._objective(model, size, latency, math.nan, where, before)
            ready = time.perf_counter()
            partial: list[float] = []

            def told(value: float) -> bool:
                partial.append(value)
                return report(len(partial), Figures(value, size, latency, objective))

            new = {old: layer for old, layer in replacement.items() if old not in self.seen}
            usage = Usage()
            watch = watched(model, new, usage) if new else None
            metric = self._metric(model, where, before, told, watch)
        done = time.perf_counter()
        pruned = metric is None
        uncalled = self._uncalled(new, usage, pruned, prepared.attention_names, names, where)
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
            done - ready,
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
        """Return the names of new layers that were not called; raise TuningError if an old one runs in their place."""
        for old in new:
            # Old attention of transformers shares its weights with the new one, so that they say nothing.
            if old in usage.held or (not pruned and old in attention and old not in usage.called):
                what = "is not called" if old not in usage.called else "is called beside the old one"
                raise TuningError(
                    f"layer {names[old]!r} was replaced, and the new one {what} by evaluate in {where}: {HELD}"
                )
        if pruned:
            self.seen |= usage.called
            return ()
        self.seen |= new.keys()
        return tuple(names[old] for old in new if old not in usage.called)

    def _latency(self, replacement: Replacement) -> float | None:
        """Return the seconds of a batch: the unchanged model's, over how many times faster the new one is beside it."""
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
        told: Callable[[float], bool] | None,
        watch: AbstractContextManager[None] | None = None,
    ) -> Any:
        """Return the mean of the user's function over its repeats, or None if the trial is to end early."""
        values = []
        for repeat in range(self.repeats):
            with self._unchanging(model, "evaluate", where, before), (watch if repeat == 0 else None) or nullcontext():
                # Only the first of several is looked at while it runs: partial values of others have other steps.
                value = self._once(model, where, told if repeat == 0 else None, self.seed + repeat)
            if value is None:
                return None
            values.append(value)
        return sum(values) / len(values)

    @contextmanager
    def _unchanging(self, model: nn.Module, name: str, where: str, before: dict[str, Any]) -> Iterator[None]:
        """Raise TuningError if a user's function changes the model; put the flags of training mode back."""
        flags = {module: module.training for module in model.modules()}
        try:
            yield
        except TuningError as error:
            if not isinstance(error.__cause__, self.catch):
                raise
            # The search continues with this model, in which hooks or half of a training step may have been left.
            self._check_unchanged(model, f"{name}, which raised {error.__cause__!r},", where, before)
            raise
        finally:
            for module, flag in flags.items():
                module.training = flag
        self._check_unchanged(model, name, where, before)

    def _check_unchanged(self, model: nn.Module, name: str, where: str, before: dict[str, Any]) -> None:
        if changed := difference(before, fingerprint(model)):
            raise TuningError(
                f"{name} changed {changed} of {where}, and must leave the model as it is: train or convert a "
                "copy.deepcopy of it, and remove hooks"
            )

    @contextmanager
    def _user(self, name: str, where: str, seed: int) -> Iterator[None]:
        """Run a user's function: generators are seeded, and what it raises becomes a TuningError."""
        # Gradients are on and may be taken, whatever the caller's mode: a user's function decides for itself.
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

    def _once(self, model: nn.Module, where: str, told: Callable[[float], bool] | None, seed: int) -> float | None:
        with self._user("evaluate", where, seed):
            result = self.evaluate(model)
            if not inspect.isgenerator(result):
                return _number(result, "evaluate", where)
            last: float | None = None
            try:
                while True:
                    last = _number(next(result), "evaluate", where)
                    if told is not None and told(last):
                        return None
            except StopIteration as stop:
                if stop.value is not None:
                    return _number(stop.value, "evaluate", where)
            finally:
                result.close()
            if last is None:
                raise TuningError("evaluate yielded nothing: yield partial metrics; the last one counts")
            return last


def _number(value: Any, name: str, where: str) -> float:
    """Return what a user's function returned as a float."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TuningError(
            f"{name} returned a {type(value).__name__} for {where}, and must return a number: return a float"
        ) from None

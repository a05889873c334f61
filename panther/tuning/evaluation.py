"""One trial: the layers of a plan in the model, the objective measured, and the user's function called on it."""

__all__ = ["Evaluator", "Outcome", "Report"]

import inspect
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from panther._random_state import preserved_generators, seed_generators
from panther.compression.conversion import Replacement
from panther.compression.forms.allocation import model_bytes
from panther.compression.measurement import model_speed
from panther.compression.runner import Runner, calibrating
from panther.errors import TuningError
from panther.tuning.goal import Figures, Goal
from panther.tuning.hashing import difference, fingerprint
from panther.tuning.prepared import Plan, Prepared

_SAME = 1e-6  # relative difference of two evaluations of one model: rounding, in another order of sums

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
    """

    figures: Figures
    state: str
    partial: tuple[float, ...]
    build_s: float
    evaluate_s: float
    reason: str = ""


@dataclass
class Evaluator:
    """Runs plans on a copy of the model.

    Attributes:
        runner: The copy and its calibration batches.
        seed: Of generators, before each call of the user's function.
        evaluate: The user's function.
        goal: What is measured besides its result.
        repeats: How often it is called for one model; the mean counts.
        unchanged: Figures of the model as it is, once they are known.
    """

    runner: Runner
    seed: int
    evaluate: Callable[[nn.Module], Any]
    goal: Goal
    repeats: int = 1
    unchanged: Figures | None = None

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
            with calibrating(model, self.seed):
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
        if self.repeats == 1 and abs(first - second) > _SAME * max(abs(first), abs(second)):
            raise TuningError(
                f"evaluate is not deterministic: it returned {first:.6g} and then {second:.6g} for {where}: fix its "
                "order and its random numbers (torch's, Python's and NumPy's generators are seeded before each call), "
                "or give repeats=, of which the mean counts"
            )
        size = model_bytes(model)
        figures = Figures(first, size, latency, self._objective(model, size, latency, first, where))
        self.unchanged = figures
        return figures, seconds

    def run(self, prepared: Prepared, plan: Plan, number: int, report: Report) -> Outcome:
        """Run one trial."""
        where = f"trial {number}"
        assert self.unchanged is not None
        began = time.perf_counter()
        with preserved_generators():  # making layers draws numbers, which are then replaced
            replacement = prepared.trial_layers(plan)
        latency = self._latency(replacement)
        with prepared.applied(plan, replacement, where) as model:
            size = model_bytes(model)
            objective = self._objective(model, size, latency, math.nan, where)
            before = fingerprint(model)
            ready = time.perf_counter()
            partial: list[float] = []

            def told(value: float) -> bool:
                partial.append(value)
                return report(len(partial), Figures(value, size, latency, objective))

            metric = self._metric(model, where, before, told)
        done = time.perf_counter()
        pruned = metric is None
        value = partial[-1] if metric is None else metric
        if self.goal.objective == "metric":
            objective = value
        failed = not math.isfinite(value) or not math.isfinite(objective)
        reason = f"evaluate returned {value}" if not math.isfinite(value) else f"the objective is {objective}"
        return Outcome(
            Figures(value, size, latency, objective),
            "failed" if failed else "pruned" if pruned else "complete",
            tuple(partial),
            ready - began,
            done - ready,
            reason if failed else "",
        )

    def _latency(self, replacement: Replacement) -> float | None:
        """Return the seconds of a batch: the unchanged model's, over how many times faster the new one is beside it."""
        if not self.goal.timed:
            return None
        assert self.unchanged is not None
        assert self.unchanged.latency is not None
        with calibrating(self.runner.model, self.seed):
            return self.unchanged.latency / model_speed(self.runner, replacement)[1]

    def _objective(self, model: nn.Module, size: int, latency: float | None, metric: float, where: str) -> float:
        objective = self.goal.objective
        if not isinstance(objective, str):
            with self._guarded(f"objective raised {{}} for {where}"):
                return _number(objective(model), "objective", where)
        if objective == "latency":
            assert latency is not None
            return latency
        return float(size) if objective == "size" else metric

    def _metric(
        self, model: nn.Module, where: str, before: dict[str, Any], told: Callable[[float], bool] | None
    ) -> Any:
        """Return the mean of the user's function over its repeats, or None if the trial is to end early."""
        values = []
        flags = {module: module.training for module in model.modules()}
        for repeat in range(self.repeats):
            # Only the first of several is looked at while it runs: partial values of others have other steps.
            value = self._once(model, where, told if repeat == 0 else None, self.seed + repeat)
            if changed := difference(before, fingerprint(model)):
                raise TuningError(
                    f"evaluate changed {changed} of {where}, and must leave the model as it is: train or convert a "
                    "copy.deepcopy of it"
                )
            for module, flag in flags.items():
                module.training = flag
            if value is None:
                return None
            values.append(value)
        return sum(values) / len(values)

    def _once(self, model: nn.Module, where: str, told: Callable[[float], bool] | None, seed: int) -> float | None:
        # Gradients are on and may be taken, whatever the caller's mode: a user's function decides for itself.
        with preserved_generators(), torch.inference_mode(False), torch.enable_grad():
            seed_generators(seed)
            with self._guarded(f"evaluate raised {{}} for {where}"):
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
                    raise TuningError("evaluate yielded nothing: yield partial metrics, of which the last one counts")
                return last

    @contextmanager
    def _guarded(self, sentence: str) -> Iterator[None]:
        """Turn what a user's function raises into a TuningError; ``sentence`` has a place for it."""
        try:
            yield
        except TuningError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f" ({os.path.basename(frame.filename)}, line {frame.lineno})"
            raise TuningError(f"{sentence.format(f'{type(error).__name__}: {error}')}{place}: correct it") from error


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

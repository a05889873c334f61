"""The goal of a search: the objective to minimise, and the constraints that a model must satisfy.

Three figures of a model have names: ``metric``, the result of ``evaluate``; ``size``, the bytes of all saved tensors;
and ``latency``, the seconds per batch.
"""

__all__ = ["Constraint", "Figures", "Goal", "check_unchanged", "make_goal"]

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from panther._text import format_bytes, format_seconds
from panther.errors import ConfigError, TuningError

_UNITS = {
    "metric": {"": 1.0},
    "size": {"": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9},
    "latency": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
}
_TEXT = re.compile(r"\s*(?:(?P<name>[a-z]+)\s*)?(?P<sign>>=|<=)\s*(?P<number>[-+.\deE]+)\s*(?P<unit>[a-zA-Z%]*)\s*")
# This is added to the penalty of a model that breaks a constraint, in units of the unchanged model's objective, so that
# it is worse than every model that satisfies the constraints.
_BASE_PENALTY = 1.0


@dataclass(frozen=True)
class Figures:
    """The measured figures of a model: metric, bytes, seconds per batch if it was timed, and objective."""

    metric: float
    size: int
    latency: float | None
    objective: float

    def describe(self) -> str:
        """Describe the figures that have the same names in all searches."""
        latency = "" if self.latency is None else f", {format_seconds(self.latency)} a batch"
        return f"metric {self.metric:.6g}, {format_bytes(self.size)}{latency}"


@dataclass(frozen=True)
class Constraint:
    """A bound on a figure, as ``">= 0.91"``, ``">= 99 %"``, ``"size <= 10 MB"`` or a function of the metric.

    The sign is 1 for a lower bound, and the bound is in bytes, seconds or units of the metric, or with ``relative`` a
    share of the unchanged model's figure.
    """

    text: str
    figure: str = "metric"
    sign: int = 1
    bound: float = 0.0
    relative: bool = False
    function: Callable[[float], Any] | None = None

    def violation(self, figures: Figures, unchanged: Figures) -> float:
        """Return the violation as a share of the bound; it is at most 0 if the constraint is satisfied."""
        if self.function is not None:
            try:
                return -1.0 if self.function(figures.metric) else 1.0
            except Exception as error:
                raise TuningError(
                    f"constraint {self.text} raised {type(error).__name__}: {error} for the metric "
                    f"{figures.metric:.6g}: it must take a number and return whether that is good enough"
                ) from error
        value, bound = getattr(figures, self.figure), self.bound
        if self.relative:
            bound *= getattr(unchanged, self.figure)
        return self.sign * (bound - value) / (abs(bound) or 1.0)


@dataclass(frozen=True)
class Goal:
    """The objective and the constraints of a search.

    Without a constraint of the metric, the search is for the Pareto front of metric and objective.
    """

    objective: str | Callable[[nn.Module], float]
    constraints: tuple[Constraint, ...]
    higher_is_better: bool

    @property
    def name(self) -> str:
        """Return the objective's name."""
        return self.objective if isinstance(self.objective, str) else getattr(self.objective, "__name__", "objective")

    @property
    def timed(self) -> bool:
        """Return whether models are timed."""
        return self.objective == "latency" or any(constraint.figure == "latency" for constraint in self.constraints)

    @property
    def budgets_are_times(self) -> bool:
        """Return whether budgets are seconds: if latency is minimised, or if only latency bounds the best metric."""
        bounds = {constraint.figure for constraint in self.constraints}
        return self.objective == "latency" or (
            self.objective == "metric" and "latency" in bounds and "size" not in bounds
        )

    @property
    def bounded(self) -> bool:
        """Return whether there is a constraint of the metric."""
        return any(constraint.figure == "metric" for constraint in self.constraints)

    @property
    def by_metric(self) -> bool:
        """Return whether the best model has the best metric, and not the smallest objective."""
        return self.objective == "metric" or not self.bounded

    @property
    def directions(self) -> list[str]:
        """Return the directions of the study. The search for a Pareto front has two."""
        metric = "maximize" if self.higher_is_better else "minimize"
        if self.objective == "metric":
            return [metric]
        return ["minimize"] if self.bounded else ["minimize", metric]

    def values(self, figures: Figures) -> list[float]:
        """Return the values of a trial for the study."""
        if self.objective == "metric":
            return [figures.metric]
        return [figures.objective] if self.bounded else [figures.objective, figures.metric]

    def violations(self, figures: Figures, unchanged: Figures) -> list[float]:
        """Return the violation of each constraint, which is at most 0 if it is satisfied."""
        return [constraint.violation(figures, unchanged) for constraint in self.constraints]

    def feasible(self, figures: Figures, unchanged: Figures) -> bool:
        """Return whether all constraints are satisfied."""
        return all(violation <= 0 for violation in self.violations(figures, unchanged))

    def total_violation(self, figures: Figures, unchanged: Figures) -> float:
        """Return the sum of the violations of all constraints, which is 0 if all are satisfied."""
        return sum(max(violation, 0.0) for violation in self.violations(figures, unchanged))

    def penalised(self, figures: Figures, unchanged: Figures) -> float:
        """Return the objective with a penalty, so that models that break a constraint are worse than all that do not.

        The study must have one direction. A larger value is better if the direction is "maximize".
        """
        (value,), (direction,) = self.values(figures), self.directions
        violation = self.total_violation(figures, unchanged)
        if not violation:
            return value
        largest = abs(self.values(unchanged)[0]) or 1.0
        penalty = largest * (_BASE_PENALTY + violation)
        return value - penalty if direction == "maximize" else value + penalty

    def order(self, figures: Figures) -> tuple[float, float]:
        """Return a sort key that is smaller for better models. The models must satisfy all constraints."""
        metric = self.metric_order(figures)
        if self.objective == "metric":
            return metric, figures.size
        return (metric, figures.objective) if self.by_metric else (figures.objective, metric)

    def metric_order(self, figures: Figures) -> float:
        """Return a sort key that is smaller for better metrics."""
        return -figures.metric if self.higher_is_better else figures.metric

    def describe(self, figures: Figures) -> str:
        """Describe the figures."""
        objective = "" if isinstance(self.objective, str) else f", {self.name} {figures.objective:.6g}"
        return f"{figures.describe()}{objective}"


def make_goal(objective: Any, constraint: Any, direction: str | None) -> Goal:
    """Return the goal of ``pr.tune``'s arguments."""
    if not (objective in ("size", "latency", "metric") or callable(objective)):
        raise ConfigError(
            f"objective={objective!r} is unknown: use 'size', 'latency', 'metric' or a function of a model"
        )
    constraint_list: Sequence[Any] = () if constraint is None else constraint
    if isinstance(constraint_list, str) or not isinstance(constraint_list, Sequence):
        constraint_list = [constraint_list]
    constraints = tuple(map(_parsed, constraint_list))
    of_metric = [bound for bound in constraints if bound.figure == "metric" and not bound.function]
    directions = {"maximize" if bound.sign > 0 else "minimize" for bound in of_metric}
    if direction is not None:
        if direction not in ("maximize", "minimize"):
            raise ConfigError(
                f"direction={direction!r} must be 'maximize' or 'minimize', which the metric is better by"
            )
        directions.add(direction)
    if len(directions) > 1:
        raise ConfigError(
            f"constraint={constraint!r} and direction={direction!r} say both that a larger metric is better and that a "
            "smaller metric is better: remove one of them"
        )
    return Goal(objective, constraints, "minimize" not in directions)


def _parsed(text: Any) -> Constraint:
    if callable(text):
        return Constraint(getattr(text, "__name__", "the constraint"), function=text)
    forms = "write '>= 0.91', '>= 99 %', 'size <= 10 MB' or 'latency <= 5 ms', or pass a function of the metric"
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"constraint={text!r} is not understood: {forms}")
    figure, unit = match["name"] or "metric", match["unit"]
    try:
        number = float(match["number"])
    except ValueError:
        number = math.nan
    units = _UNITS.get(figure)
    if units is None or not math.isfinite(number) or not (unit == "%" or unit in units):
        raise ConfigError(f"constraint={text!r} is not understood: {forms}")
    relative = unit == "%"
    bound = number / 100 if relative else number * units[unit]
    return Constraint(text, figure, 1 if match["sign"] == ">=" else -1, bound, relative)


def check_unchanged(goal: Goal, unchanged: Figures) -> None:
    """Raise TuningError if a constraint is a share of a metric that is not positive, or its function fails."""
    for constraint in goal.constraints:
        if constraint.function is not None:
            constraint.violation(unchanged, unchanged)
        if constraint.relative and constraint.figure == "metric" and unchanged.metric <= 0:
            raise TuningError(
                f"constraint={constraint.text!r} is a share of the unchanged model's metric, which is "
                f"{unchanged.metric:.6g} and must be above 0: use an absolute bound"
            )

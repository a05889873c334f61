"""What a search is for: the objective that is minimised, and the constraints that a model must satisfy.

Three figures of a model can be named: ``metric``, what ``evaluate`` returns; ``size``, the bytes of all its tensors as
saved; and ``latency``, the seconds it takes for a batch.
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
_BELOW_ANY = (
    1.0  # added to the penalty of a model that breaks a constraint, in units of the unchanged model's objective
)


@dataclass(frozen=True)
class Figures:
    """What was measured of a model: the metric, bytes, seconds a batch if it was timed, and the objective."""

    metric: float
    size: int
    latency: float | None
    objective: float


@dataclass(frozen=True)
class Constraint:
    """A bound on a figure, as ``">= 0.91"``, ``">= 99 %"``, ``"size <= 10 MB"`` or a function of the metric.

    Attributes:
        text: As it was given.
        figure: ``"metric"``, ``"size"`` or ``"latency"``.
        sign: 1 if the figure has to be at least the bound, -1 if at most.
        bound: In the figure's own unit, or a share of the unchanged model's.
        relative: Whether it is such a share.
        function: Returns whether a metric is good enough, in place of a bound.
    """

    text: str
    figure: str = "metric"
    sign: int = 1
    bound: float = 0.0
    relative: bool = False
    function: Callable[[float], Any] | None = None

    def violation(self, figures: Figures, unchanged: Figures) -> float:
        """Return by what share of the bound it is missed; at most 0 where it is met.

        Raises:
            TuningError: If a function raises.
        """
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

    Attributes:
        objective: ``"size"``, ``"latency"``, ``"metric"``, or a function of the model, which is minimised.
        constraints: What a model must satisfy; without one of the metric, the search is for the Pareto front of metric
            and objective.
        higher_is_better: Whether a larger metric is better.
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
        return self.objective == "latency" or any(one.figure == "latency" for one in self.constraints)

    @property
    def budgets_are_times(self) -> bool:
        """Return whether budgets are of time: where that is minimised, or is all that bounds the best metric."""
        bounds = {one.figure for one in self.constraints}
        return self.objective == "latency" or (
            self.objective == "metric" and "latency" in bounds and "size" not in bounds
        )

    @property
    def bounded(self) -> bool:
        """Return whether a constraint says how good the metric has to be."""
        return any(one.figure == "metric" for one in self.constraints)

    @property
    def by_metric(self) -> bool:
        """Return whether the best model is that of the best metric, and not that of the smallest objective."""
        return self.objective == "metric" or not self.bounded

    @property
    def directions(self) -> list[str]:
        """Return the directions of the study: two where a Pareto front is searched."""
        metric = "maximize" if self.higher_is_better else "minimize"
        if self.objective == "metric":
            return [metric]
        return ["minimize"] if self.bounded else ["minimize", metric]

    def values(self, figures: Figures) -> list[float]:
        """Return what the study is told."""
        if self.objective == "metric":
            return [figures.metric]
        return [figures.objective] if self.bounded else [figures.objective, figures.metric]

    def violations(self, figures: Figures, unchanged: Figures) -> list[float]:
        """Return the violation of each constraint, at most 0 where it is met."""
        return [one.violation(figures, unchanged) for one in self.constraints]

    def feasible(self, figures: Figures, unchanged: Figures) -> bool:
        """Return whether all constraints are met."""
        return all(violation <= 0 for violation in self.violations(figures, unchanged))

    def penalised(self, figures: Figures, unchanged: Figures) -> float:
        """Return one number by which models can be compared: any that breaks a constraint is worse than all others.

        It is in the direction of the study, and for a search without two directions.
        """
        (value,), (direction,) = self.values(figures), self.directions
        missed = sum(max(violation, 0.0) for violation in self.violations(figures, unchanged))
        if not missed:
            return value
        largest = abs(self.values(unchanged)[0]) or 1.0
        penalty = largest * (_BELOW_ANY + missed)
        return value - penalty if direction == "maximize" else value + penalty

    def order(self, figures: Figures) -> tuple[float, float]:
        """Return what is smaller for the better of two models that meet all constraints."""
        metric = self.metric_order(figures)
        if self.objective == "metric":
            return metric, figures.size
        return (metric, figures.objective) if self.by_metric else (figures.objective, metric)

    def metric_order(self, figures: Figures) -> float:
        """Return what is smaller for the better of two metrics."""
        return -figures.metric if self.higher_is_better else figures.metric

    def shown(self, figures: Figures) -> str:
        """Return the figures in words."""
        parts = [f"metric {figures.metric:.6g}", format_bytes(figures.size)]
        if figures.latency is not None:
            parts.append(f"{format_seconds(figures.latency)} a batch")
        if not isinstance(self.objective, str):
            parts.append(f"{self.name} {figures.objective:.6g}")
        return ", ".join(parts)


def make_goal(objective: Any, constraint: Any, direction: str | None) -> Goal:
    """Return the goal of ``pr.tune``'s arguments.

    Raises:
        ConfigError: If one of them is not understood, or two contradict each other.
    """
    if not (objective in ("size", "latency", "metric") or callable(objective)):
        raise ConfigError(
            f"objective={objective!r} is unknown: use 'size', 'latency', 'metric' or a function of a model"
        )
    given: Sequence[Any] = () if constraint is None else constraint
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [given]
    constraints = tuple(_parsed(one) for one in given)
    wanted = {
        "maximize" if one.sign > 0 else "minimize" for one in constraints if one.figure == "metric" and not one.function
    }
    if direction is not None:
        if direction not in ("maximize", "minimize"):
            raise ConfigError(
                f"direction={direction!r} must be 'maximize' or 'minimize', which the metric is better by"
            )
        wanted.add(direction)
    if len(wanted) > 1:
        raise ConfigError(
            f"constraint={constraint!r} and direction={direction!r} say both that a larger metric is better and that a "
            "smaller one is: keep one of them"
        )
    return Goal(objective, constraints, "minimize" not in wanted)


def _parsed(given: Any) -> Constraint:
    if callable(given):
        return Constraint(getattr(given, "__name__", "the constraint"), function=given)
    forms = "write '>= 0.91', '>= 99 %', 'size <= 10 MB' or 'latency <= 5 ms', or pass a function of the metric"
    found = _TEXT.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigError(f"constraint={given!r} is not understood: {forms}")
    figure, unit = found["name"] or "metric", found["unit"]
    try:
        number = float(found["number"])
    except ValueError:
        number = math.nan
    units = _UNITS.get(figure)
    if units is None or not math.isfinite(number) or not (unit == "%" or unit in units):
        raise ConfigError(f"constraint={given!r} is not understood: {forms}")
    relative = unit == "%"
    bound = number / 100 if relative else number * units[unit]
    return Constraint(given, figure, 1 if found["sign"] == ">=" else -1, bound, relative)


def check_unchanged(goal: Goal, unchanged: Figures) -> None:
    """Raise TuningError if a share of the unchanged model's metric makes no sense, or a function does not take it."""
    for one in goal.constraints:
        if one.function is not None:
            one.violation(unchanged, unchanged)
        if one.relative and one.figure == "metric" and unchanged.metric <= 0:
            raise TuningError(
                f"constraint={one.text!r} is a share of the unchanged model's metric, which is {unchanged.metric:.6g} "
                "and must be above 0: give the bound itself"
            )

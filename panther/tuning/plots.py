"""Plots of a search: metric against objective, metric over trials, and metric against a parameter."""

__all__ = ["check_plot", "draw_parameter", "draw_search"]

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther.errors import ConfigError, require_extra

if TYPE_CHECKING:
    from panther.tuning.result import Trial, TuneResult


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise unless matplotlib is installed and can write files with this suffix.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        ConfigError: If it cannot write such files.
    """
    kinds = sorted(_figure(1.0).canvas.get_supported_filetypes())
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in kinds:
        raise ConfigError(f"no plot can be written to {os.fspath(path)!r}: use one of the suffixes {', '.join(kinds)}")


def draw_search(result: "TuneResult", path: Path) -> None:
    """Plot metric against objective of all trials, with the front, and the metric over the trials."""
    check_plot(path)
    figure = _figure(9.0)
    plane, course = figure.subplots(1, 2)
    by, scale, label = _axis(result)
    for name, trials, marker in _groups(result):
        values = [getattr(trial, by) / scale for trial in trials]
        plane.plot(values, [trial.metric for trial in trials], marker, label=name)
    plane.plot(
        [getattr(trial, by) / scale for trial in result.front], [trial.metric for trial in result.front],
        drawstyle="steps-post", color="gray", linewidth=1, label="Pareto front",
    )  # fmt: skip
    best, unchanged = result.best, result.unchanged
    plane.plot(getattr(best, by) / scale, best.metric, "*", markersize=14, label="best")
    plane.plot(getattr(unchanged, by) / scale, unchanged.metric, "s", color="black", label="unchanged")
    plane.set(xlabel=label, ylabel="metric")
    plane.legend(frameon=False, fontsize=8)
    complete = [trial for trial in result.trials if trial.state == "complete"]
    course.plot(range(len(complete)), [trial.metric for trial in complete], ".", label="metric")
    course.set(xlabel="trial", ylabel="metric")
    steps = best_so_far(result)
    if result.by_metric:
        course.plot(steps, drawstyle="steps-post", color="tab:red", label="best so far")
        course.legend(frameon=False, fontsize=8)
    else:
        twin = course.twinx()
        twin.plot([step / scale for step in steps], drawstyle="steps-post", color="tab:red", label="best so far")
        twin.set_ylabel(f"best {label} so far", color="tab:red")
    for axis in (plane, course):
        axis.grid(alpha=0.3)
    figure.savefig(path)


def draw_parameter(result: "TuneResult", name: str, path: Path) -> None:
    """Plot the metric of all trials against a parameter."""
    check_plot(path)
    parameter_names = list(dict.fromkeys(key for trial in result.trials for key in trial.params))
    if name not in parameter_names:
        names = ", ".join(map(repr, parameter_names))
        raise ConfigError(f"x={name!r} is not a parameter of the search: use one of {names}")
    figure = _figure(5.0)
    axis = figure.subplots()
    values = list(dict.fromkeys(trial.params[name] for trial in result.trials if name in trial.params))
    plain = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    for label, trials, marker in _groups(result):
        with_parameter = [trial for trial in trials if name in trial.params]
        x = [trial.params[name] if plain else values.index(trial.params[name]) for trial in with_parameter]
        axis.plot(x, [trial.metric for trial in with_parameter], marker, label=label)
    if not plain:
        axis.set_xticks(range(len(values)), list(map(str, values)))
    elif min(values) > 0 and max(values) > 20 * min(values):
        axis.set_xscale("log")
    axis.set(xlabel=name, ylabel="metric")
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.3)
    figure.savefig(path)


def best_so_far(result: "TuneResult") -> list[float]:
    """Return for each complete trial the metric, or objective, of the best trial so far."""
    sign = -1.0 if result.by_metric and result.higher_is_better else 1.0
    name = "metric" if result.by_metric else "objective"
    best, steps = math.inf, []
    for trial in result.trials:
        if trial.state == "complete":
            best = min(best, sign * getattr(trial, name)) if trial.feasible else best
            steps.append(sign * best if math.isfinite(best) else math.nan)
    return steps


def _figure(width: float) -> Any:
    return require_extra("matplotlib.figure", "demo").Figure(figsize=(width, 4.0), layout="constrained")


def _groups(result: "TuneResult") -> list[tuple[str, "Sequence[Trial]", str]]:
    fine = [trial for trial in result.trials if trial.feasible]
    return [
        ("feasible", fine, "o"),
        ("not feasible", [trial for trial in result.trials if trial.state == "complete" and not trial.feasible], "x"),
    ]


def _axis(result: "TuneResult") -> tuple[str, float, str]:
    """Return the figure on the horizontal axis, its unit and its label."""
    if result.objective in ("size", "metric"):
        return "size", 1e6, "size in MB"
    return ("latency", 1e-3, "latency in ms") if result.objective == "latency" else ("objective", 1.0, result.objective)

"""Plots of a search by Optuna: metric against objective, over the trials, and against a parameter."""

__all__ = ["check_plot", "draw"]

import os
from pathlib import Path
from typing import Any

from panther._process_settings import ignored_warnings
from panther.errors import ConfigError, require_extra
from panther.tuning.samplers import quiet


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise unless matplotlib is installed and can write files with this suffix.

    Raises:
        MissingExtraError: If matplotlib is not installed.
        ConfigError: If it cannot write such files.
    """
    kinds = sorted(require_extra("matplotlib.figure", "demo").Figure().canvas.get_supported_filetypes())
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in kinds:
        raise ConfigError(f"no plot can be written to {os.fspath(path)!r}: use one of the suffixes {', '.join(kinds)}")


def draw(result: Any, x: str | None, path: Path) -> Path:
    """Plot the metric against the objective, the trials (``"trial"``) or a parameter, as :meth:`TuneResult.plot`.

    ``result`` is a TuneResult, whose module imports this one.
    """
    check_plot(path)
    pyplot: Any = require_extra("matplotlib.pyplot", "demo")
    optuna: Any = require_extra("optuna", "tune")
    if x not in (None, "trial", *result.distributions):
        names = ", ".join(map(repr, ("trial", *result.distributions)))
        raise ConfigError(f"x={x!r} is not a parameter of the search: use one of {names}")
    by, scale, label = _horizontal_axis(result)
    plots: Any = require_extra("optuna.visualization.matplotlib", "tune")
    is_new: Any = optuna.exceptions.ExperimentalWarning
    with quiet(), pyplot.rc_context(), ignored_warnings(category=is_new):  # Optuna changes matplotlib's style.
        study = _study_of(result, by, scale)
        if x is None:
            axes = plots.plot_pareto_front(study, target_names=[label, "metric"])
            for name, trial, marker in (("best", result.best, "*"), ("unchanged", result.unchanged, "s")):
                axes.plot(getattr(trial, by) / scale, trial.metric, marker, color="black", label=name)
            axes.legend(frameon=False, fontsize=8)
        elif x == "trial":
            axes = plots.plot_optimization_history(study, target=_metric, target_name="metric")
        else:
            axes = plots.plot_slice(study, params=[x], target=_metric, target_name="metric")
        axes.figure.savefig(path, bbox_inches="tight")
        pyplot.close(axes.figure)
    return path


def _study_of(result: Any, by: str, scale: float) -> Any:
    """Return a study with two directions, the objective and the metric, that has the complete trials of a result."""
    import optuna

    directions: list[Any] = ["minimize", "maximize" if result.higher_is_better else "minimize"]
    distributions = {
        name: optuna.distributions.json_to_distribution(text) for name, text in result.distributions.items()
    }
    study = optuna.create_study(directions=directions)
    for trial in result.trials:
        if trial.state == "complete":
            frozen = optuna.trial.create_trial(
                values=[getattr(trial, by) / scale, trial.metric],
                params=dict(trial.params),
                distributions={name: distributions[name] for name in trial.params},
                constraints={"constraints": 0.0 if trial.feasible else 1.0},
            )
            study.add_trial(frozen)
    return study


def _metric(trial: Any) -> float:
    metric: float = trial.values[1]
    return metric


def _horizontal_axis(result: Any) -> tuple[str, float, str]:
    """Return the figure on the horizontal axis, its unit and its label."""
    if result.objective in ("size", "metric"):
        return "size", 1e6, "size in MB"
    return ("latency", 1e-3, "latency in ms") if result.objective == "latency" else ("objective", 1.0, result.objective)

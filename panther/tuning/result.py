"""The result of a search: its trials, the best model and the Pareto front, as a table, JSON and a plot."""

__all__ = ["Trial", "TuneResult"]

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from panther._text import counted, format_bytes, format_seconds, format_table
from panther.compression.report import CompressionReport
from panther.errors import MissingExtraError
from panther.files import write_json
from panther.tuning import plots
from panther.tuning.goal import Figures
from panther.tuning.prepared import Plan


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial of a search."""

    number: int
    """The number, from 0 in the order in which trials began."""
    params: Mapping[str, Any]
    """The drawn values, by the names of the space's parameters."""
    state: str
    """``"complete"``; ``"pruned"`` by partial metrics; or ``"failed"``, with ``reason``."""
    metric: float
    """The result of ``evaluate``, or the last partial metric of a pruned trial, or NaN if the trial failed."""
    objective: float
    """The value to minimise; for the objective ``"metric"`` the metric."""
    size: int
    """Bytes of all tensors of the model, as saved."""
    latency: float | None
    """Seconds per batch, if models are timed."""
    feasible: bool
    """Whether the trial is complete and satisfies all constraints."""
    plan: Plan
    """The changes to the model."""
    partial: tuple[float, ...] = ()
    """Metrics that ``evaluate`` yielded."""
    build_s: float = field(default=0.0, compare=False)
    """Seconds for making the layers and for measurements except for the metric."""
    evaluate_s: float = field(default=0.0, compare=False)
    """Seconds of ``evaluate``."""
    reason: str = ""
    """Why the trial failed."""

    @property
    def figures(self) -> Figures:
        """Return the measured figures."""
        return Figures(self.metric, self.size, self.latency, self.objective)


@dataclass(frozen=True, kw_only=True, repr=False)
class TuneResult:
    """The result of :func:`panther.tune`. ``print(result)`` shows the trials."""

    model: nn.Module
    """The best model: a copy of the original model with the layers of the best trial."""
    best: Trial
    """The best trial."""
    trials: tuple[Trial, ...]
    """All trials, in the order in which they ended."""
    front: tuple[Trial, ...]
    """The complete trials such that no other is at least as good in metric and objective, and better in one."""
    unchanged: Trial
    """The unchanged model, as trial -1."""
    report: CompressionReport | None
    """The forms of the best model's layers; None if models are trained from scratch."""
    objective: str
    """Name of the objective that was minimised."""
    constraints: tuple[str, ...]
    """The constraints, as texts."""
    higher_is_better: bool
    """Whether a larger metric is better."""
    by_metric: bool
    """Whether the best trial has the best metric, and not the smallest objective."""
    prepare_s: float
    """Seconds for the moments and decompositions, which all trials share."""
    seconds: float
    """Seconds of the search, including the preparation."""
    seed: int
    """The seed of the search, drawn if none was given."""
    notes: tuple[str, ...] = ()
    """Deviations from the arguments, and why."""
    study: Any = None
    """The study, for Optuna's plots and importances."""
    prepared: Any = None
    """Internal state from which :meth:`build` makes models."""

    def build(self, trial: int | Trial) -> nn.Module:
        """Return the model of another trial, such as one of the front.

        Args:
            trial: The trial or its number.

        Raises:
            KeyError: If there is no trial of this number.
        """
        if not isinstance(trial, Trial):
            trial_by_number = {candidate.number: candidate for candidate in self.trials}
            if trial not in trial_by_number:
                raise KeyError(f"there is no trial {trial}: use one of {sorted(trial_by_number)}")
            trial = trial_by_number[trial]
        return self.prepared.build(trial.plan)[0]

    def __repr__(self) -> str:
        """Return the best trial in one line; ``str`` has the table."""
        return f"<TuneResult: trial {self.best.number} of {len(self.trials)}, {self._describe(self.best)}>"

    def __str__(self) -> str:
        """Return the best trial, then the table."""
        states = [sum(trial.state == state for trial in self.trials) for state in ("pruned", "failed")]
        lines = [
            f"best: trial {self.best.number}, {self._describe(self.best)} "
            f"(unchanged: {self._describe(self.unchanged)})",
            f"objective {self.objective}" + "".join(f", {text}" for text in self.constraints),
            f"{counted(len(self.trials), 'trial')} ({states[0]} pruned, {states[1]} failed) in "
            f"{format_seconds(self.seconds)}, with {format_seconds(self.prepare_s)} of preparation",
        ]
        lines += [f"note: {note}" for note in self.notes]
        rows = [("trial", "state", "metric", "size", "latency", self.objective, "feasible", "front", "evaluate")]
        on_front = {trial.number for trial in self.front}
        for trial in self.trials:
            rows.append(
                (
                    f"{trial.number}{' *' if trial.number == self.best.number else ''}",
                    trial.state,
                    f"{trial.metric:.6g}",
                    format_bytes(trial.size),
                    "" if trial.latency is None else format_seconds(trial.latency),
                    f"{trial.objective:.6g}",
                    "yes" if trial.feasible else "no",
                    "yes" if trial.number in on_front else "",
                    format_seconds(trial.evaluate_s) if trial.evaluate_s else "",
                )
            )
        return "\n".join([*lines, format_table(rows)])

    def _describe(self, trial: Trial) -> str:
        latency = "" if trial.latency is None else f", {format_seconds(trial.latency)} a batch"
        return f"metric {trial.metric:.6g}, {format_bytes(trial.size)}{latency}"

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trial: its figures, and its parameters by name."""
        figures = ("number", "state", "metric", "objective", "size", "latency", "feasible", "build_s", "evaluate_s")
        return [
            {name: getattr(trial, name) for name in figures} | {f"params.{k}": v for k, v in trial.params.items()}
            for trial in self.trials
        ]

    def to_dataframe(self) -> Any:
        """Return :meth:`rows` as a pandas DataFrame.

        Raises:
            MissingExtraError: If pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError:
            raise MissingExtraError("pandas is needed here and is not installed: run pip install pandas") from None
        return pandas.DataFrame(self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Return everything except models as plain values, with None for numbers that are not finite."""
        plain = ("objective", "constraints", "higher_is_better", "prepare_s", "seconds", "seed", "notes")
        entries = {name: getattr(self, name) for name in plain}
        entries |= {"best": self.best.number, "front": [trial.number for trial in self.front]}
        entries |= {"unchanged": asdict(self.unchanged), "trials": [asdict(trial) for trial in self.trials]}
        return _finite(entries | {"report": None if self.report is None else self.report.to_dict()})

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_dict` to a file."""
        path = Path(path)
        write_json(path, self.to_dict())
        return path

    def plot(self, path: str | os.PathLike[str], x: str | None = None) -> Path:
        """Plot metric against objective of all trials, with the front, and the metric over the trials, to a file.

        Args:
            path: The file. Its suffix determines the format.
            x: A parameter of the search, such as ``"budget"``, against which to plot the metric instead.

        Raises:
            MissingExtraError: If matplotlib is not installed.
            ConfigError: If matplotlib cannot write files with this suffix, or there is no such parameter.
        """
        path = Path(path)
        if x is None:
            plots.draw_search(self, path)
        else:
            plots.draw_parameter(self, x, path)
        return path


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The result of a search: its trials, the best model and the Pareto front, as a table, JSON and a plot."""

__all__ = ["Trial", "TuneResult", "check_plot", "pareto_front", "plain"]

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self, get_type_hints

from torch import nn

from panther._text import counted, format_bytes, format_seconds, format_table
from panther._version import __version__
from panther.compression.report import CompressionReport
from panther.errors import ConfigError, FormatError, MissingExtraError, TuningError, require_extra
from panther.files import write_json
from panther.files.records import from_plain, read_record, record_checksum
from panther.tuning.compressed_models import CompressedModels
from panther.tuning.goal import Figures, Goal
from panther.tuning.plan import Plan

_FORMAT, _VERSION = "panther.tune", 2  # Records of version 1 have no checksum, and these files always have one.
_STATES = ("complete", "pruned", "failed")
# Fields of a result that are written as they are.
_WRITTEN = (
    "trials", "unchanged", "report", "objective", "constraints", "higher_is_better", "by_metric", "prepare_s",
    "seconds", "seed", "notes", "distributions",
)  # fmt: skip


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

    model: nn.Module | None
    """The best model: a copy of the original model with the layers of the best trial. None after :meth:`from_json`."""
    best: Trial
    """The best trial."""
    trials: tuple[Trial, ...]
    """All trials, in the order in which they ended."""
    front: tuple[Trial, ...]
    """The complete trials such that no other is at least as good in metric and objective, and better in one."""
    unchanged: Trial
    """The unchanged model, as trial -1."""
    report: CompressionReport | None
    """The forms of the best model's layers; None in files of earlier commits, if each trial trained its model."""
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
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Optuna's distributions of the parameters, as JSON."""
    study: Any = None
    """The study, for Optuna's plots and importances. None after :meth:`from_json`."""
    models: CompressedModels | None = None
    """Internal state from which :meth:`build` makes models. None after :meth:`from_json`."""

    def build(self, trial: int | Trial) -> nn.Module:
        """Return the model of another trial, such as one of the front.

        Args:
            trial: The trial or its number.

        Raises:
            KeyError: If there is no trial of this number.
            TuningError: If the result was read from a file.
        """
        if self.models is None:
            raise TuningError(
                "this result was read from a file, which has no models: save a model by pr.save_compressed, or call "
                "pr.tune again with the same storage="
            )
        if not isinstance(trial, Trial):
            trial_by_number = {candidate.number: candidate for candidate in self.trials}
            if trial not in trial_by_number:
                raise KeyError(f"there is no trial {trial}: use one of {sorted(trial_by_number)}")
            trial = trial_by_number[trial]
        return self.models.build(trial.plan)[0]

    def __repr__(self) -> str:
        """Return the best trial in one line; ``str`` has the table."""
        return f"<TuneResult: trial {self.best.number} of {len(self.trials)}, {self.best.figures.describe()}>"

    def __str__(self) -> str:
        """Return the best trial, then the table."""
        states = [sum(trial.state == state for trial in self.trials) for state in ("pruned", "failed")]
        lines = [
            f"best: trial {self.best.number}, {self.best.figures.describe()} "
            f"(unchanged: {self.unchanged.figures.describe()})",
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
        entries = {name: getattr(self, name) for name in _WRITTEN}
        entries |= {"best": self.best.number, "front": [trial.number for trial in self.front]}
        entries |= {"unchanged": asdict(self.unchanged), "trials": [asdict(trial) for trial in self.trials]}
        return plain(entries | {"report": None if self.report is None else self.report.to_dict()})

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_dict` to a file, with a checksum; :meth:`from_json` reads it."""
        path = Path(path)
        record = {"format": _FORMAT, "format_version": _VERSION, "panther_version": __version__, **self.to_dict()}
        write_json(path, record | {"checksum": record_checksum(record)})
        return path

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Return the result of a file that :meth:`to_json` wrote, without models and the study.

        Tables, rows and plots are those of the original result.

        Raises:
            FormatError: If the file is missing, damaged, or was not written by :meth:`to_json`.
        """
        path = Path(path)
        damaged = "write the file again, or use a copy of it"
        record = read_record(path, _FORMAT, range(_VERSION, _VERSION + 1), "TuneResult.to_json", damaged)
        hints = get_type_hints(cls) | {"best": int, "front": tuple[int, ...]}
        for name in (*_WRITTEN, "best", "front"):
            if name not in record:
                raise FormatError(f"{path} has no entry {name!r}: {damaged}")
            if name in ("trials", "unchanged"):
                record[name] = _without_training(record[name])
            record[name] = from_plain(hints[name], record[name], f"{path}: {name}")
        trials = {trial.number: trial for trial in record["trials"]}
        if len(trials) < len(record["trials"]):
            raise FormatError(f"{path} has two trials of one number: {damaged}")
        for trial in (*trials.values(), record["unchanged"]):
            if trial.state not in _STATES:
                raise FormatError(f"{path}: trial {trial.number} has the unknown state {trial.state!r}: {damaged}")
        for number in (record["best"], *record["front"]):
            if number not in trials:
                raise FormatError(f"{path} names trial {number}, which it does not have: {damaged}")
        front = tuple(trials[number] for number in record["front"])
        entries = {name: record[name] for name in _WRITTEN}
        return cls(model=None, best=trials[record["best"]], front=front, **entries)

    def plot(self, path: str | os.PathLike[str], x: str | None = None) -> Path:
        """Plot the metric of all complete trials against the objective, with the front, to a file.

        Args:
            path: The file. Its suffix determines the format.
            x: What to plot the metric against instead: ``"trial"``, or a parameter of the search such as ``"budget"``.

        Raises:
            MissingExtraError: If matplotlib is not installed.
            ConfigError: If matplotlib cannot write files with this suffix, or there is no such parameter.
        """
        path = Path(path)
        check_plot(path)
        if x not in (None, "trial", *self.distributions):
            names = ", ".join(map(repr, ("trial", *self.distributions)))
            raise ConfigError(f"x={x!r} is not a parameter of the search: use one of {names}")
        by, scale, label = _horizontal_axis(self)
        figure = require_extra("matplotlib.figure", "demo").Figure(layout="constrained")
        axes = figure.subplots()
        complete = [trial for trial in self.trials if trial.state == "complete"]
        if x is None:
            axes.plot(*self._points(complete, by, scale), "o", alpha=0.5, label="trial")
            axes.plot(*self._points(self.front, by, scale), "o-", label="front")
            for name, trial, marker in (("best", self.best, "*"), ("unchanged", self.unchanged, "s")):
                axes.plot(*self._points([trial], by, scale), marker, color="black", label=name)
            axes.legend(frameon=False, fontsize=8)
        else:
            plotted = [trial for trial in complete if x == "trial" or x in trial.params]
            values = [trial.number if x == "trial" else trial.params[x] for trial in plotted]
            axes.plot(values, [trial.metric for trial in plotted], "o")
        axes.set(xlabel=x or label, ylabel="metric")
        figure.savefig(path)
        return path

    @staticmethod
    def _points(trials: Sequence[Trial], by: str, scale: float) -> tuple[list[float], list[float]]:
        return [getattr(trial, by) / scale for trial in trials], [trial.metric for trial in trials]


def pareto_front(trials: Sequence[Trial], goal: Goal) -> tuple[Trial, ...]:
    """Return the complete trials such that no other is at least as good in metric and objective, and better in one."""
    by = "size" if goal.objective == "metric" else "objective"
    complete = [trial for trial in trials if trial.state == "complete"]
    front: list[Trial] = []
    for trial in sorted(
        complete, key=lambda trial: (getattr(trial, by), goal.metric_order(trial.figures), trial.number)
    ):
        if not front or goal.metric_order(trial.figures) < goal.metric_order(front[-1].figures):
            front.append(trial)
    return tuple(front)


def _without_training(trials: Any) -> Any:
    """Return trials without the settings with which plans of earlier commits trained models; most are empty."""
    if isinstance(trials, list):
        return [_without_training(trial) for trial in trials]
    if not isinstance(trials, dict) or not isinstance(plan := trials.get("plan"), dict):
        return trials
    return trials | {"plan": {name: value for name, value in plan.items() if name not in ("train", "model")}}


def plain(value: Any) -> Any:
    """Return mappings, tuples and numbers as JSON has them, with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise unless matplotlib is installed and can write files with this suffix."""
    kinds = sorted(require_extra("matplotlib.figure", "demo").Figure().canvas.get_supported_filetypes())
    suffix = Path(path).suffix.removeprefix(".").lower()
    if suffix not in kinds:
        raise ConfigError(f"no plot can be written to {os.fspath(path)!r}: use one of the suffixes {', '.join(kinds)}")


def _horizontal_axis(result: Any) -> tuple[str, float, str]:
    """Return the figure on the horizontal axis, its unit and its label."""
    if result.objective in ("size", "metric"):
        return "size", 1e6, "size in MB"
    return ("latency", 1e-3, "latency in ms") if result.objective == "latency" else ("objective", 1.0, result.objective)

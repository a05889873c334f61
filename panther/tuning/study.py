"""The study of a search: its storage, samplers and pruners of Optuna, which trials are drawn, and their results."""

__all__ = ["DESCRIBED_FUNCTIONS", "Job", "OpenStudy", "Study", "open_study"]

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np

from panther._process_settings import Block, ProcessSetting
from panther.errors import ConfigError, MissingExtraError, TuningError, require_extra
from panther.files.writer import release_lock, take_lock
from panther.tuning.config import TuneConfig
from panther.tuning.evaluation import Outcome
from panther.tuning.goal import Figures, Goal
from panther.tuning.plan import Plan
from panther.tuning.result import Trial, plain
from panther.tuning.space.layers import Space

_NAME = "panther.tune"  # name of the study in the storage
_IDENTITY, _UNCHANGED = "panther identity", "panther unchanged"
DESCRIBED_FUNCTIONS = ("forward_fn", "loss_fn", "mask_fn")
# Relative difference of the unchanged model's metric that is allowed in a resumed study, for another machine's
# rounding.
_AGREES = 1e-4
_PRUNERS = ("median", "asha", "none")
_PRUNER_STARTUP = 4  # first trials, which the median pruner does not prune
_RECORD, _REPEAT = "panther trial", "panther repeat"  # names of the attribute with a trial's result
_STATES = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
_REDRAWS = 30  # The space is exhausted if this number of consecutive draws gives only known plans.
_HALVINGS, _NARROW = 40, 0.01  # bisections of budgets for the first trials, and the smallest gap of their logarithms


@dataclass(frozen=True)
class OpenStudy:
    """An open study, with the stored figures of the unchanged model (empty for a new study) and notes of repairs."""

    study: Any
    storage: Any
    seed: int
    remembered: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def check_unchanged_model(self, goal: Goal, unchanged: Figures) -> None:
        """Store the unchanged model's figures in a new study, or raise ConfigError if a resumed study has others."""
        if not self.remembered:
            self.study.set_user_attr(_UNCHANGED, json.dumps(asdict(unchanged) | {"seed": self.seed}))
            return
        names = {"evaluate": "metric"} | ({} if isinstance(goal.objective, str) else {goal.name: "objective"})
        for function, figure in names.items():
            earlier, now = self.remembered[figure], getattr(unchanged, figure)
            if abs(earlier - now) > _AGREES * max(abs(earlier), abs(now)):
                raise ConfigError(
                    f"storage={self.storage!r} has another study, in which {function} returned {earlier:.6g} for the "
                    f"unchanged model, and now it returns {now:.6g}: use a new file, or the same data and function"
                )


@contextmanager
def open_study(config: TuneConfig, description: Mapping[str, str]) -> Iterator[OpenStudy]:
    """Create or resume the study of a storage. No other search can open a file meanwhile.

    A resumed search must have the same ``description``.
    """
    optuna: Any = require_extra("optuna", "tune")
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    class SearchedStudy(optuna.Study):
        """A study whose trials the search runs, outside of Optuna's loop."""

        is_exhausted = False

        def stop(self) -> None:  # Exhausted samplers call it. The method of the base class only works in Optuna's loop.
            self.is_exhausted = True

    storage: Any = config.storage
    path: Any = storage
    pruner = make_pruner(optuna, config.pruner)
    if storage is not None and not isinstance(storage, str | os.PathLike | optuna.storages.BaseStorage):
        raise ConfigError(
            f"storage must be a path, a database's URL or a storage of Optuna, not {type(storage).__name__}"
        )
    is_file = storage is not None and isinstance(storage, str | os.PathLike) and "://" not in str(storage)
    with _locked_and_repaired(path) if is_file else nullcontext(()) as notes:
        try:
            with quiet():
                backend = JournalStorage(JournalFileBackend(str(storage))) if is_file else storage
                backend = optuna.storages.get_storage(backend)
                directions = config.goal.directions
                optuna.create_study(storage=backend, study_name=_NAME, directions=directions, load_if_exists=True)
                sampler = None if isinstance(config.sampler, str) else config.sampler
                study = SearchedStudy(_NAME, backend, sampler, pruner)
                stored = json.loads(study.user_attrs.get(_IDENTITY, "{}"))
                remembered = json.loads(study.user_attrs.get(_UNCHANGED, "{}"))
                is_new = not (stored or study.get_trials(deepcopy=False))
        except Exception as error:
            raise _unreadable(storage, error) from error
        seed = int(remembered.get("seed", config.new_seed))
        if is_new:
            study.set_user_attr(_IDENTITY, json.dumps(dict(description)))
        elif differences := _differences(stored, description, seed, config):
            raise ConfigError(f"storage={storage!r} has another study ({differences}): use a new file, or delete it")
        yield OpenStudy(study, storage, seed, remembered, notes)


def _differences(stored: Mapping[str, str], description: Mapping[str, str], seed: int, config: TuneConfig) -> str:
    """Return in which properties a stored search differs from this one, or "" if they are equal."""
    names = [name for name in {**description, **stored} if stored.get(name) != description.get(name)]
    differences = [f"{name} {stored.get(name)} instead of {description.get(name)}" for name in names]
    if config.seed is not None and seed != config.new_seed:
        differences.append(f"seed {seed} instead of {config.seed}")
    return ", ".join(differences[:3])


def _unreadable(storage: Any, error: Exception) -> ConfigError:
    return ConfigError(
        f"storage={storage!r} cannot be opened ({type(error).__name__}: {error}): use a new file, or a file of a study "
        "of panther.tune"
    )


@contextmanager
def _locked_and_repaired(path: str | os.PathLike[str]) -> Iterator[tuple[str, ...]]:
    """Lock a file of a search until the process ends, and yield notes about its repair.

    Optuna's lock is only held during a write, and remains after a kill.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        if not take_lock(file.fileno()):
            raise ConfigError(
                f"storage={str(path)!r} is open in another search: wait until it has ended, or use another file"
            )
        try:
            yield _repair(path, file)
        finally:
            release_lock(file.fileno())  # Forked processes still have the file open.


def _repair(path: str | os.PathLike[str], file: IO[bytes]) -> tuple[str, ...]:
    """Remove an incomplete last line from a file of a search, and return a note about it.

    A process that is killed during a write leaves an incomplete line, and the next line would be appended to it.
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")
    if lines and rest:
        with suppress(ValueError, AttributeError):
            if json.loads(lines[0]).get("study_name") == _NAME:
                file.truncate(sum(map(len, lines)) + len(lines))
                return (f"storage={str(path)!r} ended within a line: its {len(rest)} bytes were removed",)
    return ()


def make_sampler(name: str, seed: int, startup: int, others_run: bool) -> Any:
    """Return the sampler with a name."""
    from optuna import samplers

    if name == "tpe":
        # The constant liar keeps the sampler away from the plans of running trials.
        return samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=others_run)
    if name == "gp":
        return samplers.GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
    return samplers.RandomSampler(seed=seed)


def uses_constraints(sampler: Any) -> bool:
    """Return whether a sampler, or the sampler with a name, uses constraints. Others get values with penalties."""
    from optuna import samplers

    if isinstance(sampler, str):
        return sampler in ("tpe", "gp")
    return isinstance(
        sampler, (samplers.TPESampler, samplers.GPSampler, samplers.NSGAIISampler, samplers.NSGAIIISampler)
    )


def make_pruner(optuna: Any, pruner: Any) -> Any:
    """Return the pruner with a name, or the given one of Optuna."""
    if isinstance(pruner, optuna.pruners.BasePruner):
        return pruner
    if pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=_PRUNER_STARTUP)
    if pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner()
    if pruner == "none":
        return optuna.pruners.NopPruner()
    raise ConfigError(f"pruner={pruner!r} is unknown: use {', '.join(map(repr, _PRUNERS))}, or one of Optuna's")


def quiet() -> Block:
    """Return a block that silences Optuna's log, because the search shows its progress."""
    return _verbosity().held()


@cache
def _verbosity() -> ProcessSetting:
    from optuna import logging

    return ProcessSetting(logging.get_verbosity, logging.set_verbosity, logging.WARNING)


@dataclass(frozen=True)
class Job:
    """A trial to run: its number, its Optuna trial, its plan, and the steps whose partial metrics were reported."""

    number: int
    trial: Any
    plan: Plan
    steps: set[int] = field(default_factory=set)


class Study:
    """An Optuna study that draws trials and records their results."""

    def __init__(
        self, study: Any, space: Space, goal: Goal, unchanged: Figures, sampler: Any, seed: int, first: int
    ) -> None:
        self.study, self.space, self.goal, self.unchanged = study, space, goal, unchanged
        self._sampler, self._seed = sampler, seed
        self._uses_constraints = uses_constraints(sampler)
        self._first = 0 if type(sampler).__name__ == "GridSampler" else first  # A GridSampler must draw all trials.
        self._pending: dict[int, Plan] = {}  # plans of running trials, by number
        self._resume()
        stored_trials = study.get_trials(deepcopy=False)
        self.trials = [
            _trial(trial.params, _record_of(trial)) for trial in stored_trials if _RECORD in trial.user_attrs
        ]
        self._repeats = sum(_REPEAT in trial.user_attrs for trial in stored_trials)

    @property
    def count(self) -> int:
        """Return the number of finished and running trials."""
        return len(self.trials) + len(self._pending)

    @property
    def best(self) -> Trial | None:
        """Return the best trial that satisfies all constraints, or None."""
        feasible = [trial for trial in self.trials if trial.feasible]
        return min(feasible, key=lambda trial: (*self.goal.order(trial.figures), trial.number), default=None)

    @property
    def distributions(self) -> dict[str, str]:
        """Return Optuna's distributions of the parameters, as JSON."""
        from optuna.distributions import distribution_to_json

        trials = self.study.get_trials(deepcopy=False)
        merged = {name: distribution for trial in trials for name, distribution in trial.distributions.items()}
        return {name: distribution_to_json(distribution) for name, distribution in merged.items()}

    def ask(self) -> Job | None:
        """Draw the next trial, or return None if no new plan is found.

        If a drawn plan was tried before, its earlier result is reported to Optuna, and it is not a trial.
        """
        for _ in range(_REDRAWS):
            if self.study.is_exhausted:
                return None
            job = self._draw()
            if self._is_new(job.plan):
                self._pending[job.number] = job.plan
                return job
            earlier = self.tried(job.plan)
            # A trial that runs on another worker has no figures yet.
            state, figures = ("failed", self.unchanged) if earlier is None else (earlier.state, earlier.figures)
            self._tell(job, _REPEAT, {"state": state, "figures": plain(asdict(figures))})
            self._repeats += 1
        return None

    def _draw(self) -> Job:
        with _optuna_calls():
            # Every trial has a seed, so that a killed and resumed study draws the same trials. A hash of the seed
            # avoids that a study with the next seed draws the same trials, shifted by one.
            seed = int(np.random.SeedSequence((self._seed, self.count + self._repeats)).generate_state(1)[0])
            params = self._first_params() if self.count < self._first else None
            if params is not None:
                self.study.enqueue_trial(params)
            if isinstance(self._sampler, str):
                self.study.sampler = make_sampler(self._sampler, seed, self._first, bool(self._pending))
            try:
                trial = self.study.ask()
                plan = self.space.draw(trial)
            except ModuleNotFoundError as error:
                raise MissingExtraError(
                    f"{type(self.study.sampler).__name__} needs {error.name}, which is not installed: run pip install "
                    f"{error.name}"
                ) from error
            except (ValueError, TypeError) as error:  # The user's sampler may not support the space.
                raise TuningError(f"{type(self.study.sampler).__name__} cannot draw from the space: {error}") from error
            used_numbers = {finished_trial.number for finished_trial in self.trials} | self._pending.keys()
            number = next(number for number in count() if number not in used_numbers)
            return Job(number, trial, plan)

    def tried(self, plan: Plan) -> Trial | None:
        """Return the finished trial of a plan, which would have the same result again, or None."""
        return next((trial for trial in self.trials if trial.plan == plan), None)

    def report(self, job: Job, step: int, figures: Figures) -> bool:
        """Report a partial result, and return whether the trial should end."""
        if len(self.goal.directions) > 1:
            return False  # Optuna has no pruning with two objectives
        value = self.goal.penalised(figures, self.unchanged)
        if not math.isfinite(value):
            return False
        with _optuna_calls():
            if step not in job.steps:  # A trial that runs again, because its worker died, reports its steps again.
                job.steps.add(step)
                job.trial.report(value, step)
            return bool(job.trial.should_prune())

    def tell(self, job: Job, outcome: Outcome) -> Trial:
        """Record the outcome of a trial."""
        feasible = outcome.state == "complete" and self.goal.feasible(outcome.figures, self.unchanged)
        record = asdict(outcome) | {"figures": plain(asdict(outcome.figures)), "feasible": feasible}
        record |= {"number": job.number, "plan": job.plan.to_json()}
        self._tell(job, _RECORD, record)
        del self._pending[job.number]
        trial = _trial(job.trial.params, record)
        self.trials.append(trial)
        return trial

    def _tell(self, job: Job, name: str, record: Mapping[str, Any]) -> None:
        """Store the result of a trial, and report it to Optuna.

        The record is written just before the report. After a kill in between, the report is made from the record.
        """
        with _optuna_calls():
            if record["state"] == "complete" and self._uses_constraints:
                figures = Figures(**record["figures"])
                for index, violation in enumerate(self.goal.violations(figures, self.unchanged)):
                    job.trial.set_constraint(str(index), violation)
            job.trial.set_user_attr(name, json.dumps(record))
            self._finish(job.trial, record)

    def _finish(self, trial: Any, record: Mapping[str, Any]) -> None:
        """Report the result of a trial, or of Optuna's number of a trial, to Optuna.

        Values have penalties if the sampler does not use constraints.
        """
        from optuna.trial import TrialState

        if record["state"] != "complete":
            self.study.tell(trial, state=TrialState[_STATES[record["state"]]])
            return
        figures, goal = Figures(**record["figures"]), self.goal
        if len(goal.directions) > 1 or self._uses_constraints:
            self.study.tell(trial, goal.values(figures))
        else:
            self.study.tell(trial, goal.penalised(figures, self.unchanged))

    def _first_params(self) -> dict[str, Any] | None:
        """Return the parameters of pr.compress at the middle of the largest gap between budgets, in the logarithm.

        Only gaps around the best budget count, where a constraint is satisfied on one side and violated on the other.
        Return None if all remaining plans are known.
        """
        from optuna.trial import FixedTrial

        low, high = math.log(min(self.space.smallest_budget, 1.0)), 0.0
        inside: list[float] = []
        for _ in range(_HALVINGS):
            marks = sorted({low, high, *(mark for mark in inside if low < mark < high)})
            width, a, b = max(((b - a, a, b) for a, b in pairwise(marks)), default=(0.0, low, high))
            if width < _NARROW:
                return None
            middle = (a + b) / 2
            params = self.space.at_budget(math.exp(middle))
            plan = self.space.draw(FixedTrial(params))
            if self._is_new(plan):
                return params
            trial = self.tried(plan)
            if trial is None or trial.state != "complete" or not self.goal.constraints:
                inside.append(middle)
            elif trial.feasible is self.goal.bounded:  # It is good enough, or too large.
                high = middle
            else:
                low = middle
        return None

    def _is_new(self, plan: Plan) -> bool:
        return self.tried(plan) is None and plan not in self._pending.values()

    def _resume(self) -> None:
        """Finish the trials of a killed run if their result is stored, and draw the rest again."""
        from optuna.trial import TrialState

        with _optuna_calls():
            for trial in self.study.get_trials(deepcopy=False):
                if trial.state is TrialState.RUNNING:
                    self._finish(trial.number, _record_of(trial) or {"state": "failed"})
                elif trial.state is TrialState.WAITING:
                    self.study.tell(self.study.ask(), state=TrialState.FAIL)  # ask() returns waiting trials first.


@contextmanager
def _optuna_calls() -> Iterator[None]:
    """Silence Optuna's log, and raise TuningError if another search has ended the trials of this search."""
    from optuna.exceptions import UpdateFinishedTrialError

    try:
        with quiet():
            yield
    except UpdateFinishedTrialError as error:
        raise TuningError(
            "another search continues the study of this storage, and has ended a trial of this search: run one search "
            "at a time, with parallel= for more processes"
        ) from error


def _record_of(trial: Any) -> dict[str, Any]:
    """Return the stored result of a trial, or {} if it has none."""
    record: dict[str, Any] = json.loads(trial.user_attrs.get(_RECORD) or trial.user_attrs.get(_REPEAT) or "{}")
    return record


def _trial(params: Mapping[str, Any], record: Mapping[str, Any]) -> Trial:
    figures: dict[str, Any] = {
        name: math.nan if value is None and name != "latency" else value for name, value in record["figures"].items()
    }
    figures |= {name: record[name] for name in ("number", "state", "feasible", "build_s", "evaluate_s", "reason")}
    plan, partial = Plan.from_json(record["plan"]), tuple(record["partial"])
    return Trial(params=dict(params), plan=plan, partial=partial, **figures)

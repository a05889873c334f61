"""The Optuna study behind a search: its storage and identity, the sampler of each trial, and what it is told."""

__all__ = ["Job", "Study", "check_agrees", "open_study", "pareto_front"]

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from panther.errors import ConfigError, require_extra
from panther.tuning.evaluation import Outcome
from panther.tuning.goal import Figures, Goal
from panther.tuning.prepared import Plan
from panther.tuning.result import Trial
from panther.tuning.spaces.layers import LayerSpaceBase

_NAME = "panther.tune"  # of the study in the storage
_IDENTITY, _UNCHANGED, _RECORD, _REPEAT = (f"panther {name}" for name in ("identity", "unchanged", "trial", "repeat"))
_SAMPLERS = ("tpe", "gp", "random")
_PRUNERS = ("median", "asha", "none")
_STATES = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
_REDRAWS = 30  # plans in a row that were tried before, after which a space counts as exhausted
_HALVINGS, _NARROW = 40, 0.01  # of budgets for the first trials: their number, and the least gap, in the logarithm
_PRUNER_STARTUP = 4  # trials that are not pruned by the median of others
_AGREES = 1e-4  # relative difference of the unchanged model's metric in a study that is continued: another machine's


@dataclass(frozen=True)
class Job:
    """A trial to run: its number, its Optuna trial, its plan."""

    number: int
    trial: Any
    plan: Plan


class Study:
    """An Optuna study, from which trials are drawn and to which they are told."""

    def __init__(
        self, study: Any, space: LayerSpaceBase, goal: Goal, unchanged: Figures, sampler: Any, seed: int, first: int
    ) -> None:
        self.study, self.space, self.goal, self.unchanged = study, space, goal, unchanged
        self._sampler, self._seed, self._first = sampler, seed, first
        self._pending: dict[int, Plan] = {}  # plans of trials that run, by number
        self._again = self._interrupted()
        every = study.get_trials(deepcopy=False)
        self.trials = [trial for trial in map(_recorded, every) if trial is not None]
        self._repeats = sum(_REPEAT in trial.user_attrs for trial in every)

    @property
    def count(self) -> int:
        """Return the number of trials that are done or run."""
        return len(self.trials) + len(self._pending)

    def ask(self) -> Job | None:
        """Draw the next trial; None if plans that were not tried are no longer found.

        Plans that were tried before are told to the study as they went then, and are no trials.
        """
        for _ in range(_REDRAWS):
            job = self._draw()
            earlier = self.tried(job.plan)
            if earlier is None and not any(job.plan == plan for plan in self._pending.values()):
                self._pending[job.number] = job.plan
                return job
            job.trial.set_user_attr(_REPEAT, True)
            if earlier is None:  # it runs on another worker
                self._tell(job, "FAIL", None)
            else:
                self._tell(job, _STATES[earlier.state], earlier.figures)
            self._repeats += 1
        return None

    def _draw(self) -> Job:
        with _quiet():
            if self._again:
                self.study.enqueue_trial(self._again.pop(0))
            elif self.count < self._first and (params := self._first_params()) is not None:
                self.study.enqueue_trial(params)
            if isinstance(self._sampler, str):
                # A new one for each trial, so that a study that was killed and continued draws the same ones.
                drawn = self.count + self._repeats
                seed = (self._seed + drawn) % 2**32
                self.study.sampler = _sampler(self._sampler, seed, self._first, bool(self._pending))
            trial = self.study.ask()
            used = {one.number for one in self.trials} | self._pending.keys()
            number = next(number for number in count() if number not in used)
            return Job(number, trial, self.space.draw(trial))

    def tried(self, plan: Plan) -> Trial | None:
        """Return the trial of a plan, if there was one: another would have the same result."""
        return next((trial for trial in self.trials if trial.plan == plan), None)

    def report(self, job: Job, step: int, figures: Figures) -> bool:
        """Tell a partial result, and return whether the trial is to end."""
        if len(self.goal.directions) > 1:
            return False  # Optuna has no pruning with two objectives
        value = self.goal.penalised(figures, self.unchanged)
        if not math.isfinite(value):
            return False
        job.trial.report(value, step)
        return bool(job.trial.should_prune())

    def tell(self, job: Job, outcome: Outcome) -> Trial:
        """Record what a trial found."""
        figures, complete = outcome.figures, outcome.state == "complete"
        record = {
            "number": job.number,
            "plan": job.plan.to_json(), "state": outcome.state, "partial": list(outcome.partial),
            "build_s": outcome.build_s, "evaluate_s": outcome.evaluate_s, "reason": outcome.reason,
            "figures": {name: None if value is None or not math.isfinite(value) else value
                        for name, value in asdict(figures).items()},
            "feasible": complete and self.goal.feasible(figures, self.unchanged),
        }  # fmt: skip
        job.trial.set_user_attr(_RECORD, json.dumps(record))
        self._tell(job, _STATES[outcome.state], figures)
        del self._pending[job.number]
        trial = _trial(job.trial.params, record)
        self.trials.append(trial)
        return trial

    def _tell(self, job: Job, state: str, figures: Figures | None) -> None:
        """Tell Optuna how a trial ended."""
        from optuna.trial import TrialState

        with _quiet():
            if state == "COMPLETE" and figures is not None:
                for index, violation in enumerate(self.goal.violations(figures, self.unchanged)):
                    job.trial.set_constraint(str(index), violation)
                self.study.tell(job.trial, self._values(figures))
            else:
                self.study.tell(job.trial, state=TrialState[state])

    def _values(self, figures: Figures) -> list[float]:
        """Return the values of a trial, penalised for a sampler that does not look at constraints."""
        from optuna import samplers

        looks = (samplers.TPESampler, samplers.GPSampler, samplers.NSGAIISampler, samplers.NSGAIIISampler)
        if len(self.goal.directions) > 1 or isinstance(self.study.sampler, looks):
            return self.goal.values(figures)
        return [self.goal.penalised(figures, self.unchanged)]

    def _first_params(self) -> dict[str, Any] | None:
        """Return the parameters of pr.compress at the middle of the largest gap, in the logarithm, between budgets.

        Gaps are between those that may be the best ones: where a constraint is met on one side and missed on the other.
        None if all that are left are known.
        """
        from optuna.trial import FixedTrial

        low, high = math.log(min(self.space.least, 1.0)), 0.0
        inside: list[float] = []
        for _ in range(_HALVINGS):
            marks = sorted({low, high, *(one for one in inside if low < one < high)})
            width, a, b = max(((b - a, a, b) for a, b in pairwise(marks)), default=(0.0, low, high))
            if width < _NARROW:
                return None
            middle = (a + b) / 2
            params = self.space.at_budget(math.exp(middle))
            plan = self.space.draw(FixedTrial(params))
            trial = self.tried(plan)
            if trial is None and plan not in self._pending.values():
                return params
            if trial is None or trial.state != "complete" or not self.goal.constraints:
                inside.append(middle)
            elif trial.feasible is self.goal.bounded:  # good enough, or too large
                high = middle
            else:
                low = middle
        return None

    def _interrupted(self) -> list[dict[str, Any]]:
        """Mark trials that a killed run left as failed, and return their parameters, to be run again."""
        from optuna.trial import TrialState

        left = [trial for trial in self.study.get_trials(deepcopy=False) if trial.state is TrialState.RUNNING]
        for trial in left:
            self.study.tell(trial.number, state=TrialState.FAIL)
        return [dict(trial.params) for trial in left]


def open_study(
    storage: Any, goal: Goal, identity: Mapping[str, str], sampler: Any, pruner: Any
) -> tuple[Any, dict[str, Any]]:
    """Make or continue the study of a storage, and return it and what it remembers of the unchanged model.

    Raises:
        ConfigError: If the storage cannot be opened, or holds another study.
    """
    optuna = require_extra("optuna", "tune")
    if isinstance(sampler, str) and sampler not in _SAMPLERS:
        raise ConfigError(f"sampler={sampler!r} is unknown: use {', '.join(map(repr, _SAMPLERS))}, or one of Optuna's")
    if not isinstance(sampler, str | optuna.samplers.BaseSampler):
        raise ConfigError(f"sampler must be a name or one of Optuna's samplers, not a {type(sampler).__name__}")
    try:
        with _quiet():
            study = optuna.create_study(
                storage=_opened(optuna, storage),
                sampler=None if isinstance(sampler, str) else sampler,
                pruner=_pruner(optuna, pruner),
                study_name=_NAME,
                directions=goal.directions,
                load_if_exists=True,
            )
            known = json.loads(study.user_attrs.get(_IDENTITY, "{}"))
            found = len(study.get_trials(deepcopy=False))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"storage={storage!r} cannot be opened ({type(error).__name__}: {error}): give a new file, or one of a "
            "study of panther.tune"
        ) from error
    if known or found:
        if differing := [name for name in {**identity, **known} if known.get(name) != identity.get(name)]:
            shown = ", ".join(f"{name} {known.get(name)} instead of {identity.get(name)}" for name in differing[:3])
            raise ConfigError(f"storage={storage!r} holds another study ({shown}): give a new file, or delete it")
    else:
        study.set_user_attr(_IDENTITY, json.dumps(dict(identity)))
    return study, json.loads(study.user_attrs.get(_UNCHANGED, "{}"))


def check_agrees(study: Any, storage: Any, known: Mapping[str, Any], unchanged: Figures, seed: int) -> None:
    """Note the unchanged model's figures and the seed in the study, or raise if those that it has are others."""
    if not known:
        study.set_user_attr(_UNCHANGED, json.dumps(asdict(unchanged) | {"seed": seed}))
        return
    before, now = known["metric"], unchanged.metric
    if abs(before - now) > _AGREES * max(abs(before), abs(now)):
        raise ConfigError(
            f"storage={storage!r} holds another study, in which evaluate returned {before:.6g} for the unchanged "
            f"model, and now it returns {now:.6g}: give a new file, or the same data and function"
        )


def _opened(optuna: Any, storage: Any) -> Any:
    """Return an Optuna storage, or None for memory: a path is the log of a journal, a text with :// a database."""
    if storage is None or isinstance(storage, optuna.storages.BaseStorage):
        return storage
    if isinstance(storage, str) and "://" in storage:
        return storage
    if not isinstance(storage, str | os.PathLike):
        raise ConfigError(
            f"storage must be a path, a database's URL or a storage of Optuna, not {type(storage).__name__}"
        )
    path = Path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))


def _sampler(name: str, seed: int, startup: int, others_run: bool) -> Any:
    from optuna import samplers

    if name == "tpe":
        # While others run, a constant in the place of their results keeps the sampler from drawing near them again.
        return samplers.TPESampler(seed=seed, n_startup_trials=startup, constant_liar=others_run)
    if name == "gp":
        return samplers.GPSampler(seed=seed, n_startup_trials=startup, warn_independent_sampling=False)
    return samplers.RandomSampler(seed=seed)


def _pruner(optuna: Any, pruner: Any) -> Any:
    if isinstance(pruner, optuna.pruners.BasePruner):
        return pruner
    made = {
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=_PRUNER_STARTUP),
        "asha": optuna.pruners.SuccessiveHalvingPruner,
        "none": optuna.pruners.NopPruner,
    }
    if pruner not in made:
        raise ConfigError(f"pruner={pruner!r} is unknown: use {', '.join(map(repr, _PRUNERS))}, or one of Optuna's")
    return made[pruner]()


def _recorded(trial: Any) -> Trial | None:
    """Return a trial of a storage; None for one that a killed run left."""
    text = trial.user_attrs.get(_RECORD)
    return None if text is None or not trial.state.is_finished() else _trial(trial.params, json.loads(text))


def _trial(params: Mapping[str, Any], record: Mapping[str, Any]) -> Trial:
    figures: dict[str, Any] = {
        name: math.nan if value is None and name != "latency" else value for name, value in record["figures"].items()
    }
    return Trial(
        number=record["number"],
        params=dict(params),
        state=record["state"],
        metric=figures["metric"],
        objective=figures["objective"],
        size=figures["size"],
        latency=figures["latency"],
        feasible=record["feasible"],
        plan=Plan.from_json(record["plan"]),
        partial=tuple(record["partial"]),
        build_s=record["build_s"],
        evaluate_s=record["evaluate_s"],
        reason=record["reason"],
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's log off the terminal: progress is shown by the search itself."""
    from optuna import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def pareto_front(trials: Sequence[Trial], goal: Goal) -> tuple[Trial, ...]:
    """Return the complete trials of which none is at least as good in metric and objective, and better in one."""
    sign = -1.0 if goal.higher_is_better else 1.0
    by = "size" if goal.objective == "metric" else "objective"
    complete = [trial for trial in trials if trial.state == "complete"]
    front: list[Trial] = []
    for trial in sorted(complete, key=lambda one: (getattr(one, by), sign * one.metric, one.number)):
        if not front or sign * trial.metric < sign * front[-1].metric:
            front.append(trial)
    return tuple(front)

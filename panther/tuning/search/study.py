"""The study of a search: what each trial draws, and what Optuna is told of it."""

__all__ = ["Job", "Study", "pareto_front"]

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np

from panther.errors import MissingExtraError, TuningError
from panther.tuning.evaluation import Outcome
from panther.tuning.goal import Figures, Goal
from panther.tuning.prepared import Plan
from panther.tuning.result import Trial
from panther.tuning.search.local import near
from panther.tuning.search.samplers import looks_at_constraints, make_sampler, quiet
from panther.tuning.spaces.layers import LayerSpaceBase

_BUDGET = "budget"  # a parameter of the automatic space
_RECORD, _REPEAT = "panther trial", "panther repeat"
_STATES = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
_REDRAWS = 30  # plans in a row that were tried before, after which a space counts as exhausted
_GLOBAL_EVERY = 3  # of the trials after the first ones, this one is the sampler's; the others are near the best
_HALVINGS, _NARROW = 40, 0.01  # of budgets for the first trials: their number, and the least gap, in the logarithm


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
        self._sampler, self._seed = sampler, seed
        self._looks = sampler in ("tpe", "gp") if isinstance(sampler, str) else looks_at_constraints(sampler)
        self._first = 0 if type(sampler).__name__ == "GridSampler" else first  # which cannot count others' trials
        self._pending: dict[int, Plan] = {}  # plans of trials that run, by number
        self._over = False
        study.stop = self._stop  # samplers call it when they have no more; Optuna's own is for its loop alone
        self._resume()
        every = study.get_trials(deepcopy=False)
        self.trials = [trial for trial in map(_recorded, every) if trial is not None]
        self.uncalled = {name for trial in every for name in _record_of(trial).get("uncalled", ())}
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
            if self._over:
                return None
            job = self._draw()
            if self._is_new(job.plan):
                self._pending[job.number] = job.plan
                return job
            earlier = self.tried(job.plan)
            # One that runs on another worker has no figures yet.
            state, figures = ("failed", self.unchanged) if earlier is None else (earlier.state, earlier.figures)
            self._tell(job, _REPEAT, {"state": state, "figures": _plain(figures)})
            self._repeats += 1
        return None

    def _draw(self) -> Job:
        with quiet(), _alone():
            # A seed for each trial, so that a study that was killed and continued draws the same ones. They are mixed,
            # so that studies of other seeds do not draw them too, one trial later.
            seed = int(np.random.SeedSequence((self._seed, self.count + self._repeats)).generate_state(1)[0])
            params = self._first_params() if self.count < self._first else self._near_params(seed)
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
            except (ValueError, TypeError) as error:  # of the user's sampler, which does not take every space
                raise TuningError(f"{type(self.study.sampler).__name__} cannot draw from the space: {error}") from error
            used = {one.number for one in self.trials} | self._pending.keys()
            number = next(number for number in count() if number not in used)
            return Job(number, trial, plan)

    def _stop(self) -> None:
        self._over = True

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
        with _alone():
            job.trial.report(value, step)
            return bool(job.trial.should_prune())

    def tell(self, job: Job, outcome: Outcome) -> Trial:
        """Record what a trial found."""
        figures, complete = outcome.figures, outcome.state == "complete"
        record = {
            "number": job.number,
            "plan": job.plan.to_json(), "state": outcome.state, "partial": list(outcome.partial),
            "build_s": outcome.build_s, "evaluate_s": outcome.evaluate_s, "reason": outcome.reason,
            "figures": _plain(figures), "feasible": complete and self.goal.feasible(figures, self.unchanged),
            "uncalled": outcome.uncalled,
        }  # fmt: skip
        self._tell(job, _RECORD, record)
        del self._pending[job.number]
        trial = _trial(job.trial.params, record)
        self.trials.append(trial)
        self.uncalled |= set(outcome.uncalled)
        return trial

    def _tell(self, job: Job, name: str, record: Mapping[str, Any]) -> None:
        """Store how a trial ended, and tell Optuna.

        The record is written last before that: where a kill comes between, it says what is to be told.
        """
        with quiet(), _alone():
            if record["state"] == "complete" and self._looks:
                figures = Figures(**record["figures"])
                for index, violation in enumerate(self.goal.violations(figures, self.unchanged)):
                    job.trial.set_constraint(str(index), violation)
            job.trial.set_user_attr(name, json.dumps(record))
            self._finish(job.trial, record)

    def _finish(self, trial: Any, record: Mapping[str, Any]) -> None:
        """Tell Optuna how a trial, or the one of a number, ended."""
        from optuna.trial import TrialState

        if record["state"] == "complete":
            self.study.tell(trial, self._values(Figures(**record["figures"])))
        else:
            self.study.tell(trial, state=TrialState[_STATES[record["state"]]])

    def _values(self, figures: Figures) -> list[float]:
        """Return the values of a trial, penalised for a sampler that does not look at constraints."""
        if len(self.goal.directions) > 1 or self._looks:
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
            if self._is_new(plan):
                return params
            trial = self.tried(plan)
            if trial is None or trial.state != "complete" or not self.goal.constraints:
                inside.append(middle)
            elif trial.feasible is self.goal.bounded:  # good enough, or too large
                high = middle
            else:
                low = middle
        return None

    def _near_params(self, seed: int) -> dict[str, Any] | None:
        """Return parameters near those of the best trial, for two of three trials; None if the sampler is to draw.

        It is for spaces with a budget. Settings of single layers, drawn near the best ones, were better in some
        searches and worse in others.
        """
        goal = self.goal
        fine = [trial for trial in self.trials if trial.feasible]
        if (
            self._sampler != "tpe"
            or not goal.constraints
            or len(goal.directions) > 1
            or not fine
            or (self.count - self._first) % _GLOBAL_EVERY == _GLOBAL_EVERY - 1
        ):
            return None
        best = min(fine, key=lambda trial: (*goal.order(trial.figures), trial.number))
        if _BUDGET not in best.params:
            return None
        distributions = next(
            trial.distributions for trial in self.study.get_trials(deepcopy=False)
            if _record_of(trial).get("number") == best.number and _RECORD in trial.user_attrs
        )  # fmt: skip
        return near(best, distributions, self.space, self._is_new, random.Random(seed), goal.bounded)

    def _is_new(self, plan: Plan) -> bool:
        return self.tried(plan) is None and plan not in self._pending.values()

    def _resume(self) -> None:
        """Finish the trials of a killed run whose result is stored; draw the remaining ones again."""
        from optuna.trial import TrialState

        with quiet(), _alone():
            for trial in self.study.get_trials(deepcopy=False):
                if trial.state is TrialState.RUNNING:
                    self._finish(trial.number, _record_of(trial) or {"state": "failed"})
                elif trial.state is TrialState.WAITING:
                    self.study.tell(self.study.ask(), state=TrialState.FAIL)  # it takes those that wait first


@contextmanager
def _alone() -> Iterator[None]:
    """Turn what Optuna raises where another search has ended this one's trials into a TuningError."""
    from optuna.exceptions import UpdateFinishedTrialError

    try:
        yield
    except UpdateFinishedTrialError as error:
        raise TuningError(
            "another search continues the study of this storage, and has ended this one's trial: run one at a time, "
            "with parallel= for several processes"
        ) from error


def _plain(figures: Figures) -> dict[str, Any]:
    return {
        name: None if value is None or not math.isfinite(value) else value for name, value in asdict(figures).items()
    }


def _record_of(trial: Any) -> dict[str, Any]:
    """Return how a trial ended, as it is stored; empty if it is not."""
    text = trial.user_attrs.get(_RECORD) or trial.user_attrs.get(_REPEAT)
    found: dict[str, Any] = {} if text is None else json.loads(text)
    return found


def _recorded(trial: Any) -> Trial | None:
    """Return a trial of a storage; None for one that repeats another, or that a killed run left."""
    return _trial(trial.params, _record_of(trial)) if _RECORD in trial.user_attrs else None


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


def pareto_front(trials: Sequence[Trial], goal: Goal) -> tuple[Trial, ...]:
    """Return the complete trials such that no other is at least as good in metric and objective, and better in one."""
    sign = -1.0 if goal.higher_is_better else 1.0
    by = "size" if goal.objective == "metric" else "objective"
    complete = [trial for trial in trials if trial.state == "complete"]
    front: list[Trial] = []
    for trial in sorted(complete, key=lambda one: (getattr(one, by), sign * one.metric, one.number)):
        if not front or sign * trial.metric < sign * front[-1].metric:
            front.append(trial)
    return tuple(front)

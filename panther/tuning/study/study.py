"""The study of a search, which draws trials and reports their results to Optuna."""

__all__ = ["Job", "Study", "step_from"]

import json
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from typing import Any

import numpy as np

from panther.errors import MissingExtraError, TuningError
from panther.tuning.evaluation import Outcome
from panther.tuning.goal import Figures, Goal
from panther.tuning.plan import Plan
from panther.tuning.result import Trial, plain
from panther.tuning.samplers import make_sampler, quiet, uses_constraints
from panther.tuning.space.layers import Space

# A step changes at most this share of the parameters, and on average at most this number.
_SHARE, _MOST = 0.5, 2.0
# Standard deviation of a step, as a share of the range of a parameter or of its logarithm.
_SIZE = 0.17
# Standard deviation of the decrease of the budget's logarithm below the cost of the best trial.
_LOWER = 0.12
_STEPS = 8  # attempts to find a new plan


def step_from(
    params: Mapping[str, Any], distributions: Mapping[str, Any], draw: random.Random, scale: float
) -> dict[str, Any]:
    """Change some parameters, within their ranges.

    Args:
        params: The parameters of the best trial.
        distributions: Optuna's distributions of the parameters.
        draw: Random numbers.
        scale: Factor of the size of the step.
    """
    moved_params = dict(params)
    names = [name for name in params if not distributions[name].single()]
    if not names:
        return moved_params
    changed_names = [name for name in names if draw.random() < min(_SHARE, _MOST / len(names))]
    for name in changed_names or [draw.choice(names)]:
        moved_params[name] = _moved(params[name], distributions[name], draw, _SIZE * scale)
    return moved_params


def _moved(value: Any, distribution: Any, draw: random.Random, size: float) -> Any:
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return draw.choice([choice for choice in choices if choice != value])
    low, high, step = distribution.low, distribution.high, distribution.step
    if distribution.log:
        moved = math.exp(math.log(value) + draw.gauss(0.0, size) * math.log(high / low))
    else:
        moved = value + draw.gauss(0.0, size) * (high - low)
    if step is None:
        return min(max(moved, low), high)
    num_steps = round((moved - low) / step)
    if low + num_steps * step == value:  # An integer changes by at least one step.
        num_steps += 1 if moved > value else -1
    moved = min(max(low + num_steps * step, low), high)
    return round(moved) if isinstance(value, int) else moved


_BUDGET = "budget"  # name of a parameter of the automatic space
_RECORD, _REPEAT = "panther trial", "panther repeat"  # names of the attribute with a trial's result
_STATES = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
_REDRAWS = 30  # The space is exhausted if this number of consecutive draws gives only known plans.
# After the first trials, the sampler draws every third trial. The rest are steps from the best trial.
_GLOBAL_EVERY = 3
_HALVINGS, _NARROW = 40, 0.01  # bisections of budgets for the first trials, and the smallest gap of their logarithms


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
        self.uncalled = {name for trial in stored_trials for name in _record_of(trial).get("uncalled", ())}
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
        self.uncalled |= set(outcome.uncalled)
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

    def _near_params(self, seed: int) -> dict[str, Any] | None:
        """Return parameters of a new plan near the best trial, or None if the sampler should draw.

        A few tens of trials are too few to learn a complete space. The first trials, the choices of pr.compress, are
        good, and better choices are near them. This is for spaces with a budget, and for two of three trials. For
        settings of individual layers, steps from the best trial were better in some searches and worse in others.
        """
        from optuna.trial import FixedTrial

        goal, best = self.goal, self.best
        if (
            self._sampler != "tpe"
            or not goal.constraints
            or len(goal.directions) > 1
            or best is None
            or _BUDGET not in best.params
            or (self.count - self._first) % _GLOBAL_EVERY == _GLOBAL_EVERY - 1
        ):
            return None
        distributions = next(
            trial.distributions for trial in self.study.get_trials(deepcopy=False)
            if _record_of(trial).get("number") == best.number and _RECORD in trial.user_attrs
        )  # fmt: skip
        draw = random.Random(seed)
        for attempt in range(_STEPS):
            params = step_from(best.params, distributions, draw, 1 + attempt / _STEPS)
            if goal.bounded:
                params = self.space.below(params, best.plan, abs(draw.gauss(0.0, _LOWER)))
            try:
                plan = self.space.draw(FixedTrial(params))
            except ValueError:  # The form has a parameter that the best trial lacks.
                continue
            if self._is_new(plan):
                return params
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

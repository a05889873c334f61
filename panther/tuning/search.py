"""One search, from the unchanged model to the best one: open the study, prepare, run trials, and build the result."""

__all__ = ["Task", "run_search"]

import time
from collections.abc import Mapping
from typing import Protocol

from torch import nn

from panther._random_state import preserved_generators
from panther.compression.calibration.runner import Runner
from panther.errors import TuningError
from panther.tuning.config import TuneConfig
from panther.tuning.evaluation import SAME, Evaluator
from panther.tuning.goal import Figures, Goal, check_unchanged
from panther.tuning.plan import Models, Plan
from panther.tuning.result import Trial, TuneResult, pareto_front
from panther.tuning.runners import run_trials
from panther.tuning.space.layers import LayerSpaceBase
from panther.tuning.study.storage import open_study
from panther.tuning.study.study import Study

_MOST = 5  # failed trials or names that notes list


class Task(Protocol):
    """What a search tunes: a trained model that is compressed, or models that are trained."""

    @property
    def description(self) -> Mapping[str, str]:
        """Return what must not change when the search is resumed."""

    @property
    def num_first(self) -> int:
        """Return the number of first trials, unless the user gives it."""

    def make_runner(self, seed: int) -> Runner:
        """Return the unchanged model, with its calibration batches."""

    def prepare(self, runner: Runner, seed: int) -> tuple[Models, LayerSpaceBase]:
        """Return the models of plans, and the space of plans."""


def run_search(task: Task, config: TuneConfig, began: float) -> TuneResult:
    """Run a search, as :func:`panther.tune` describes; ``began`` is the time of the call.

    Raises:
        ConfigError: If the storage has another study.
        TuningError: If a user's function fails, no trial is complete, or no trial satisfies the constraints.
    """
    goal = config.goal
    deadline = None if config.timeout_s is None else began + config.timeout_s
    with open_study(config, task.description) as opened, preserved_generators():  # Making layers draws random numbers.
        seed = opened.seed
        runner = task.make_runner(seed)
        evaluator = Evaluator(runner, seed, config.evaluate, goal, config.repeats, config.caught_exceptions)
        unchanged, evaluate_s = evaluator.measure_unchanged()
        check_unchanged(goal, unchanged)
        opened.check_unchanged_model(goal, unchanged)
        models, space = task.prepare(runner, seed)
        first = task.num_first if config.first is None else config.first
        search = Study(opened.study, space, goal, unchanged, config.sampler, seed, first)
        why = run_trials(search, evaluator, models, config.trials, deadline, config.parallel)
        best = _best(search, goal)
        tuned, report = models.build(best.plan)
        notes = [*opened.notes, *space.notes, *_notes(search, config, why)]
        if report is None or best.plan.heal:
            notes += _repeat_notes(evaluator, best, tuned)
        return TuneResult(
            model=tuned,
            best=best,
            trials=tuple(search.trials),
            front=pareto_front(search.trials, goal),
            unchanged=_unchanged_trial(unchanged, goal, evaluate_s),
            report=report,
            objective=goal.name,
            constraints=tuple(constraint.text for constraint in goal.constraints),
            higher_is_better=goal.higher_is_better,
            by_metric=goal.by_metric,
            prepare_s=models.seconds,
            seconds=time.perf_counter() - began,
            seed=seed,
            notes=tuple(notes),
            distributions=search.distributions,
            study=search.study,
            models=models,
        )


def _best(search: Study, goal: Goal) -> Trial:
    """Return the best trial, or raise TuningError if no trial satisfies the constraints."""
    complete = [trial for trial in search.trials if trial.state == "complete"]
    if not complete:
        reasons = list(dict.fromkeys(trial.reason for trial in search.trials if trial.reason)) or ["all were pruned"]
        raise TuningError(
            f"no trial of {len(search.trials)} was completed ({'; '.join(reasons[:3])}): check evaluate, or set more "
            "trials"
        )
    fine = [trial for trial in complete if trial.feasible]
    if fine:
        return min(fine, key=lambda trial: (*goal.order(trial.figures), trial.number))

    def missed(trial: Trial) -> float:
        return sum(max(violation, 0.0) for violation in goal.violations(trial.figures, search.unchanged))

    def distance(trial: Trial) -> tuple[float, ...]:
        return missed(trial), goal.metric_order(trial.figures), *goal.order(trial.figures)

    nearest = min(complete, key=distance)
    texts = " and ".join(repr(constraint.text) for constraint in goal.constraints)
    raise TuningError(
        f"no trial of {len(search.trials)} satisfies constraint={texts}: the best reached is "
        f"{goal.describe(nearest.figures)} (trial {nearest.number}), and the unchanged model has "
        f"{goal.describe(search.unchanged)}: relax the constraint, or set more trials or a larger space"
    )


def _unchanged_trial(unchanged: Figures, goal: Goal, evaluate_s: float) -> Trial:
    return Trial(
        number=-1, params={}, state="complete", metric=unchanged.metric, objective=unchanged.objective,
        size=unchanged.size, latency=unchanged.latency, feasible=goal.feasible(unchanged, unchanged), plan=Plan(),
        evaluate_s=evaluate_s,
    )  # fmt: skip


def _repeat_notes(evaluator: Evaluator, best: Trial, tuned: nn.Module) -> list[str]:
    """Return a note if training or healing the best model again gave another result."""
    if evaluator.repeats > 1:  # The metric of a varying function cannot be compared.
        return []
    metric = evaluator.metric_of(tuned, "the best model")
    if abs(metric - best.metric) <= SAME * max(abs(metric), abs(best.metric)):
        return []
    how = "healed" if best.plan.heal else "trained"
    return [
        f"the model of trial {best.number} was {how} again for the result, and has the metric {metric:.6g} instead of "
        f"{best.metric:.6g} in the trial: fix the order of its data and its random numbers, or use the same number of "
        "threads"
    ]


def _notes(search: Study, config: TuneConfig, why: str) -> list[str]:
    notes = []
    if len(search.trials) < config.trials:
        notes.append(f"ended after {len(search.trials)} of {config.trials} trials: {why}")
    failed = [trial for trial in search.trials if trial.state == "failed"]
    notes += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:_MOST]]
    if search.uncalled:
        names = sorted(search.uncalled)
        rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        notes.append(
            f"evaluate does not call {', '.join(map(repr, names[:_MOST]))}{rest}: the metric does not depend on "
            "the forms of these layers"
        )
    if len(search.goal.directions) > 1 and config.pruner != "none" and any(trial.partial for trial in search.trials):
        notes.append(
            "no trial was pruned by partial metrics: without a constraint of the metric the search has two objectives, "
            "and Optuna cannot prune with two objectives"
        )
    return notes

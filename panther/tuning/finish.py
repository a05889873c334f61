"""The result of a search: its best trial, the best model, and why the search ended."""

__all__ = ["finish_search"]

import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from panther.errors import TuningError
from panther.tuning.evaluation import SAME, Evaluator
from panther.tuning.goal import Figures, Goal
from panther.tuning.prepared import Plan
from panther.tuning.result import Trial, TuneResult
from panther.tuning.search.run import Run
from panther.tuning.search.study import Study, pareto_front

_MOST = 5  # failed trials or names that notes list


def finish_search(
    search: Study, evaluator: Evaluator, prepared: Any, evaluate_s: float, run: Run, why: str, seed: int,
    notes: Sequence[str],
) -> TuneResult:  # fmt: skip
    """Build the best model of a search, and return the result.

    Raises:
        TuningError: If no trial is complete, or no trial satisfies the constraints.
    """
    goal, unchanged = search.goal, search.unchanged
    best = _best(search, goal)
    tuned, report = prepared.build(best.plan)
    repeat_notes = _repeat_notes(evaluator, best, tuned) if report is None or best.plan.heal else []
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
        prepare_s=prepared.seconds,
        seconds=time.perf_counter() - run.began,
        seed=seed,
        notes=(*notes, *_notes(search, run, why), *repeat_notes),
        study=search.study,
        prepared=prepared,
    )


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


def _notes(search: Study, run: Run, why: str) -> list[str]:
    notes = []
    if len(search.trials) < run.trials:
        notes.append(f"ended after {len(search.trials)} of {run.trials} trials: {why}")
    failed = [trial for trial in search.trials if trial.state == "failed"]
    notes += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:_MOST]]
    if search.uncalled:
        names = sorted(search.uncalled)
        rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        notes.append(
            f"evaluate does not call {', '.join(map(repr, names[:_MOST]))}{rest}: the metric does not depend on "
            "the forms of these layers"
        )
    if len(search.goal.directions) > 1 and run.pruner != "none" and any(trial.partial for trial in search.trials):
        notes.append(
            "no trial was pruned by partial metrics: without a constraint of the metric the search has two objectives, "
            "and Optuna cannot prune with two objectives"
        )
    return notes

"""The result of a search: its best trial, the model of that, and why it ended."""

__all__ = ["finished"]

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

_MOST = 5  # failed trials, and names, in a note


def finished(
    search: Study, evaluator: Evaluator, prepared: Any, evaluate_s: float, run: Run, why: str, seed: int,
    notes: Sequence[str],
) -> TuneResult:  # fmt: skip
    """Return the result of a search that has ended, with its best model.

    Raises:
        TuningError: If no trial is complete, or none satisfies the constraints.
    """
    goal, unchanged = search.goal, search.unchanged
    best = _best(search, goal)
    tuned, report = prepared.build(best.plan)
    again = _trained_again(evaluator, best, tuned) if report is None or best.plan.heal else []
    return TuneResult(
        model=tuned,
        best=best,
        trials=tuple(search.trials),
        front=pareto_front(search.trials, goal),
        unchanged=_unchanged_trial(unchanged, goal, evaluate_s),
        report=report,
        objective=goal.name,
        constraints=tuple(one.text for one in goal.constraints),
        higher_is_better=goal.higher_is_better,
        by_metric=goal.by_metric,
        prepare_s=prepared.seconds,
        seconds=time.perf_counter() - run.began,
        seed=seed,
        notes=(*notes, *_notes(search, run, why), *again),
        study=search.study,
        prepared=prepared,
    )


def _trained_again(evaluator: Evaluator, best: Trial, tuned: nn.Module) -> list[str]:
    """Return a note if the best model was trained or healed a second time, with another result."""
    if evaluator.repeats > 1:  # of a function that varies
        return []
    metric = evaluator.metric_of(tuned, "the best model")
    if abs(metric - best.metric) <= SAME * max(abs(metric), abs(best.metric)):
        return []
    how = "healed" if best.plan.heal else "trained"
    return [
        f"the model of trial {best.number} was {how} again for the result, and has the metric {metric:.6g} where the "
        f"trial had {best.metric:.6g}: this is not reproducible, so fix the order of its data and its random numbers, "
        "or use as many threads in both"
    ]


def _best(search: Study, goal: Goal) -> Trial:
    """Return the best trial, or raise TuningError if none satisfies the constraints."""
    complete = [trial for trial in search.trials if trial.state == "complete"]
    if not complete:
        reasons = list(dict.fromkeys(trial.reason for trial in search.trials if trial.reason)) or ["all were pruned"]
        raise TuningError(
            f"no trial of {len(search.trials)} was completed ({'; '.join(reasons[:3])}): look at evaluate, or give "
            "more trials"
        )
    fine = [trial for trial in complete if trial.feasible]
    if fine:
        return min(fine, key=lambda trial: (*goal.order(trial.figures), trial.number))

    def missed(trial: Trial) -> float:
        return sum(max(one, 0.0) for one in goal.violations(trial.figures, search.unchanged))

    nearest = min(complete, key=lambda one: (missed(one), goal.metric_order(one.figures), *goal.order(one.figures)))
    wanted = " and ".join(repr(one.text) for one in goal.constraints)
    raise TuningError(
        f"no trial of {len(search.trials)} satisfies constraint={wanted}: the best reached is "
        f"{goal.shown(nearest.figures)} (trial {nearest.number}), and the unchanged model has "
        f"{goal.shown(search.unchanged)}: ask for less, give more trials, or a larger space"
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
            f"evaluate does not call {', '.join(map(repr, names[:_MOST]))}{rest}: the metric does not depend on what "
            "becomes of that"
        )
    if len(search.goal.directions) > 1 and run.pruner != "none" and any(trial.partial for trial in search.trials):
        notes.append(
            "no trial was pruned by what evaluate yields: without a constraint of the metric two objectives are "
            "searched, for which Optuna has no pruning"
        )
    return notes

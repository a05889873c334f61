"""The result of a search: its best trial, the model of that, and why it ended."""

__all__ = ["finished"]

from typing import Any

from panther.errors import TuningError
from panther.tuning.goal import Figures, Goal
from panther.tuning.prepared import Plan
from panther.tuning.result import Trial, TuneResult
from panther.tuning.study import Study, pareto_front


def finished(
    search: Study, prepared: Any, evaluate_s: float, trials: int, why: str, seconds: float, seed: int, study: Any
) -> TuneResult:
    """Return the result of a search that has ended, with its best model.

    Raises:
        TuningError: If no trial is complete, or none satisfies the constraints.
    """
    goal, unchanged = search.goal, search.unchanged
    best = _best(search, goal)
    tuned, report = prepared.build(best.plan)
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
        prepare_s=prepared.seconds,
        seconds=seconds,
        seed=seed,
        notes=_notes(search, trials, why),
        study=study,
        prepared=prepared,
    )


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

    nearest = min(complete, key=missed)
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


def _notes(search: Study, trials: int, why: str) -> tuple[str, ...]:
    notes = []
    if len(search.trials) < trials:
        notes.append(f"ended after {len(search.trials)} of {trials} trials: {why}")
    failed = [trial for trial in search.trials if trial.state == "failed"]
    notes += [f"trial {trial.number} failed: {trial.reason}" for trial in failed[:5]]
    return tuple(notes)

"""Trials one after the other, in this process."""

__all__ = ["EXHAUSTED", "OVER", "run_here"]

import time

from panther.tuning.evaluation import Evaluator
from panther.tuning.goal import Figures
from panther.tuning.prepared import Prepared
from panther.tuning.search.study import Job, Study

OVER = "the time was over"
EXHAUSTED = "no plan was found that was not tried before"


def run_here(search: Study, evaluator: Evaluator, prepared: Prepared, trials: int, deadline: float | None) -> str:
    """Run trials until there are ``trials``. If they end before, return why, else ""."""
    for _ in prepared.runner.over(range(search.count, trials), "trials"):
        if deadline is not None and time.perf_counter() > deadline and search.trials:
            return OVER
        job = search.ask()
        if job is None:
            return EXHAUSTED

        def report(step: int, figures: Figures, job: Job = job) -> bool:
            return search.report(job, step, figures)

        search.tell(job, evaluator.run(prepared, job.plan, job.number, report))
    return ""

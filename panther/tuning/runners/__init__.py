"""Runners of trials: one after the other, in processes of this machine, or on a Ray cluster.

The search stays in one process, which draws plans and writes the storage. With several workers, each runs one trial at
a time, step by step: it answers a call with a partial metric, or with the outcome of the trial. If a worker dies, its
trial runs again on a new worker.
"""

__all__ = ["OpenTrials", "run_on_workers", "run_trials"]

import os
import time
from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from panther.errors import ConfigError
from panther.tuning.compressed_models import CompressedModels
from panther.tuning.evaluation import Evaluator, failed, run_steps
from panther.tuning.runners.ray import ray_actors
from panther.tuning.runners.worker import Start, Worker, local_processes, serialize
from panther.tuning.study import Job, Study

_RETRIES = 2  # further attempts of a trial whose worker died
_OVER = "the time was over"
_EXHAUSTED = "no plan was found that was not tried before"


def run_trials(
    search: Study,
    evaluator: Evaluator,
    models: CompressedModels,
    trials: int,
    deadline: float | None,
    parallel: int | str,
) -> str:
    """Run trials until there are ``trials``, finished ones included. If they end before, return the reason, else ""."""
    source = OpenTrials(search, trials, deadline)
    if not (num_open := max(trials - search.count, 0)):
        return ""
    if parallel == 1:
        for _ in models.runner.over(range(search.count, trials), "trials"):
            if (job := source.next()) is None:
                break
            search.tell(job, run_steps(evaluator.trial(models, job.plan, job.number), partial(search.report, job)))
        return source.end_reason
    if parallel != "ray" and os.name != "posix":
        raise ConfigError(f"parallel={parallel} needs POSIX processes: use parallel='ray', or 1")
    workers: AbstractContextManager[tuple[Start, int]]
    if parallel == "ray":
        workers = ray_actors(serialize(evaluator, models), num_open, show=models.runner.show)
    else:
        workers = local_processes(serialize(evaluator, models), min(int(parallel), num_open))
    with workers as (start, count):
        run_on_workers(source, start, count, iter(models.runner.over(range(search.count, trials), "trials")))
    return source.end_reason


class OpenTrials:
    """Draws trials until there are enough, or until the deadline has passed or the space is exhausted."""

    def __init__(self, search: Study, trials: int, deadline: float | None) -> None:
        self.search, self._trials, self._deadline = search, trials, deadline
        self.end_reason = ""
        """Why the last call of :meth:`next` returned None, unless there are enough trials."""

    def next(self) -> Job | None:
        """Return a new trial, or None."""
        self.end_reason = ""
        if self.search.count >= self._trials:
            return None
        if self._deadline is not None and time.perf_counter() > self._deadline and self.search.trials:
            self.end_reason = _OVER
            return None
        if (job := self.search.ask()) is None:
            self.end_reason = _EXHAUSTED
        return job


def run_on_workers(source: OpenTrials, start: Start, count: int, progress: Any) -> None:
    """Run trials on ``count`` workers until all have ended, and end the workers, even after an exception."""
    search = source.search
    idle: list[Worker] = []
    jobs: dict[Worker, Job] = {}
    retries: list[Job] = []  # jobs whose worker died
    deaths: Counter[int] = Counter()
    next(progress, None)
    try:
        for _ in range(count):
            idle.append(start())
        while True:
            # A running trial may lead to new plans, so a search that has none left asks again after each trial.
            while idle and (job := retries.pop() if retries else source.next()) is not None:
                worker = idle.pop()
                jobs[worker] = job
                worker.call("begin", job.number, job.plan.to_json())
            if not jobs:
                return
            for worker in next(iter(jobs)).wait(list(jobs)):
                job = jobs[worker]
                kind, *values = worker.receive()
                if kind == "partial":
                    worker.call("proceed", search.report(job, *values))
                    continue
                if kind == "error":
                    raise values[0]
                del jobs[worker]
                if kind == "outcome":
                    idle.append(worker)
                    search.tell(job, values[0])
                else:  # It died.
                    deaths[job.number] += 1
                    ended = worker.end(at_once=True)
                    idle.append(start())
                    if deaths[job.number] <= _RETRIES:
                        retries.append(job)
                        continue
                    search.tell(job, failed(f"its process died {deaths[job.number]} times ({ended})"))
                next(progress, None)
    finally:
        for worker in [*idle, *jobs]:
            worker.end(at_once=worker in jobs)

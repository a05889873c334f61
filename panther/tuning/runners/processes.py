"""Trials in processes of this machine, each with a copy of the model and of the shared data.

The search stays in one process, which draws plans and writes the storage. If the process of a trial dies, the trial
runs again in a new process.
"""

__all__ = ["run_in_processes"]

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import IO

import torch

from panther.errors import ConfigError
from panther.tuning.evaluation import Evaluator, failed
from panther.tuning.prepared import Prepared
from panther.tuning.runners.serial import EXHAUSTED, OVER
from panther.tuning.runners.work import RETRIES, serialize
from panther.tuning.search.study import Job, Study

# The worker has the search path of this process, so that it imports the same modules.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from panther.tuning.runners.worker import main; main()"
)  # fmt: skip
_END_S = 10.0  # seconds after which a process that should end is killed


def run_in_processes(
    search: Study, evaluator: Evaluator, prepared: Prepared, trials: int, deadline: float | None, count: int
) -> str:
    """Run trials until there are ``trials``. If they end before, return why, else ""."""
    if os.name != "posix":
        raise ConfigError(f"parallel={count} needs POSIX processes: use parallel='ray', or 1")
    count = min(count, max(trials - search.count, 1))
    progress = iter(prepared.runner.over(range(search.count, trials), "trials"))
    with tempfile.TemporaryFile(prefix="panther-tune-") as work:  # It has no name, so that a kill leaves no file.
        work.write(serialize(evaluator, prepared))
        work.flush()
        with _Workers(work, count).running() as workers:
            return _run(search, workers, trials, deadline, progress)


def _run(search: Study, workers: "_Workers", trials: int, deadline: float | None, progress: Iterator[int]) -> str:
    why = ""
    retries: list[Job] = []  # jobs whose process died
    deaths: Counter[int] = Counter()
    next(progress, None)
    while True:
        why = ""
        while workers.idle:
            if retries:
                workers.give(retries.pop())
                continue
            if search.count >= trials:
                break
            if deadline is not None and time.perf_counter() > deadline and search.trials:
                why = OVER
                break
            job = search.ask()
            if job is None:  # A running trial may lead to new plans.
                why = EXHAUSTED
                break
            workers.give(job)
        if not workers.busy:
            return why
        for worker in workers.ready():
            job = worker.job
            assert job is not None
            message = worker.receive()
            if message is None:
                deaths[job.number] += 1
                ended = workers.replace(worker)
                if deaths[job.number] <= RETRIES:
                    retries.append(job)
                    continue
                search.tell(job, failed(f"its process died {deaths[job.number]} times ({ended})"))
            elif message[0] == "report":
                worker.send(search.report(job, message[1], message[2]))
                continue
            elif message[0] == "error":
                raise message[1]
            else:
                search.tell(job, message[1])
                worker.job = None
            next(progress, None)


class _Worker:
    """A process, its connection, and the trial that it runs."""

    def __init__(self, work: IO[bytes], threads: int) -> None:
        self.connection, other = multiprocessing.Pipe()
        files = [other.fileno(), work.fileno()]
        arguments = [json.dumps(sys.path), *map(str, files), str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen([sys.executable, "-c", _START, *arguments], pass_fds=files, env=environment)
        other.close()
        self.job: Job | None = None

    def send(self, message: object) -> None:
        """Send a message. If the process died, the next :meth:`receive` returns None."""
        with suppress(ConnectionError):
            self.connection.send(message)

    def receive(self) -> tuple | None:
        """Return a message, or None if the process died."""
        try:
            message: tuple = self.connection.recv()
        except (EOFError, ConnectionError):
            return None
        return message

    def end(self) -> str:
        """End the process, and return how it ended."""
        with suppress(ConnectionError):
            self.connection.send(None)
        self.connection.close()
        try:
            code = self.process.wait(_END_S if self.job is None else 0.1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(_END_S)
        return f"signal {-code}" if code < 0 else f"exit status {code}"


class _Workers:
    """The processes that run trials."""

    def __init__(self, work: IO[bytes], count: int) -> None:
        self._work, self._threads = work, max(1, torch.get_num_threads() // count)
        self._workers: list[_Worker] = []
        self._count = count

    @contextmanager
    def running(self) -> Iterator["_Workers"]:
        """Start the processes, and end them afterwards, even after an exception."""
        try:
            for _ in range(self._count):
                self._workers.append(_Worker(self._work, self._threads))
            yield self
        finally:
            for worker in self._workers:
                worker.end()

    @property
    def idle(self) -> list[_Worker]:
        """Return the processes without a trial."""
        return [worker for worker in self._workers if worker.job is None]

    @property
    def busy(self) -> list[_Worker]:
        """Return the processes with a trial."""
        return [worker for worker in self._workers if worker.job is not None]

    def give(self, job: Job) -> None:
        """Let an idle process run a trial."""
        worker = self.idle[0]
        worker.job = job
        worker.send((job.number, job.plan.to_json()))

    def ready(self) -> list[_Worker]:
        """Wait until a process sends a message or dies, and return all such processes."""
        by_connection: dict[Connection, _Worker] = {worker.connection: worker for worker in self.busy}
        return [
            by_connection[connection] for connection in wait(list(by_connection)) if isinstance(connection, Connection)
        ]

    def replace(self, worker: _Worker) -> str:
        """Replace a process that died, and return how it ended."""
        ended = worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self._work, self._threads)
        return ended

"""The processes of ``launch``: torch's elastic agent, with additions.

The agent restarts a group of workers and ends it as a whole. Panther's subclass adds a worker that ends with exit code
0 and without a result (the agent waits for it for ever), and the exit codes of all workers, where the agent reports
one, often not the one that failed first.
"""

__all__ = ["contained", "run_agent", "signals_followed"]

import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from panther._torch import end_workers, error_files, worker_processes
from panther.distributed.launcher._failures import Failure, describe, explain
from panther.distributed.launcher._rendezvous import LoopbackRendezvous
from panther.errors import DistributedError

_SHUTDOWN_S = 10


class _Agent(LocalElasticAgent):
    """torch's agent, which also detects workers that end without a result, and records every exit code."""

    _ended: frozenset[int] = frozenset()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Those that have ended before the agent ends the others with SIGTERM.
        self._ended = frozenset(rank for rank, p in enumerate(worker_processes(self)) if p.exitcode is not None)
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            # A worker with a result lives until the agent has read all of them, so an exit code of 0 means none.
            gone = {rank: p for rank, p in enumerate(worker_processes(self)) if p.exitcode == 0}
            if gone:
                failures = {
                    rank: ProcessFailure(local_rank=rank, pid=p.pid or 0, exitcode=0, error_file="")
                    for rank, p in gone.items()
                }
                return RunResult(state=WorkerState.FAILED, failures=failures)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _SHUTDOWN_S) -> None:
        # SIGTERM whatever this process got: a worker that still imports would answer SIGINT with a traceback.
        end_workers(self, signal.SIGTERM, _SHUTDOWN_S)
        super()._shutdown(signal.SIGTERM)

    def kill(self) -> None:
        """End the workers that are still there."""
        for process in worker_processes(self):
            if process.is_alive():
                process.kill()
            process.join()

    def failures(self, result: RunResult) -> list[Failure]:
        """Return how the workers of the last attempt failed."""
        files = error_files(self)
        by_themselves = self._ended | set(result.failures)
        found = [
            describe(rank, process.exitcode, files[rank], stopped=rank not in by_themselves)
            for rank, process in enumerate(worker_processes(self))
        ]
        return [failure for failure in found if failure is not None]


def run_agent(
    work: Callable[..., None], args: tuple[Any, ...], nproc: int, max_restarts: int, start_method: str, folder: str
) -> str:
    """Run ``work(*args)`` in ``nproc`` workers, and return how they failed, "" if they did not.

    On SIGINT, SIGTERM and the like, torch's SignalException is raised once the workers have ended.
    """
    with contained():
        spec = WorkerSpec(
            role="worker",
            local_world_size=nproc,
            entrypoint=work,
            args=args,
            rdzv_handler=LoopbackRendezvous(listen=False),
            max_restarts=max_restarts,
            monitor_interval=0.05,
            local_addr="127.0.0.1",
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=folder), start_method)
        try:
            result = agent.run()
        finally:
            agent.kill()
        return explain(agent.failures(result), nproc, max_restarts + 1) if result.is_failed() else ""


@contextmanager
def signals_followed() -> Iterator[None]:
    """Let a signal do to this process what it would have done without a launcher, once the workers have ended."""
    try:
        yield
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        signal.raise_signal(error.sigval)
        text = f"the launcher was ended by {error.sigval.name}, and so were its processes"
        raise DistributedError(text) from None


@contextmanager
def contained() -> Iterator[None]:
    """Undo the changes that a launcher makes to this process: environment variables and signal handlers.

    torch's log stays off the terminal, where the errors are said in words; handlers that a user attaches to its loggers
    still get it.
    """
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    propagate, variables = [logger.propagate for logger in loggers], dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    nothing = logging.NullHandler()  # without any handler Python would show warnings
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nothing)
    try:
        with warnings.catch_warnings():
            # Python warns of any process with threads, such as a progress bar's; the user chose to fork.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            # torch leaves the log files of workers that have ended to the garbage collector.
            warnings.filterwarnings("ignore", message="unclosed file", category=ResourceWarning)
            yield
    finally:
        for logger, before in zip(loggers, propagate, strict=True):
            logger.propagate = before
            logger.removeHandler(nothing)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for key in os.environ.keys() - variables.keys():
            del os.environ[key]
        os.environ.update(variables)

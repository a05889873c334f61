"""The processes of ``launch``: torch's elastic agent, told to be quiet, and what is known of a run that failed.

The agent restarts a group of workers and ends it as a whole. Panther's subclass adds what the agent leaves out: a
worker that ends with exit code 0 and without a result (the agent waits for it for ever), and the exit codes of all
workers, of which the agent reports one, often not the one that failed first.
"""

__all__ = ["Failure", "own_signal_handlers", "quiet", "run_agent"]

import json
import logging
import re
import signal
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

_SHUTDOWN_S = 10
_LOST = re.compile("Connection (closed|reset) by peer|Broken pipe")  # what gloo says when another worker has ended


@dataclass(frozen=True)
class Failure:
    """How one worker ended."""

    rank: int
    order: tuple[int, float]
    """Sorts the probable cause first."""
    text: str
    """In words, to follow the rank."""
    traceback: str


class _OneNode(RendezvousHandler):
    """The rendezvous of a single node: nobody to wait for, so no server, port or thread.

    A thread would be there when workers are forked: with torch's c10d handler one worker in some hundred hung at birth.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "127.0.0.1"))

    def get_backend(self) -> str:
        return "one-node"

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """torch's agent, which also notices workers that leave without a result and keeps every exit code."""

    _ended: frozenset[int] = frozenset()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _allow_fork():
            return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Those that have ended before the agent ends the others with SIGTERM.
        self._ended = frozenset(rank for rank, p in enumerate(self._processes()) if p.exitcode is not None)
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY:
            # A worker with a result lives until the agent has read all of them, so an exit code of 0 means none.
            gone = {rank: p for rank, p in enumerate(self._processes()) if p.exitcode == 0}
            if gone:
                failures = {
                    rank: ProcessFailure(local_rank=rank, pid=p.pid or 0, exitcode=0, error_file="")
                    for rank, p in gone.items()
                }
                return RunResult(state=WorkerState.FAILED, failures=failures)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _SHUTDOWN_S) -> None:
        # SIGTERM whatever this process got: a worker that still imports would answer SIGINT with a traceback.
        super()._shutdown(signal.SIGTERM, _SHUTDOWN_S)

    def _processes(self) -> list[Any]:
        context = getattr(self._pcontext, "_pc", None)
        return [] if context is None else context.processes

    def kill(self) -> None:
        """End what is still there."""
        for process in self._processes():
            if process.is_alive():
                process.kill()
            process.join()

    def failures(self, result: RunResult) -> list[Failure]:
        """How the workers of the last attempt failed, the probable cause first."""
        files = {} if self._pcontext is None else self._pcontext.error_files
        found = []
        for rank, process in enumerate(self._processes()):
            failure = _describe(rank, process.exitcode, Path(files[rank]), rank in self._ended | set(result.failures))
            if failure is not None:
                found.append(failure)
        return sorted(found, key=lambda failure: failure.order)


def _describe(rank: int, exitcode: int | None, error_file: Path, by_itself: bool) -> Failure | None:
    if error_file.is_file():
        message = json.loads(error_file.read_text())["message"]
        lost = _LOST.search(message["message"]) is not None
        text = "lost its connection to another rank" if lost else f"raised {message['message']}"
        order = (2 if lost else 1, error_file.stat().st_mtime)
        return Failure(rank, order, text, message["extraInfo"]["py_callstack"])
    if exitcode is None:
        return None
    if exitcode < 0:
        name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else f"signal {-exitcode}"
        if name == "SIGTERM" and not by_itself:
            return None  # ended by the agent
        return Failure(rank, (0, 0.0), f"was ended by {name} (exit code {exitcode})", "")
    if exitcode == 0:  # one with a result that the agent ended before it read it has another code
        return Failure(rank, (0, 0.0), "left with exit code 0 before its function returned, as by os._exit", "")
    return Failure(rank, (1, 0.0), f"left with exit code {exitcode} and no traceback", "")


def run_agent(
    work: Callable[[Any], None], job: object, nproc: int, max_restarts: int, start_method: str, folder: Path
) -> list[Failure]:
    """Run ``work(job)`` in ``nproc`` workers; how they failed, or nothing.

    Raises:
        KeyboardInterrupt: On SIGINT, once the workers have ended.
        SignalException: On SIGTERM and the like, once the workers have ended.
    """
    with quiet(), own_signal_handlers():
        spec = WorkerSpec(
            role="worker",
            local_world_size=nproc,
            entrypoint=work,
            args=(job,),
            rdzv_handler=_OneNode(),
            max_restarts=max_restarts,
            monitor_interval=0.05,
            local_addr="127.0.0.1",
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=str(folder)), start_method, shutdown_timeout=_SHUTDOWN_S)
        try:
            result = agent.run()
        except SignalException as interrupt:
            if interrupt.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
        finally:
            agent.kill()
        if not result.is_failed():
            return []
        return agent.failures(result)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the agent's log off the terminal; handlers that a user attaches to these loggers still get it."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    before = [logger.propagate for logger in loggers]
    nothing = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(nothing)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(nothing)


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Put back the handlers that the agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _allow_fork() -> Iterator[None]:
    with warnings.catch_warnings():
        # Said of any process with a thread, such as a progress bar's; the user chose to fork.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        yield

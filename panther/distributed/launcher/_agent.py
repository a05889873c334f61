"""The processes of ``launch`` and ``panther launch``: torch's elastic agent, with additions.

The agent starts, restarts and ends all workers of a group together. Panther's subclass handles four more cases. A
worker that ends with exit code 0 and without a result has failed; the agent would wait for it for ever. The exit codes
of all workers are recorded; the agent reports one, often not the first failure. Once a worker has failed, the other
workers have a limited time to end. Signals that warn of the end of a job are passed on to the workers.
"""

__all__ = ["BACKEND", "contained", "latest_failures", "run_agent", "run_scripts", "signals_followed"]

import logging
import os
import signal
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from panther._torch import (
    end_workers,
    error_files,
    limit_closing,
    logs_of,
    with_agent_class,
    worker_exit_codes,
    worker_processes,
)
from panther.distributed.comm.ending import GRACE_PERIOD_VARIABLE, STACKS_SIGNAL, catches, is_free
from panther.distributed.launcher._failures import Failure, RankLogs, describe, describe_early_end, explain
from panther.errors import DistributedError

_LOOPBACK = "127.0.0.1"
BACKEND = "panther-loopback"
"""The name for ``--rdzv-backend``."""


class LoopbackRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous for one node, with a new store for every attempt.

    The store that torch reuses after a restart keeps addresses of workers that have ended, and some restarts then hang.
    With ``listen``, workers are scripts that connect to the store on a free port of the loopback interface. Forked
    workers must not inherit such a store: with torch's threads, about one in a hundred hung at its start.
    """

    def __init__(self, listen: bool) -> None:
        super().__init__(_LOOPBACK, 0, rank=0, world_size=1, run_id=uuid.uuid4().hex, timeout=0)
        self._listen = listen

    @property
    def use_agent_store(self) -> bool:
        """Whether workers connect to the store of the launcher, so that no worker has to find a free port."""
        return self._listen

    def get_backend(self) -> str:
        """Return the name of the rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store for the next attempt."""
        if self._listen:
            listener = socket.create_server((_LOOPBACK, 0), backlog=socket.SOMAXCONN)
            port = listener.getsockname()[1]
            # With its own socket, torch's server would listen on every interface, and another process could take the
            # port before.
            store = TCPStore(
                _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, port))
        alone = HashStore()
        return RendezvousInfo(alone, 0, 1, RendezvousStoreInfo.build(0, alone, _LOOPBACK))


rendezvous_handler_registry.register(BACKEND, lambda parameters: LoopbackRendezvous(listen=True))


_FAILURE_GRACE_S = 3
"""Seconds that all other ranks have to end once a rank has failed: the ranks cannot save together any more."""
_STACKS_S = 0.5
_LOGGER = logging.getLogger(__name__)
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class _Agent(LocalElasticAgent):
    """torch's agent with a limit for ending workers; it notes how workers fail."""

    latest_failures: ClassVar[list[Failure]] = []
    grace_period_s: ClassVar[float] = 0.0
    shutdown_timeout_s: ClassVar[int] = 30

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._ended: frozenset[int] | None = None  # workers that had ended before the agent began to end workers
        self.failures: list[Failure] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self._ended = None
        limit_closing(self, max(1, min(_FAILURE_GRACE_S, int(self.grace_period_s))), _Agent._prepare_end)
        self._pids = pids
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGUSR1"):
            self._pass_on_warnings(list(pids.values()))
        return pids

    def _pass_on_warnings(self, pids: Sequence[int]) -> None:
        """Send SIGUSR1, by which a scheduler warns of the end of a job, to the workers that expect it."""

        def pass_on(number: int, frame: Any) -> None:
            receivers = [pid for pid in pids if catches(pid, number, otherwise=True)]
            for pid in receivers:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if not receivers:
                _LOGGER.warning("SIGUSR1 was not passed on, because no process handles it")

        if is_free(signal.SIGUSR1) or getattr(signal.getsignal(signal.SIGUSR1), "of_launcher", False):
            pass_on.of_launcher = True  # type: ignore[attr-defined] # so that the next attempt replaces it
            signal.signal(signal.SIGUSR1, pass_on)

    def _prepare_end(self) -> None:
        """Note which workers have ended, and after a failure let the others show in their logs where they are."""
        self._note_ended()
        codes = worker_exit_codes(self)
        if STACKS_SIGNAL is None or worker_processes(self) or not any(codes.values()):
            return  # workers that run a function have no logs
        running_pids = [pid for local, pid in self._pids.items() if codes.get(local) is None]
        answering_pids = [pid for pid in running_pids if catches(pid, STACKS_SIGNAL, otherwise=False)]
        for pid in answering_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS_SIGNAL)
        if answering_pids:
            time.sleep(_STACKS_S)  # SIGTERM would end a process before it has shown them

    def _note_ended(self) -> None:
        if self._ended is None:
            self._ended = frozenset(rank for rank, code in worker_exit_codes(self).items() if code is not None)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if worker_processes(self):  # torch ends all workers before it closes the context
            self._ended = None
            self._note_ended()
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and worker_processes(self):
            # A worker with a result lives until the agent has read all results, so a worker with exit code 0 has none.
            ended = {rank: p for rank, p in enumerate(worker_processes(self)) if p.exitcode == 0}
            if ended:
                failures = {
                    rank: ProcessFailure(local_rank=rank, pid=p.pid or 0, exitcode=0, error_file="")
                    for rank, p in ended.items()
                }
                result = RunResult(state=WorkerState.FAILED, failures=failures)
        if result.is_failed():
            self._note_ended()
            self._note_failures(worker_group, result)
        return result

    def _note_failures(self, worker_group: WorkerGroup, result: RunResult) -> None:
        """Describe how the workers of this attempt ended, before the next attempt overwrites their exit codes."""
        codes, files = worker_exit_codes(self), error_files(self)
        logs: Any = logs_of(self)
        logs = logs if isinstance(logs, RankLogs) else None
        are_scripts = not worker_processes(self)
        self.failures = []
        for worker in worker_group.workers:
            local, rank = worker.local_rank, worker.global_rank
            log = "" if logs is None else str(logs.destination.stderrs[local])
            by_itself = local in (self._ended or ()) or (not are_scripts and rank in result.failures)
            if are_scripts and codes.get(local) == 0:
                failure = describe_early_end(rank) if by_itself else None
            else:
                failure = describe(rank, codes.get(local), files.get(local, ""), log, stopped=not by_itself)
            if failure is not None:
                self.failures.append(failure)
        _Agent.latest_failures = self.failures
        if logs is not None:
            logs.failures = self.failures

    # torch passes the signal that the launcher received, since torch 2.13 also a timeout, and after a failure neither.
    def _shutdown(self, death_sig: signal.Signals | None = None, *args: Any, **timeout: int) -> None:
        if worker_processes(self):
            # SIGTERM after any signal: a worker that still imports would answer SIGINT with a traceback.
            end_workers(self, signal.SIGTERM, max(1, int(self.grace_period_s)))
            death_sig = signal.SIGTERM
        elif death_sig is not None and not (args or timeout):  # torch 2.11 would use the time that follows a failure
            end_workers(self, death_sig, self.shutdown_timeout_s)
        super()._shutdown(death_sig or signal.SIGTERM, *args, **timeout)

    def kill(self) -> None:
        """Kill the workers that are still alive."""
        for process in worker_processes(self):
            if process.is_alive():
                process.kill()
            process.join()


def _set_grace_period(grace_period_s: float) -> None:
    """Set the grace period of the agents that are created from now on, and of their workers."""
    os.environ[GRACE_PERIOD_VARIABLE] = f"{grace_period_s:g}"
    _Agent.grace_period_s = grace_period_s


def run_agent(
    work: Callable[..., None],
    args: tuple[Any, ...],
    nproc: int,
    max_restarts: int,
    start_method: str,
    folder: str,
    grace_period_s: float,
) -> str:
    """Run ``work(*args)`` in ``nproc`` workers, and return a description of their failures; "" if all succeeded.

    On a signal such as SIGINT or SIGTERM, torch's SignalException is raised once the workers have ended.
    """
    with contained():
        _set_grace_period(grace_period_s)
        os.environ[_SIGNALS_VARIABLE] = handled_signals()
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
        return explain(agent.failures, nproc, max_restarts + 1) if result.is_failed() else ""


def run_scripts(config: LaunchConfig, command: Any, arguments: Sequence[str], grace_period_s: float) -> None:
    """Run a script in the workers of a configuration of torch's launcher, and raise the errors of torch's launcher."""
    _Agent.shutdown_timeout_s = getattr(config, "shutdown_timeout", 30)  # `_arguments` sets it for torch 2.11
    _set_grace_period(grace_period_s)
    with with_agent_class(_Agent):
        elastic_launch(config, command)(*arguments)


def latest_failures() -> list[Failure]:
    """Return how the workers of the last attempt of this process failed."""
    return _Agent.latest_failures


def handled_signals() -> str:
    """Return the names of the signals that end a launcher, for torch, without ignored signals, as by ``nohup``."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    ignored = signal.SIG_IGN
    return ",".join(
        name for name in names if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not ignored
    )


@contextmanager
def signals_followed() -> Iterator[None]:
    """Once a signal has ended the workers, let it act on this process as it would have without a launcher."""
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

    torch's log does not appear on the terminal; handlers that a user attaches to torch's loggers still get it.
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
            # Python warns about forks of a process with threads, such as a progress bar's. The user chose to fork.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            # torch does not close the log files of workers that have ended.
            warnings.filterwarnings("ignore", message="unclosed file", category=ResourceWarning)
            yield
    finally:
        for logger, previous in zip(loggers, propagate, strict=True):
            logger.propagate = previous
            logger.removeHandler(nothing)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for key in os.environ.keys() - variables.keys():
            del os.environ[key]
        os.environ.update(variables)

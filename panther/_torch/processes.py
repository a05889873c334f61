"""Processes: workers of a DataLoader, and the agents and workers of torch"s launcher."""

__all__ = [
    "end_with_parent", "end_workers", "error_files", "is_forked_from_cuda", "is_this_host", "kill_loader_workers",
    "limit_closing", "logs_of", "usable_cores", "with_agent_class", "worker_exit_codes", "worker_processes",
]  # fmt: skip

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

import torch


def is_forked_from_cuda() -> bool:
    """Return whether this process was forked after its parent used the GPU, so that it cannot use the GPU.

    torch has no public function that tells it. The fallback is to use the GPU, and to read the message of the error.
    """
    return torch.cuda._is_in_bad_fork()


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the system send this process a signal when its parent ends, as torch does for its workers.

    The public fallback is ``ctypes`` with ``prctl(PR_SET_PDEATHSIG)``, on Linux.
    """
    torch.multiprocessing._prctl_pr_set_pdeathsig(number)  # type: ignore[attr-defined]


def kill_loader_workers(loader: Any, iterator: Any, wait_s: float) -> list[int]:
    """End the worker processes of a DataLoader's iterator by SIGKILL.

    Return the numbers of the signals that ended workers before, or within ``wait_s``.

    The iterator's own method waits for a lock that a killed worker may hold, and 5 seconds for each worker that hangs.
    The public fallback is to kill the children of this process whose names begin like the names of DataLoader workers.
    """
    workers = getattr(iterator, "_workers", None)
    if not workers or getattr(iterator, "_shutdown", True):
        return []
    iterator._shutdown = True
    if iterator._worker_pids_set:  # Otherwise the end of a worker would raise here.
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    if hasattr(iterator, "_pin_memory_thread"):
        iterator._pin_memory_thread_done_event.set()
    ended = connection.wait([worker.sentinel for worker in workers], wait_s)
    for worker in workers:
        if worker.sentinel in ended:  # The system closes a process's files before it says how the process ended.
            worker.join()
    signals = [-worker.exitcode for worker in workers if not worker.is_alive() and worker.exitcode < 0]
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()
    if getattr(loader, "_iterator", None) is iterator:  # The loader would reuse its persistent workers.
        loader._iterator = None
    return signals


def usable_cores() -> int:
    """Return the number of cores that this process may use. torchrun divides threads by this number.

    torch 2.13 has it as ``torch._utils.cpu_count``, which torch 2.11 lacks. Python 3.13 has ``os.process_cpu_count``.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_this_host(host: str) -> bool:
    """Return whether torch considers a name or address to be this machine, which then hosts the rendezvous.

    The public fallback is to compare the addresses of ``socket.getaddrinfo``, as this function does.

    Raises:
        OSError: If the name of this machine has no address.
    """
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    return _matches_machine_hostname(host)


def worker_processes(agent: Any) -> list[Any]:
    """Return the processes that an agent of torch.distributed.elastic started last.

    torch has no public function that returns all exit codes. The agent's result only has the code of the first failure.
    """
    context = getattr(agent._pcontext, "_pc", None)
    return [] if context is None else context.processes


def worker_exit_codes(agent: Any) -> dict[int, int | None]:
    """Return the exit code of each local rank of an agent, None while it runs; see :func:`worker_processes`."""
    scripts = getattr(agent._pcontext, "subprocess_handlers", {})
    return {rank: handler.proc.poll() for rank, handler in scripts.items()} or {
        rank: process.exitcode for rank, process in enumerate(worker_processes(agent))
    }


def logs_of(agent: Any) -> Any:
    """Return the object that chooses the files of an agent's workers. The public fallback is to keep it."""
    return agent._logs_specs


def limit_closing(agent: Any, timeout_s: int, before: Callable[[Any], None]) -> None:
    """Let an agent end its workers within ``timeout_s`` once one of them has failed, whenever it has failed.

    ``before(agent)`` is called first.

    The context of the agent's functions waits 30 seconds for them. Then the agent calls ``close`` without a timeout,
    which waits 30 seconds as well. torch has no public setting for these times; the fallback is to wait. The timeout of
    the agent's own shutdown, after a signal, stays.
    """
    # Weak references: a cycle would keep the log files of the workers open until the garbage collector comes.
    context, watching_agent = weakref.proxy(agent._pcontext), weakref.proxy(agent)
    close = type(agent._pcontext).close

    def limited(death_sig: signal.Signals | None = None, timeout: int = timeout_s) -> None:
        before(watching_agent)
        close(context, death_sig, timeout)

    agent._pcontext.close = limited
    if (finished := getattr(agent._pcontext, "_worker_finished_event", None)) is not None:
        # Workers wait for this event after their results, and setting it waits for ever for one that has been killed
        # there. From a thread, the agent continues, and finds the exit code of that worker.
        set_finished = finished.set
        finished.set = lambda: threading.Thread(target=set_finished, daemon=True).start()
    processes = getattr(agent._pcontext, "_pc", None)
    if processes is not None and hasattr(processes, "_join_procs_with_timeout"):
        join, functions = type(processes)._join_procs_with_timeout, weakref.proxy(processes)
        processes._join_procs_with_timeout = lambda timeout: join(functions, min(timeout, timeout_s))


@contextmanager
def with_agent_class(agent_class: type) -> Iterator[None]:
    """Let torch's launcher of scripts create an agent of this class; it has no setting for the class.

    The public fallback is a separate launcher with WorkerSpec, a rendezvous handler and the agent's ``run``.
    """
    from torch.distributed.launcher import api

    before = api.LocalElasticAgent
    api.LocalElasticAgent = agent_class  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        api.LocalElasticAgent = before  # type: ignore[misc]


def end_workers(agent: Any, signal_number: signal.Signals, timeout_s: int) -> None:
    """Send a signal to an agent's workers, and SIGKILL to the workers that still run after the timeout.

    torch 2.11 always waits 30 seconds. Later versions have ``shutdown_timeout``, the public fallback.
    """
    if agent._pcontext is not None:
        agent._pcontext.close(signal_number, timeout_s)


def error_files(agent: Any) -> dict[int, str]:
    """Return the error file of each local rank of an agent; see :func:`worker_processes`."""
    return {} if agent._pcontext is None else agent._pcontext.error_files

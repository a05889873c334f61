"""Worker processes of DataLoaders: which signals they ignore, and when they end.

A scheduler sends SIGTERM to every process of a run. The Trainer then finishes its step, for which it may need the next
batch, so the workers ignore the first signal while a Trainer runs. Otherwise a signal ends a worker at once, because
multiprocessing sends a signal to each worker when the program ends, and waits for the worker without a limit.
"""

__all__ = ["WorkerSignals", "loaded_batches", "workers_needed"]

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch import Tensor

from panther._process_settings import preserved_generators
from panther._torch import end_with_parent, kill_loader_workers
from panther.distributed.comm.ending import SIGNALS
from panther.errors import TrainingError

_MASKS_SIGNALS = hasattr(signal, "pthread_sigmask")  # not on Windows

_DEATH_S = 2.0

_needed: dict[int, Tensor] = {}
"""For each process id, memory that the process shares with its workers: 1 while a Trainer of the process runs."""


def _needed_here() -> Tensor:
    """Return the memory that this process shares with its workers. A forked process gets new memory."""
    if os.getpid() not in _needed:
        _needed.clear()
        _needed[os.getpid()] = torch.zeros(1, dtype=torch.uint8).share_memory_()
    return _needed[os.getpid()]


@contextmanager
def workers_needed() -> Iterator[None]:
    """Let workers of DataLoaders ignore the first signal within the block."""
    needed = _needed_here()
    needed.fill_(1)
    try:
        yield
    finally:
        needed.fill_(0)


class WorkerSignals:
    """A DataLoader's ``worker_init_fn``: the worker ignores the first signal while a Trainer runs, and ends with it."""

    def __init__(self, user_function: Any) -> None:
        self.user_function = user_function
        self.needed = _needed_here()
        self.ends_with_parent = True

    def starts_workers(self) -> None:
        """Note which process, and which of its threads, is about to start workers."""
        self.needed = _needed_here()
        # For Linux, the parent is the thread, and a thread may end before the loader does.
        self.ends_with_parent = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        """Set the handlers of signals in a worker."""
        for number in SIGNALS:
            signal.signal(number, self._receive)
        if _MASKS_SIGNALS:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.ends_with_parent and hasattr(signal, "SIGKILL"):  # not on Windows
            end_with_parent(signal.SIGKILL)  # it also ends while it loads a sample
        if self.user_function is not None:
            self.user_function(worker)

    def _receive(self, number: int, frame: Any) -> None:
        for ignored in SIGNALS:
            signal.signal(ignored, signal.SIG_DFL)
        if not self.needed.item():
            os.kill(os.getpid(), number)


@contextmanager
def _signals_blocked(loader: Any) -> Iterator[None]:
    """Block signals while a loader starts its workers.

    Workers inherit the blocked mask, so no signal reaches them before they can ignore it.
    """
    worker_signals = getattr(loader, "worker_init_fn", None)
    if isinstance(worker_signals, WorkerSignals):
        worker_signals.starts_workers()
    if not _MASKS_SIGNALS or not isinstance(worker_signals, WorkerSignals):
        yield
        return
    if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
        # A tracker that starts with the first worker would unblock the signals.
        resource_tracker.ensure_running()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextmanager
def loaded_batches(loader: Any) -> Iterator[Iterator[Any]]:
    """Yield an iterator over a loader, and end the loader's workers at once if the block raises.

    The traceback of the exception refers to the iterator, so its workers would live as long as the traceback. A worker
    that was killed raises TrainingError; torch's own errors differ, for example ConnectionResetError.
    """
    with preserved_generators(), _signals_blocked(loader):
        iterator = iter(loader)
    try:
        yield iterator
    except GeneratorExit:  # the consumer needs no more batches: the iterator is deleted, and ends them itself
        raise
    except BaseException as error:
        # A worker that dies closes its connections first.
        wait_s = _DEATH_S if isinstance(error, ConnectionError | EOFError | FileNotFoundError) else 0.0
        signals = kill_loader_workers(loader, iterator, wait_s)
        if signals and isinstance(error, Exception):
            name = signal.Signals(signals[0]).name
            raise TrainingError(
                f"a worker process of the DataLoader was ended by {name}; the system sends SIGKILL when memory runs "
                "out: use fewer workers, a smaller prefetch_factor or smaller samples"
            ) from error
        raise

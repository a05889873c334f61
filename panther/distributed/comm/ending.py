"""End this process, wherever it is, when its launcher has died or a second signal has come.

A handler of Python runs only between two instructions of the main thread. The main thread of a process that waits in a
collective operation, a loader or a file system reaches no next instruction, and a handler that finishes a step would
wait for a rank that hangs. So a thread counts the signals and watches the parent. Once the grace period has begun, a
timer in C ends the process and shows the stacks of all its threads.

A process that ends by an exception records it in the error file from which torch's launcher reads it, in the format
that ``torch.distributed.elastic.multiprocessing.errors.record`` writes. This decorator is not used, because it has to
wrap the main function of a script, and most scripts have none.
"""

__all__ = [
    "DEFAULT_GRACE_PERIOD_S", "GRACE_PERIOD_VARIABLE", "SIGNALS", "STACKS_SIGNAL", "catches", "check_parent",
    "grace_period", "is_free", "record_failure", "record_uncaught_exceptions", "show_stacks_on_request",
    "signals_counted", "start_limited", "watch_parent",
]  # fmt: skip

import faulthandler
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from panther.errors import DistributedError
from panther.files import write_json

DEFAULT_GRACE_PERIOD_S = 15.0
GRACE_PERIOD_VARIABLE = "PANTHER_GRACE_PERIOD_S"
"""Variable of the environment by which a launcher passes its grace period to its workers."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that ask a run to save and end. Slurm sends SIGUSR1 as a warning if its options say so. Windows has only the
first two signals."""

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
"""Signal by which a launcher lets its workers show their stacks."""

_PERIOD_S = 1.0
_SAME_REQUEST_S = 2.0
"""A signal so soon after the first one repeats it: a scheduler signals each process, and the launcher does as well."""
_STDERR = 2

_parent = os.getppid()
_grace_period_s: float | None = None
_lock = threading.Lock()
_parent_thread: threading.Thread | None = None
_ends = False
"""Whether the grace period of this process has begun."""
_records_exceptions = False
_writer: int | None = None
"""The end of the pipe to which Python writes the numbers of signals within ``signals_counted``."""


def _forget_parent() -> None:
    """Reset the state in a forked process, which has a different parent and none of the threads."""
    global _parent, _parent_thread, _ends, _writer
    _parent, _parent_thread, _ends = os.getppid(), None, False
    if _writer is not None:  # signals of this process must not count as signals of its parent
        signal.set_wakeup_fd(-1)
        os.close(_writer)
        _writer = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


def grace_period() -> float:
    """Return the seconds that this process has to end: set by a Trainer, or else by its launcher, or else 15."""
    if _grace_period_s is not None:
        return _grace_period_s
    with suppress(ValueError):
        return float(os.environ.get(GRACE_PERIOD_VARIABLE, ""))
    return DEFAULT_GRACE_PERIOD_S


def is_free(number: int) -> bool:
    """Return whether this process neither catches nor ignores a signal; ``nohup`` ignores SIGHUP, for example."""
    # Python does not know handlers in C, such as the handlers of faulthandler.register.
    return signal.getsignal(number) is signal.SIG_DFL and not catches("self", number, otherwise=False)


def catches(pid: int | str, number: int, otherwise: bool) -> bool:
    """Return whether a process has a handler for a signal, or ``otherwise`` if the system does not report it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return otherwise
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def has_launcher() -> bool:
    """Return whether a launcher or multiprocessing started this process, so that it must not outlive its parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process() is not None


def show_stacks_on_request() -> None:
    """Show the stacks of this process at ``STACKS_SIGNAL``, wherever it waits, unless the program handles it."""
    if STACKS_SIGNAL is not None and is_free(STACKS_SIGNAL):
        faulthandler.register(STACKS_SIGNAL, file=_STDERR)


def check_parent() -> None:
    """Raise DistributedError if the launcher of this process has ended. Loops that wait for other ranks call it."""
    if has_launcher() and os.getppid() != _parent:
        raise DistributedError(f"the launcher of this process (process {_parent}) has ended: start the run again")


def watch_parent() -> None:
    """Let this process end within the grace period once its launcher has died; do nothing without a launcher."""
    global _parent_thread
    if has_launcher() and _parent_thread is None:
        _parent_thread = threading.Thread(target=_wait_for_parent, name="panther-parent", daemon=True)
        _parent_thread.start()


def _wait_for_parent() -> None:
    while os.getppid() == _parent:
        time.sleep(_PERIOD_S)
    begin_to_end("its launcher has died")
    os.kill(os.getpid(), signal.SIGTERM)  # Linux may have sent it already, and other systems do not send it


def begin_to_end(reason: str) -> None:
    """Let this process end after the grace period, and show the stacks of its threads."""
    global _ends
    with _lock:
        if _ends:
            return
        _ends = True
    seconds = grace_period()
    text = f"panther: process {os.getpid()} has {seconds:g} s to save and end, because {reason}\n"
    with suppress(OSError):  # the reader of its output may have ended
        os.write(_STDERR, text.encode())
    with suppress(OSError, RuntimeError, ValueError):
        # A thread in C, which needs no lock of the interpreter, ends the process with exit code 1.
        faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


@contextmanager
def start_limited(limit_s: float) -> Iterator[None]:
    """End this process if the block has not ended after ``limit_s``; do nothing without a launcher.

    If the process that hosts the store is stopped, torch's store waits without a limit, in code that no exception
    reaches.
    """
    timer = threading.Timer(limit_s, _give_up, [limit_s])
    timer.daemon = True
    if "TORCHELASTIC_RUN_ID" in os.environ:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(limit_s: float) -> None:
    text = f"the store in which ranks meet has not answered for {limit_s:g} s: the process that hosts it may be stopped"
    record_failure(DistributedError(text))
    with suppress(OSError):
        os.write(_STDERR, f"panther: {text}\n".encode())
        faulthandler.dump_traceback(file=_STDERR)
    os._exit(1)


def _continue() -> None:
    """Cancel the end of this process, because its run has ended in time and the program may continue."""
    global _ends
    with _lock:
        if _ends and os.getppid() == _parent:
            _ends = False
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def signals_counted(grace_period_s: float | None) -> Iterator[None]:
    """Begin the grace period, by default that of the launcher, at the second signal that comes within the block.

    It only works in the main thread, and not if the program reads signals from a descriptor itself, as asyncio does.
    """
    global _grace_period_s, _writer
    previous = _grace_period_s, _writer
    _grace_period_s = grace_period_s
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()
    thread = threading.Thread(target=_count, args=(reader, ended), name="panther-signals", daemon=True)
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if descriptor != -1:
        signal.set_wakeup_fd(descriptor)
    else:
        _writer = writer
    thread.start()
    try:
        yield
    finally:
        if descriptor == -1 and _writer == writer:
            signal.set_wakeup_fd(-1)
        ended.set()
        # Only a byte wakes the thread for certain, because forked processes may hold the writing end of the pipe open.
        with suppress(OSError):  # The pipe is full, or this is a forked process, which has no such thread.
            os.write(writer, b"\0")
        thread.join()
        with suppress(OSError):
            os.close(writer)
        os.close(reader)
        _grace_period_s, _writer = previous
        _continue()


def _count(reader: int, ended: threading.Event) -> None:
    """Begin the grace period at the second signal. Python writes the number of each to the pipe ``reader`` at once."""
    first: float | None = None
    while not ended.is_set():
        select.select([reader], [], [])
        numbers = [number for number in os.read(reader, 64) if number in SIGNALS]
        if not numbers:
            continue
        now = time.monotonic()
        if first is None:
            first = now
        elif now - first > _SAME_REQUEST_S:
            begin_to_end(f"{signal.Signals(numbers[-1]).name} has come after an earlier signal")


def record_failure(error: BaseException) -> None:
    """Write the error file of this rank; do nothing in a process that was not started by a launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():  # an inner handler, such as torch's record, has written the file
        return
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with suppress(OSError):  # the launcher still has the exit code
        # Written atomically, because the launcher may end this process, and torch fails on an incomplete file.
        write_json(path, {"message": message}, indent=None)


def record_uncaught_exceptions(explain: Callable[[BaseException], BaseException | None] = lambda error: None) -> None:
    """Call :func:`record_failure` for uncaught exceptions, or for what ``explain`` returns in their place."""
    global _records_exceptions
    if _records_exceptions:
        return
    _records_exceptions, show = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (explained := explain(error)) is not None:
            explained.__cause__ = error
            kind, error, trace = type(explained), explained, None
        record_failure(error)
        show(kind, error, trace)

    sys.excepthook = hook

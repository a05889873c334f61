"""Waits with limits that a busy machine does not reach. Tests wait through this module alone.

A limit counts seconds on a clock that is slower the more threads want to run for each core. Work on a busy machine thus
gets the time that it needs, up to ``LONGEST`` times its limit. On an idle machine a deadlock ends after its limit.
"""

import contextlib
import faulthandler
import glob
import os
import re
import signal
import subprocess
import tempfile
import time

import pytest_timeout

LONGEST = 10
PERIOD_S = 0.5
_TESTS = os.getpid()
_STACKS_SIGNAL = signal.SIGUSR2

# Processes that are forked from this one inherit the handler and the file, and so can show their stacks.
_stacks_file, _stacks_path = tempfile.mkstemp()
os.unlink(_stacks_path)
faulthandler.register(_STACKS_SIGNAL, file=_stacks_file)


class WaitError(AssertionError):
    """Something did not happen within the limit of a wait."""


class Deadline:
    """The moment at which a wait of ``limit_s`` seconds ends, on the clock that the module describes."""

    def __init__(self, limit_s):
        self.limit_s, self._counted_s, self._sampled = limit_s, 0.0, time.monotonic()

    def passed(self):
        """Return whether the wait has to end; to be called at least every ``PERIOD_S``."""
        now = time.monotonic()
        # If a longer time has passed, this process was starved, or the machine was suspended.
        self._counted_s += min(now - self._sampled, 2 * PERIOD_S) / slowdown()
        self._sampled = now
        return self._counted_s >= self.limit_s


def descendants(root=_TESTS):
    """Return the ids of a process and of all processes below it."""
    children = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path, "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.split("/")[2]))
    pids = [root]
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def slowdown(minutes=1):
    """Return by how much other programs slow a thread down: the threads that want to run for each core, 1 to LONGEST.

    Args:
        minutes: 1 for the present, 5 for the average of five minutes if that is more.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    loads = [_runnable_threads(), *os.getloadavg()[: 1 if minutes == 1 else 2]]
    return min(LONGEST, max(1.0, max(loads) / cores))


def _runnable_threads():
    """Return how many threads of the machine run or could run now; 0 where the system does not tell."""
    try:
        with open("/proc/loadavg") as file:
            return int(file.read().split()[3].partition("/")[0])
    except FileNotFoundError:
        return 0


def scaled(seconds):
    """Return seconds for a limit of the library itself, which has to expire, and not before all other ranks came."""
    return float(round(seconds * slowdown(), 1))


def until(condition, what, limit_s=120, *, period_s=0.02):
    """Wait until ``condition()`` is true.

    Args:
        condition: A function that is called once every ``period_s``.
        what: What did not happen, for the error: words, or a function that returns them.
        limit_s: The limit.
    """
    deadline = Deadline(limit_s)
    while not condition():
        if deadline.passed():
            raise WaitError(f"after {limit_s:g} s: {what() if callable(what) else what}")
        time.sleep(period_s)


def run(command, limit_s=300, *, check=False, **options):
    """Run a command as ``subprocess.run`` does, with its output as text; at the limit, end it and its children."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with subprocess.Popen(list(map(str, command)), **options) as process:
        try:
            out, err = communicate(process, limit_s)
        except BaseException:
            for pid in descendants(process.pid) if process.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        assert done.returncode == 0, f"{done.args} ended with {done.returncode}\n{out or ''}{err or ''}"
    return done


def communicate(process, limit_s=300):
    """Return all that a process of ``subprocess`` writes, after its end."""
    deadline = Deadline(limit_s)
    while True:
        try:
            return process.communicate(timeout=PERIOD_S)
        except subprocess.TimeoutExpired as expired:
            if deadline.passed():
                parts = (part for part in (expired.output, expired.stderr) if part)
                written = "".join(part.decode(errors="replace") if isinstance(part, bytes) else part for part in parts)
                raise WaitError(f"still running after {limit_s:g} s: {process.args}\n{written}") from None


def join(pids, limit_s=120):
    """Wait for forked processes, kill those that are left at the limit, and return the exit codes.

    Raises:
        WaitError: If some have not ended at the limit, with their indices in ``pids`` and their stacks.
    """
    codes = {}

    def all_have_ended():
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        return len(codes) == len(pids)

    def still_running():
        parts = (
            f"process {number} is still running\n{stack_of(pid)}" for number, pid in enumerate(pids) if pid not in codes
        )
        return "\n".join(parts)

    try:
        until(all_have_ended, still_running, limit_s)
    finally:
        for pid in set(pids) - codes.keys():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes[pid] for pid in pids]


def stack_of(pid):
    """Return the Python stacks of all threads of a process, without pytest's frames, and what Python does not show.

    The empty string if the process was not forked from this one, or has replaced itself by another program.
    """
    if not _catches(pid):
        return ""
    begin = seen = os.fstat(_stacks_file).st_size
    os.kill(pid, _STACKS_SIGNAL)
    unchanged = Deadline(2)  # for a process that starts late to write
    while not unchanged.passed():
        time.sleep(0.02)
        size = os.fstat(_stacks_file).st_size
        if size > seen:
            seen, unchanged = size, Deadline(0.2)
    stacks = os.pread(_stacks_file, seen - begin, begin).decode(errors="replace")
    lines = [line for line in stacks.splitlines(keepends=True) if not re.search("[/_]pytest/|/pluggy/", line)]
    return "".join([*lines, *_threads(pid), *_waiting_bytes(pid)])


def _threads(pid):
    """Yield the name of each thread of a process, and what it waits for in the kernel."""
    for folder in glob.glob(f"/proc/{pid}/task/*"):
        with contextlib.suppress(OSError), open(f"{folder}/comm") as name, open(f"{folder}/wchan") as place:
            yield f"  thread {name.read().strip()}: {place.read()}\n"


def _waiting_bytes(pid):
    """Yield the TCP connections of a process with bytes that it has not read, or that the other end has not taken."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/net/tcp") as connections:
        own = {os.readlink(path) for path in glob.glob(f"/proc/{pid}/fd/*") if os.path.islink(path)}
        for fields in map(str.split, [*connections][1:]):
            unsent, unread = (int(queue, 16) for queue in fields[4].split(":"))
            if f"socket:[{fields[9]}]" in own and unsent + unread:
                yield f"  connection {fields[1]} to {fields[2]}: {unsent} bytes unsent, {unread} unread\n"


def _catches(pid):
    """Return whether a process would answer the signal for stacks; others would be ended by it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = re.search(r"^SigCgt:\s*(\w+)", file.read(), re.MULTILINE)
    except OSError:
        return False
    return bool(int(caught[1], 16) >> (_STACKS_SIGNAL - 1) & 1)


def start_test_limit(item, settings):
    """Set the limit of pytest-timeout for a test: as much longer as other programs slow the test down.

    The processes that the test has forked show their stacks at the limit.
    """
    begun = time.monotonic()

    def on_alarm(number, frame):
        __tracebackhide__ = True
        remaining_s = begun + settings.timeout * slowdown(minutes=5) - time.monotonic()
        if remaining_s > 0:
            signal.setitimer(signal.ITIMER_REAL, remaining_s)
            return
        for pid in descendants()[1:]:
            if stack := stack_of(pid):
                item.config.get_terminal_writer().write(f"\nprocess {pid}, forked by {item.nodeid}\n{stack}")
        pytest_timeout.timeout_sigalrm(item, settings)

    def cancel():
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)

"""Waits with limits that a busy machine does not reach. Tests wait through this module alone.

A limit counts seconds on a clock that knows what the processes of the tests do. The clock runs while all of them sleep.
While one of them can run, it counts the processor time of the thread that gets most, so it nearly stops while the
processes wait for a processor or a disk. A deadlock therefore ends after its limit, an endless loop after its limit of
processor time, and work on a busy machine gets the time that it needs, up to ``LONGEST`` times its limit.
"""

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import tempfile
import threading
import time

import pytest_timeout

LONGEST = 10
PERIOD_S = 0.5  # Looking at all threads of a pool of four ranks takes 5 ms.
EVERY_PROCESS = 1  # as ``root``: for programs that detach themselves from the tests
_TESTS = os.getpid()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STACKS_SIGNAL = signal.SIGUSR2

# Processes that are forked from this one inherit the handler and the file, and so can show their stacks.
_stacks_file, _stacks_path = tempfile.mkstemp()
os.unlink(_stacks_path)
faulthandler.register(_STACKS_SIGNAL, file=_stacks_file)


class WaitError(AssertionError):
    """Something did not happen within the limit of a wait."""


class Deadline:
    """The moment at which a wait ends, on the clock that the module describes.

    Args:
        limit_s: Seconds on this clock.
        root: The process whose descendants, itself included, are waited for; by default the process of pytest.
    """

    def __init__(self, limit_s, root=_TESTS):
        self.limit_s, self._root = limit_s, root
        self._counted_s, self._processor_s = 0.0, {}
        self._begun = self._sampled = time.monotonic()

    def passed(self):
        """Return whether the wait has to end; to be called at least every ``PERIOD_S``."""
        now = time.monotonic()
        elapsed = now - self._sampled
        if elapsed >= min(PERIOD_S, self.limit_s / 4):
            # What is more was not seen: this process itself was starved, or the machine was suspended.
            self._counted_s += self._counted(min(elapsed, 2 * PERIOD_S))
            self._sampled = now
        return self._counted_s >= self.limit_s or now - self._begun >= LONGEST * self.limit_s

    def _counted(self, elapsed):
        threads = _threads(self._root)
        if threads is None:
            return elapsed / slowdown()
        gained = (seconds - self._processor_s.get(thread, seconds) for thread, (_, seconds) in threads.items())
        progress = max(gained, default=0.0)
        self._processor_s = {thread: seconds for thread, (_, seconds) in threads.items()}
        runnable = any(state in "RD" for state, _ in threads.values())
        return min(elapsed, progress) if runnable else elapsed


def _threads(root):
    """Return the state and the processor seconds of each thread below ``root`` except for the caller's, by its id.

    None where the system does not tell.
    """
    if not os.path.exists("/proc/self/stat"):
        return None
    threads = {}
    for pid in descendants(root):
        try:
            thread_ids = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread_id in thread_ids:
            if fields := _stat_fields(f"/proc/{pid}/task/{thread_id}/stat"):
                threads[int(thread_id)] = (fields[0].decode(), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    threads.pop(threading.get_native_id(), None)
    return threads


def _stat_fields(path):
    """Return the fields that follow the name of the program, from the state on; None if the process has gone."""
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].split() or None
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(root=_TESTS):
    """Return the ids of a process and of all processes below it."""
    children = {}
    for name in os.listdir("/proc") if os.path.exists("/proc/self/stat") else ():
        if name.isdigit() and (fields := _stat_fields(f"/proc/{name}/stat")):
            children.setdefault(int(fields[1]), []).append(int(name))
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


def until(condition, what, limit_s=120, *, period_s=0.02, root=_TESTS):
    """Wait until ``condition()`` is true.

    Args:
        condition: A function that is called once every ``period_s``.
        what: What did not happen, for the error: words, or a function that returns them.
        limit_s: The limit.
        root: As for ``Deadline``.
    """
    deadline = Deadline(limit_s, root)
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
    """Return the Python stacks of all threads of a process, without pytest's frames.

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
    return "".join(line for line in stacks.splitlines(keepends=True) if not re.search("[/_]pytest/|/pluggy/", line))


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

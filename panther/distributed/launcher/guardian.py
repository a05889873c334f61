"""A process beside a launcher that ends the launcher's workers if the launcher itself is killed.

A worker that hangs, is stopped, or still imports cannot notice that its launcher has died. The guardian is a Python
process in a separate session that imports only the standard library. Once its parent, the launcher, has died, it asks
the workers that are still alive to save and end, by SIGTERM, ends the remaining workers after the grace period by
SIGKILL, and removes the launcher's temporary folders. It needs /proc, as Linux has it.
"""

__all__ = ["Guardian"]

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

_POLL_S = 0.1
_Workers = list[tuple[int, str]]  # the number and start time of each: a later process may have the same number


class Guardian:
    """Start and stop the guardian, in the launcher. If the process cannot start, nothing is guarded.

    Args:
        grace_period_s: Seconds that workers have to save and end once the launcher has died.
        folders: Temporary folders of the launcher.
    """

    def __init__(self, grace_period_s: float, folders: Sequence[str] = ()) -> None:
        self._grace_period_s, self._folders = grace_period_s, folders
        self._workers: _Workers = []
        self._process: subprocess.Popen[bytes] | None = None

    def guard(self, pids: Collection[int]) -> None:
        """Guard these workers in place of earlier workers, which have ended."""
        self._stop()
        self._workers = [(pid, started) for pid in pids if (started := _start_time(pid))]
        arguments = [os.getpid(), self._workers, self._grace_period_s, list(self._folders)]
        with contextlib.suppress(OSError):  # without a guardian, a worker that hangs outlives a killed launcher
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that a signal to the launcher's process group does not end it
            )

    def end(self) -> None:
        """Stop the guardian, because the launcher ends by itself, and end workers that are left."""
        self._stop()
        _end(self._workers, self._grace_period_s)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _main(launcher: int, workers: _Workers, grace_period_s: float, folders: Sequence[str]) -> None:
    """Wait for the death of the launcher, and clean up after it."""
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    _end(workers, grace_period_s)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end(workers: _Workers, grace_period_s: float) -> None:
    _send(workers, signal.SIGTERM)
    deadline = time.monotonic() + grace_period_s
    while _alive(workers) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    _send(workers, signal.SIGKILL)  # a stopped process reacts to no other signal


def _start_time(pid: int) -> str:
    """Return the start time of a process; "" if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]


def _alive(workers: _Workers) -> list[int]:
    return [pid for pid, started in workers if _start_time(pid) == started]


def _send(workers: _Workers, number: int) -> None:
    """Send a signal to the workers that are alive, and to the process groups that they lead."""
    for pid in _alive(workers):
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))

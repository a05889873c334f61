"""A process beside a launcher that ends the launcher's workers if the launcher itself is killed.

A worker that hangs, is stopped, or still imports cannot notice that its launcher has died. The guardian is a Python
process in a separate session that imports only the standard library. It reads the workers and folders to guard from its
standard input, a pipe that the launcher holds open. At the end of the input, the guardian asks the workers that are
still alive to save and end, by SIGTERM, and ends the remaining workers after the grace period by SIGKILL. If the
launcher has not announced its end, it was killed, and the guardian removes its temporary folders.
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
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

_POLL_S = 0.1
_guardians: "weakref.WeakSet[Guardian]" = weakref.WeakSet()


class Guardian:
    """Start the guardian and tell it what to guard, in the launcher. If the process cannot start, nothing is guarded.

    Args:
        grace_period_s: Seconds that workers have to save and end once the launcher has died.
        folders: Temporary folders of the launcher.
    """

    def __init__(self, grace_period_s: float, folders: Sequence[str] = ()) -> None:
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(OSError):  # without a guardian, a worker that hangs outlives a killed launcher
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that a signal to the launcher's process group does not end it
                text=True,
            )
        _guardians.add(self)
        self._tell("limits", [grace_period_s, list(folders)])

    def guard(self, pids: Collection[int]) -> None:
        """Guard these workers in place of earlier workers."""
        self._tell("workers", [[pid, _start_time(pid)] for pid in pids])

    def end(self) -> None:
        """Announce that the launcher ends by itself. The guardian still ends workers that are left."""
        self._tell("end", True)
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.wait()

    def forget(self) -> None:
        """Close the pipe in a forked process, whose copy would hide the death of the launcher."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.returncode = 0  # not a child of this process

    def _tell(self, name: str, value: Any) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # another process has ended the guardian
                self._process.stdin.write(f"{json.dumps([name, value])}\n")
                self._process.stdin.flush()


def _forget_guardians() -> None:
    for guardian in list(_guardians):
        guardian.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_guardians)


def _start_time(pid: int) -> str:
    """Return the start time of a process, which differs for a later process of the same number; "" if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _main() -> None:
    """Wait for the end of the input, and clean up after the launcher."""
    state: dict[str, Any] = {"limits": [0.0, []], "workers": [], "end": False}
    for line in sys.stdin:
        with contextlib.suppress(ValueError):  # the launcher was killed while it wrote the line
            name, value = json.loads(line)
            state[name] = value
    grace_period_s, folders = state["limits"]
    workers = [(pid, started) for pid, started in state["workers"] if started]
    if state["end"]:
        folders = []
    _send(workers, signal.SIGTERM)
    deadline = time.monotonic() + grace_period_s
    while _alive(workers) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    # A stopped process reacts to no other signal, and children of a worker may outlive the worker.
    if workers:
        _send(workers, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _alive(workers: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(pid, started) for pid, started in workers if _start_time(pid) == started and not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _send(workers: Sequence[tuple[int, str]], number: int) -> None:
    """Send a signal to the workers that are alive, and to the process groups that they lead."""
    for pid, _ in _alive(workers):
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


if __name__ == "__main__":
    _main()

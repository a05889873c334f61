"""The output of the workers of a run, and how they failed, by their exit codes, their error files and their output."""

__all__ = ["Failure", "RankLogs", "describe", "describe_early_end", "explain", "new_folder"]

import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

_LOST = re.compile(  # errors of a rank that the end of another rank causes
    "Connection (was likely )?(closed|reset)|Broken pipe|connection was closed|failed to recv|remote process exited"
    "|lost the store|see whether one of them has ended|checked in and then ended or stalled|reported no error"
    "|Timed out waiting|Watchdog caught collective operation timeout|EnforceNotMet"
)
_RAISED, _LEFT, _LOST_ANOTHER = 1, 2, 3  # kinds of failures, the most probable cause first; a signal is 0
_LAST_LINES = 20
_POLL_S = 0.1
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """How a worker failed; in the order of ``order``, the first failure is the probable cause of all failures."""

    rank: int
    order: tuple[int, float]
    text: str
    """The part of a sentence that follows the rank."""
    details: str = ""
    """Traceback of the worker, or the last lines of its output."""
    log: Path | None = None
    """File with the standard error of the worker."""


_ABORTED = (
    ": a library aborted the process, as gloo does where the ranks call a collective with different sizes, under fsdp "
    "for example where a parameter or a block takes part in the step on some ranks only; "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL names such a call, except under ddp"
)


def describe(rank: int, exit_code: int | None, error_file: str, log: str = "", stopped: bool = False) -> Failure | None:
    """Describe how a worker ended; return None if the launcher ended it (``stopped``), or it is still alive.

    ``log`` contains the standard error of the worker.
    """
    path = Path(log) if log else None
    if error := recorded(error_file):
        summary, traceback = error
        order, text = _RAISED, f"raised {summary}"
        if _LOST.search(summary):
            order, text = _LOST_ANOTHER, f"{_waited_or_lost(summary)} another rank: {summary.splitlines()[0]}"
        return Failure(rank, (order, Path(error_file).stat().st_mtime), text, traceback, path)
    if exit_code is None or (stopped and exit_code in (-signal.SIGTERM, -signal.SIGKILL)):
        return None
    details, written, without = "", 0.0, " and no traceback"
    if path is not None and path.is_file():
        output = path.read_text(errors="replace").rstrip()
        details = "\n".join(output.splitlines()[-_LAST_LINES:])
        written = path.stat().st_mtime if details else 0.0
        if "Traceback (most recent call last):" in output:  # an exception before init, which would record it
            without = ""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
        text = f"was ended by {name} (exit code {exit_code})"
        # NCCL's watchdog and gloo's threads abort a process that waits for a rank that is late or gone.
        if exit_code == -signal.SIGABRT and _LOST.search(details):
            return Failure(
                rank, (_LOST_ANOTHER, written), f"{_waited_or_lost(details)} another rank and {text}", details
            )
        return Failure(rank, (0, 0.0), text + _ABORTED * (exit_code == -signal.SIGABRT), details, path)
    if exit_code == 0:  # a function with a result waits until the launcher has read it
        return Failure(rank, (0, 0.0), "left with exit code 0 before its function returned, as by os._exit")
    order = _LOST_ANOTHER if _LOST.search(details) else _RAISED
    return Failure(rank, (order, written), f"left with exit code {exit_code}{without}", details, path)


def describe_early_end(rank: int) -> Failure:
    """Describe a worker of a script that ended with exit code 0 before another worker failed."""
    text = "ended with exit code 0 while other ranks still ran, as by sys.exit(0)"
    return Failure(rank, (_LEFT, 0.0), text)


def _waited_or_lost(message: str) -> str:
    return "waited for" if "did not take part" in message or "imed out" in message else "lost its connection to"


def recorded(error_file: str | Path) -> tuple[str, str] | None:
    """Return the message and the traceback that a worker recorded, or None if it recorded nothing."""
    try:
        message: Any = json.loads(Path(error_file).read_text())["message"]
    except (OSError, ValueError):  # the file is missing, or torch's own handler wrote only a part of it
        return None
    if isinstance(message, str):  # a different error handler than torch's wrote it
        return message, ""
    return message["message"], message["extraInfo"]["py_callstack"]


def explain(failures: Sequence[Failure], world_size: int | None, attempts: int, folder: Path | None = None) -> str:
    """Return all failures as text, the probable cause first and its traceback last."""
    if not failures:
        return "the processes failed, and none says why: see the launchers of the other nodes"
    failures = sorted(failures, key=lambda failure: failure.order)
    first = failures[0]
    of = "" if world_size is None else f" of {world_size}"
    last = f", in the last of {attempts} attempts" if attempts > 1 else ""
    lines = [f"rank {first.rank}{of} {first.text}{last}; the other ranks were ended"]
    lines += [f"rank {other.rank}{of} {other.text}" for other in failures[1:]]
    lines += [] if folder is None else [f"What every rank wrote is in {folder}"]
    detailed = next((failure for failure in failures if failure.details), None)
    if detailed is not None:
        kind = "Traceback" if "(most recent call last):" in detailed.details else "Last lines"
        source = "" if detailed.log is None else f" ({detailed.log})"
        lines += ["", f"{kind} of rank {detailed.rank}{source}:", detailed.details.rstrip()]
    return "\n".join(lines)


class RankLogs(LogsSpecs):
    """Write the output of each rank to ``FOLDER/attempt-A/rank-R.out`` and ``.err``, and show the output of rank 0.

    torch calls :meth:`reify` before each attempt, so that this is also where restarts are logged.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = self._attempt_folder = folder
        self.attempts, self.world_size = 0, 0
        self.failures: list[Failure] = []
        """How the ranks of the last attempt failed."""
        self.destination = LogsDest()
        self._done, self._thread = threading.Event(), threading.Thread()

    @property
    def root_log_dir(self) -> str:
        """Return the folder of the run."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files of an attempt."""
        self.stop()
        attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
        if self.attempts:
            cause = min(self.failures, key=lambda failure: failure.order, default=None)
            reason = "" if cause is None else f" after rank {cause.rank} {cause.text.splitlines()[0]}"
            self.failures = []
            max_restarts = envs[0]["TORCHELASTIC_MAX_RESTARTS"]
            _LOGGER.warning("all processes start again%s (restart %s of %s)", reason, attempt, max_restarts)
        self.attempts += 1
        self.world_size = int(envs[0]["WORLD_SIZE"])
        # A node that joins or leaves starts another attempt of the same number, which needs a new folder.
        self._attempt_folder = new_folder(self.folder / f"attempt-{attempt}")
        self.destination = destination = LogsDest()
        shown_files: list[tuple[Path, TextIO]] = []
        for local_rank, env in envs.items():
            stem = self._attempt_folder / f"rank-{env['RANK']}"
            destination.stdouts[local_rank], destination.stderrs[local_rank] = f"{stem}.out", f"{stem}.err"
            destination.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = f"{stem}.error.json"
            if env["RANK"] == "0":
                shown_files = [(Path(f"{stem}.out"), sys.stdout), (Path(f"{stem}.err"), sys.stderr)]
        self._done = threading.Event()
        self._thread = threading.Thread(target=_tail, args=(shown_files, self._done), name="panther-tail", daemon=True)
        self._thread.start()
        return destination

    def stop(self) -> None:
        """Show the rest of the output, and end the thread."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()


def new_folder(path: Path) -> Path:
    """Create a folder, with a number at the end of its name if the name exists already."""
    folder, number = path, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not path.parent.is_dir():
                raise
        number += 1
        folder = path.with_name(f"{path.name}-{number}")


def _tail(files: list[tuple[Path, TextIO]], end: threading.Event) -> None:
    """Show files while they grow, in complete lines; torch's TailLog turns a progress bar into a line per update."""
    offsets = dict.fromkeys(files, 0)
    while True:
        last = end.is_set()
        for path, stream in files:
            data = b""
            if path.exists():
                with path.open("rb") as file:
                    file.seek(offsets[path, stream])
                    data = file.read()
            if not last:  # a progress bar ends its line with a carriage return
                data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            offsets[path, stream] += len(data)
            with suppress(OSError, ValueError):  # the terminal is closed, and the files have the output
                stream.write(data.decode(errors="replace"))
                stream.flush()
        if last:
            return
        end.wait(_POLL_S)

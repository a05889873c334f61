"""Logs of the ranks of a script: a file for each rank and stream. The output of rank 0 is shown as well."""

__all__ = ["RankLogs", "new_folder"]

import logging
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from panther.distributed.launcher._failures import Failure

_POLL_S = 0.1
_LOGGER = logging.getLogger(__name__)


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

"""What the workers of a launched script write: a file for each rank and stream, some of it shown on the terminal."""

__all__ = ["RankLogs", "Tail", "last_lines", "last_traceback", "new_folder"]

import itertools
import re
import threading
import time
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

_POLL_S = 0.1
_HEADER = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?")  # which torch puts before the lines of a process that has joined a group
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def new_folder(root: Path, name: str) -> Path:
    """Make a folder for this run that no other run has."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in itertools.chain([""], (f"-{count}" for count in itertools.count(2))):
        folder = root / f"{stem}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if folder.parent.is_dir():
                continue
            raise
        return folder
    raise AssertionError


class RankLogs(LogsSpecs):
    """Sends every worker's output to ``FOLDER/attempt-A/rank-R.out`` and ``.err``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder of the run."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files of an attempt; a membership change repeats one, in a folder of its own."""
        attempt = f"attempt-{envs[0]['TORCHELASTIC_RESTART_COUNT']}"
        folder = self._folder / attempt
        for count in itertools.count(2):
            if not folder.exists():
                break
            folder = self._folder / f"{attempt}-{count}"
        folder.mkdir(parents=True)
        destination = LogsDest()
        for local_rank, env in envs.items():
            stem = folder / f"rank-{env['RANK']}"
            destination.stdouts[local_rank] = f"{stem}.out"
            destination.stderrs[local_rank] = f"{stem}.err"
            destination.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = f"{stem}.error.json"
        return destination


class Tail:
    """Shows files on the terminal while they grow, in whole lines.

    A line that is not ended yet waits, unless a progress bar rewrites it (it then ends in a carriage return).
    """

    def __init__(self, files: list[tuple[str, Path, TextIO]]) -> None:
        """Take prefix, file and where to show it."""
        self._files = files
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="panther-tail", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show the rest and end."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        offsets = [0] * len(self._files)
        while True:
            last = self._done.is_set()
            for place, (prefix, path, out) in enumerate(self._files):
                offsets[place] = self._show(prefix, path, out, offsets[place], last)
            if last:
                return
            self._done.wait(_POLL_S)

    @staticmethod
    def _show(prefix: str, path: Path, out: TextIO, offset: int, last: bool) -> int:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except OSError:  # not there yet
            return offset
        if not last:
            data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
        if data:
            text = data.decode(errors="replace")
            if prefix:
                text = "".join(prefix + line for line in text.splitlines(keepends=True))
            try:
                out.write(text)
                out.flush()
            except (OSError, ValueError):  # nobody reads any more; the files have it all
                pass
        return offset + len(data)


def last_traceback(text: str) -> str:
    r"""The last traceback in ``text``, with the exceptions it was raised from and all that follows; "" if none.

    Example:
        >>> print(last_traceback("x\nTraceback (most recent call last):\n  File ...\nValueError: no\n"))
        Traceback (most recent call last):
          File ...
        ValueError: no
    """
    lines = [_RANK.sub("", line) for line in text.splitlines()]
    starts = [
        number
        for number, line in enumerate(lines)
        if line.endswith(_HEADER) and not lines[number - 1].startswith("Exception ignored ")
    ]
    if not starts:
        return ""
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = [line for line in lines[earlier:start] if line.strip()]
        if between[-1].strip() not in _CHAINED and not lines[start].startswith(" "):
            break
        start = earlier
    return "\n".join(lines[start:])


def last_lines(text: str, count: int = 20) -> str:
    """The last lines of ``text``."""
    return "\n".join(text.rstrip().splitlines()[-count:])

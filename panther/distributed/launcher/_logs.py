"""Logs of the ranks of a script: a file for each rank and stream, some of them also shown on the terminal."""

__all__ = ["RankLogs"]

import itertools
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from panther import errors
from panther.distributed.launcher._failures import recorded
from panther.errors import ConfigError, PantherError

_POLL_S = 0.1
_LOGGER = logging.getLogger(__name__)
# Errors of bad input, which a restart cannot fix; the other errors of panther.errors may not recur.
_BAD_INPUT = tuple(
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PantherError) and not issubclass(kind, RuntimeError | ImportError)
)


class RankLogs(LogsSpecs):
    """Sends what each rank writes to ``FOLDER/attempt-A/rank-R.out`` and ``.err``, and shows some ranks.

    torch calls :meth:`reify` before each attempt, so that this is also where restarts are logged, or refused.

    Args:
        folder: Of the run; made with the first attempt, under another name if it exists.
        shown: Whether to show a worker, by its global and local rank.
        title: What is started, for the log.
    """

    def __init__(self, folder: Path, shown: Callable[[int, int], bool], title: str) -> None:
        super().__init__(str(folder))
        self.folder, self._shown, self._title = folder, shown, title
        self.attempts, self.world_size = 0, 0
        self.destination = LogsDest()
        self._done, self._thread = threading.Event(), threading.Thread()

    @property
    def root_log_dir(self) -> str:
        """Return the folder of the run."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files of an attempt."""
        self.stop()
        if self.attempts:
            self._check_restart(envs[0])
        else:
            self.folder = _new_folder(self.folder)
            _LOGGER.info("%s; logs in %s", self._title, self.folder)
        self.attempts += 1
        # A node that comes or goes makes another attempt of the same number, in a folder of its own.
        folder = _new_folder(self.folder / f"attempt-{envs[0]['TORCHELASTIC_RESTART_COUNT']}")
        self.destination = found = LogsDest()
        self.world_size = int(envs[0]["WORLD_SIZE"])
        shown = {int(env["RANK"]) for local_rank, env in envs.items() if self._shown(int(env["RANK"]), local_rank)}
        tailed: list[tuple[str, Path, TextIO]] = []
        for local_rank, env in envs.items():
            stem = folder / f"rank-{env['RANK']}"
            found.stdouts[local_rank], found.stderrs[local_rank] = f"{stem}.out", f"{stem}.err"
            found.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = f"{stem}.error.json"
            if int(env["RANK"]) in shown:
                prefix = f"[rank {env['RANK']}] " if len(shown) > 1 else ""
                tailed += [(prefix, Path(f"{stem}.out"), sys.stdout), (prefix, Path(f"{stem}.err"), sys.stderr)]
        self._done = threading.Event()
        self._thread = threading.Thread(target=_tail, args=(tailed, self._done), name="panther-tail", daemon=True)
        self._thread.start()
        return found

    def stop(self) -> None:
        """Show the rest of what was written."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _check_restart(self, env: dict[str, str]) -> None:
        files = [Path(name) for name in self.destination.error_files.values() if Path(name).is_file()]
        first = min(files, key=lambda path: path.stat().st_mtime, default=None)
        error = recorded(str(first)) if first else None
        reason = f" after {error[0].splitlines()[0]}" if error else ""
        if error and error[0].partition(":")[0] in _BAD_INPUT:
            raise ConfigError(f"the processes are not started again{reason}")
        count, most = env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]
        _LOGGER.warning("all processes start again%s (restart %s of %s)", reason, count, most)


def _new_folder(path: Path) -> Path:
    for suffix in itertools.chain([""], (f"-{count}" for count in itertools.count(2))):
        folder = path.with_name(path.name + suffix)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not path.parent.is_dir():
                raise
    raise AssertionError


def _tail(files: list[tuple[str, Path, TextIO]], done: threading.Event) -> None:
    """Show files while they grow, in whole lines; torch's TailLog turns a progress bar into a line per update."""
    offsets = dict.fromkeys(files, 0)
    while True:
        last = done.is_set()
        for key in files:
            prefix, path, stream = key
            data = b""
            if path.exists():
                with path.open("rb") as file:
                    file.seek(offsets[key])
                    data = file.read()
            if not last:  # a progress bar ends its line with a carriage return
                data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
            offsets[key] += len(data)
            text = data.decode(errors="replace")
            if prefix:
                text = "".join(prefix + line for line in text.splitlines(keepends=True))
            with suppress(OSError, ValueError):  # the terminal is closed; the files have the output
                stream.write(text)
                stream.flush()
        if last:
            return
        done.wait(_POLL_S)

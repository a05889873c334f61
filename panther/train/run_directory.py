"""The directory of a run: a lock against a second run in it, and the profile of the first steps."""

__all__ = ["locked_directory", "profiled_steps"]

import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import profiler

from panther.distributed import get_rank
from panther.distributed.comm._agreement import run_on_first_rank
from panther.errors import CheckpointError, TrainingError
from panther.train.config import TrainConfig

_LOCK = ".lock"
_WAIT, _WARMUP, _ACTIVE = 2, 1, 5  # steps: the first ones allocate and compile, and are left out of the profile
_log = logging.getLogger(__name__)


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Make a directory if it is missing, and hold a lock on it; one that is still empty afterwards is removed.

    Raises:
        TrainingError: On every rank, if another run holds the lock.
        CheckpointError: On every rank, if the directory cannot be written to.
    """
    held: list[IO[str]] = []
    made: list[Path] = []

    def lock() -> None:
        try:
            made.extend(path for path in (directory, *directory.parents) if not path.exists())
            directory.mkdir(parents=True, exist_ok=True)
            file = open(directory / _LOCK, "a+", encoding="utf-8")  # noqa: SIM115 (held until the run ends)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint_dir {directory} cannot be written to ({error.strerror}): name another directory"
            ) from None
        try:
            # The operating system releases the lock with the process, so a killed run leaves no stale one.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise TrainingError(
                f"another run writes to {directory} ({owner}): wait for it, or name another directory"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        held.append(file)

    try:
        run_on_first_rank(lock, None)
        yield
    finally:
        if get_rank() == 0:
            _remove_empty(directory, made)
            for file in held:
                file.close()


def _remove_empty(directory: Path, made: list[Path]) -> None:
    """Remove the folders that this run made, as long as they hold nothing but its lock and empty files."""
    if not made or not directory.is_dir():
        return
    files = list(directory.iterdir())
    if all(file.name in (_LOCK, "log.jsonl") and (file.name == _LOCK or not file.stat().st_size) for file in files):
        for file in files:
            file.unlink()
        for path in made:
            if any(path.iterdir()):
                break
            path.rmdir()


@contextmanager
def profiled_steps(config: TrainConfig) -> Iterator[Callable[[], None]]:
    """Profile a few steps into a Chrome trace and a table for each rank; yields a function to call after every step."""
    if not config.profile:
        yield lambda: None
        return
    # Without it, the profiler's library writes to the terminal that it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    rank, steps = get_rank(), 0

    def write(measured: Any) -> None:
        folder = Path(config.checkpoint_dir or "") / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        measured.export_chrome_trace(str(folder / f"rank-{rank}.json"))
        table = measured.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
        (folder / f"rank-{rank}.txt").write_text(table, encoding="utf-8")

    plan = profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
    with profiler.profile(schedule=plan, on_trace_ready=write) as measured:

        def step() -> None:
            nonlocal steps
            steps += 1
            measured.step()

        yield step
    if steps < _WAIT + _WARMUP + _ACTIVE and rank == 0:
        profiled = max(0, steps - _WAIT - _WARMUP)
        _log.warning("profiled %d of %d steps: the run had only %d", profiled, _ACTIVE, steps)

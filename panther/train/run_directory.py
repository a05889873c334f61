"""The directory of a run, locked against a second run in it."""

__all__ = ["locked_directory"]

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from panther.distributed.comm._agreement import run_on_first_rank
from panther.errors import CheckpointError, TrainingError

_LOCK = ".lock"


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Make a directory if it is missing, and hold a lock on it; one that is still empty afterwards is removed.

    Raises:
        TrainingError: On every rank, if another run holds the lock.
        CheckpointError: On every rank, if the directory cannot be written to.
    """
    made: list[Path] = []
    with ExitStack() as held:

        def lock() -> None:
            missing = [path for path in (directory, *directory.parents) if not path.exists()]
            try:
                directory.mkdir(parents=True, exist_ok=True)
                file = held.enter_context(open(directory / _LOCK, "a+", encoding="utf-8"))
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
                raise TrainingError(
                    f"another run writes to {directory} ({owner}): wait for it, or name another directory"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            made.extend(missing)

        run_on_first_rank(lock, None)
        try:
            yield
        finally:
            # Only what this run made, and while it holds the lock: a folder of another run stays, even if it is empty.
            with suppress(OSError):  # rmdir refuses a folder that holds something
                if made and os.listdir(directory) == [_LOCK]:
                    (directory / _LOCK).unlink()
                    for path in made:
                        path.rmdir()

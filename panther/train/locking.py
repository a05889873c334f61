"""One run at a time in a checkpoint directory."""

__all__ = ["locked"]

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from panther.distributed import get_rank
from panther.errors import CheckpointError, TrainingError
from panther.train.control import on_first

_NAME = ".lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory, made if missing, for the run; the lock goes with the process, also if that is killed.

    Raises:
        TrainingError: On every rank, if another run holds it.
        CheckpointError: On every rank, if the directory cannot be written.
    """
    held: list[IO[str]] = []

    def take() -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = open(directory / _NAME, "a+", encoding="utf-8")  # noqa: SIM115 (held until the run ends)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint_dir {directory} cannot be written to ({error.strerror}): name another directory"
            ) from None
        try:
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

    on_first(take)
    try:
        yield
    finally:
        if get_rank() == 0:
            for file in held:
                file.close()

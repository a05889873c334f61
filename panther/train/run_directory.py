"""The directory of a run: locked against a second run in it, and the same on all nodes."""

__all__ = ["locked_directory"]

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from panther.distributed import get_rank, get_world_size
from panther.distributed.comm.agreement import gather_objects, run_on_first_rank
from panther.errors import CheckpointError, TrainingError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
_FAR = 1 << 30  # beyond the text in the file: locked bytes cannot be read on Windows


@contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Create a directory if it is missing, and hold a lock on it; remove the directory if it is still empty at the end.

    Raises:
        TrainingError: On every rank, if another run holds the lock.
        CheckpointError: On every rank, if the directory cannot be written to, or is not the same directory on all
            ranks.
    """
    created: list[Path] = []
    with ExitStack() as lock_files:

        def lock() -> None:
            missing = [path for path in (directory, *directory.parents) if not path.exists()]
            try:
                directory.mkdir(parents=True, exist_ok=True)
                file = lock_files.enter_context(open(directory / _LOCK, "a+", encoding="utf-8"))
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint_dir {directory} cannot be written to ({error.strerror}): name another directory"
                ) from None
            try:
                # The operating system releases the lock when the process ends, so a killed run leaves no stale lock.
                _lock(file)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                owner = file.read().strip() or "another process"
                raise TrainingError(
                    f"another run writes to {directory} ({owner}): wait for it, or name another directory"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            created.extend(missing)

        run_on_first_rank(lock, None)
        try:
            _check_shared(directory)
            yield
        finally:
            # Remove only folders that this run created, while it holds the lock: a folder of another run stays, even if
            # empty.
            with suppress(OSError):  # rmdir refuses a folder that is not empty
                if created and os.listdir(directory) == [_LOCK]:
                    (directory / _LOCK).unlink()
                    for path in created:
                        path.rmdir()


def _check_shared(directory: Path) -> None:
    """Raise CheckpointError on every rank unless all ranks see a file that the first rank writes.

    Without this check, the first checkpoint would fail, perhaps at the end of the run.
    """
    if get_world_size() == 1:
        return

    def write() -> str:
        # The name is new each time, because file systems remember for a while which names did not exist.
        token = directory / f".shared-{secrets.token_hex(8)}"
        token.touch()
        return token.name

    name = run_on_first_rank(write, None)
    views = gather_objects(((directory / name).exists(), socket.gethostname(), str(directory.absolute())), None)
    if get_rank() == 0:
        (directory / name).unlink()
    failed_ranks = [
        f"rank {rank} ({host}, {path})" for rank, (sees_token, host, path) in enumerate(views) if not sees_token
    ]
    if failed_ranks:
        more = f" and {len(failed_ranks) - 3} more" if len(failed_ranks) > 3 else ""
        raise CheckpointError(
            f"checkpoint_dir must be one folder for all ranks, and {', '.join(failed_ranks[:3])}{more} cannot see what "
            f"rank 0 ({views[0][1]}, {views[0][2]}) wrote there: name a folder of a file system that all nodes share"
        )


def _lock(file: Any) -> None:
    """Lock an open file, or raise BlockingIOError (PermissionError on Windows) if another process holds the lock."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt  # Windows has no fcntl

    file.seek(_FAR)
    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]

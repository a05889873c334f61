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
    """Make a directory if it is missing, and hold a lock on it; one that is still empty afterwards is removed.

    Raises:
        TrainingError: On every rank, if another run holds the lock.
        CheckpointError: On every rank, if the directory cannot be written to, or is another one on some rank.
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
            made.extend(missing)

        run_on_first_rank(lock, None)
        try:
            _check_shared(directory)
            yield
        finally:
            # Only what this run made, and while it holds the lock: a folder of another run stays, even if it is empty.
            with suppress(OSError):  # rmdir refuses a folder that holds something
                if made and os.listdir(directory) == [_LOCK]:
                    (directory / _LOCK).unlink()
                    for path in made:
                        path.rmdir()


def _check_shared(directory: Path) -> None:
    """Raise CheckpointError on every rank unless all see what the first one writes.

    Otherwise the first checkpoint would tell, perhaps at the end of the run.
    """
    if get_world_size() == 1:
        return

    def write() -> str:
        # A new name each time, because file systems remember for a while what was not there.
        token = directory / f".shared-{secrets.token_hex(8)}"
        token.touch()
        return token.name

    name = run_on_first_rank(write, None)
    seen = gather_objects(((directory / name).exists(), socket.gethostname(), str(directory.absolute())), None)
    if get_rank() == 0:
        (directory / name).unlink()
    blind = [f"rank {rank} ({host}, {path})" for rank, (found, host, path) in enumerate(seen) if not found]
    if blind:
        more = f" and {len(blind) - 3} more" if len(blind) > 3 else ""
        raise CheckpointError(
            f"checkpoint_dir must be one folder for all ranks, and {', '.join(blind[:3])}{more} cannot see what rank 0 "
            f"({seen[0][1]}, {seen[0][2]}) wrote there: name a folder of a file system that all nodes share"
        )


def _lock(file: Any) -> None:
    """Lock an open file, or raise BlockingIOError (PermissionError on Windows) if another process holds the lock."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt  # on Windows, where there is no fcntl

    file.seek(_FAR)
    msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]

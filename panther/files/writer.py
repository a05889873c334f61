"""Write a file so that it has the old or the new contents at any moment, even if a process is killed or several write.

The contents are written to a draft: a new file in the same folder, with a random temporary name. When they are on the
disk, one rename gives the draft the name of the file.
"""

__all__ = [
    "Draft", "copy_file", "hold_lock", "new_file", "release_lock", "remove_abandoned", "sync_folder", "take_lock",
    "unlocked_file", "write_json", "write_text",
]  # fmt: skip

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from panther.files.reader import UnsafeFileError, describe_kind, open_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# O_EXCL makes an existing file or link of that name an error. O_NOFOLLOW does so on systems that follow links.
_NEW = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_LONGEST_PREFIX = 180  # characters of a name that a temporary name repeats; file systems allow 255 bytes


class Draft:
    """A new file beside the one that it will replace, which may be missing and must be a regular file.

    The draft holds a lock as long as it is open, so that other processes can tell an abandoned draft from a draft that
    is being written.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = Path(target)
        mode = _mode_of(self.target)
        while True:
            self.path = self.target.parent / f"{_prefix(self.target.name)}{secrets.token_hex(8)}.tmp"
            try:
                descriptor = os.open(self.path, _NEW, 0o666)
            except OSError as error:  # the caller knows the name of the target
                raise type(error)(error.errno, error.strerror, str(self.target)) from None
            self.file: BinaryIO = os.fdopen(descriptor, "wb")
            hold_lock(descriptor)
            # Before the lock was held, another writer may have removed the draft as an abandoned one.
            if os.fstat(descriptor).st_nlink:
                break
            self.file.close()
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(descriptor, mode)

    def finish(self) -> None:
        """Write the contents to the disk (fsync)."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def rename(self, name: str) -> None:
        """Give the finished draft a name in its folder, and replace the file of that name."""
        if os.name == "nt":  # Windows does not rename open files
            self.file.close()
        os.replace(self.path, self.path.with_name(name))

    def close(self) -> None:
        """Close the draft, and remove it unless it has been renamed."""
        with suppress(OSError):  # the disk may be full, and the draft is removed anyway
            self.file.close()
        with suppress(OSError):
            self.path.unlink()


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a draft for writing in binary. It replaces the file when the block ends without an error."""
    draft = Draft(path)
    try:
        yield draft.file
        draft.finish()
        draft.rename(draft.target.name)
        sync_folder(draft.target.parent)
        remove_abandoned(draft.target.parent, [draft.target.name])
    finally:
        draft.close()


def copy_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy the contents of a regular file to another file, which is replaced at once if it exists."""
    with open_file(source) as contents, new_file(target) as copy:
        shutil.copyfileobj(contents, copy)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in UTF-8; an existing file is replaced at once."""
    with new_file(path) as file:
        file.write(text.encode())


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 1) -> None:
    """Write a value as JSON, as :func:`write_text` does."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, because only then a new or renamed file is safe."""
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path, names: Iterable[str]) -> None:
    """Remove the drafts of files of a folder whose writers have ended.

    Nothing is removed if the system or the file system has no locks, because their writers may be running.
    """
    draft = re.compile(f"(?:{'|'.join(re.escape(_prefix(name)) for name in names)})[0-9a-f]{{16}}\\.tmp")
    for path in [folder / name for name in os.listdir(folder) if draft.fullmatch(name)]:
        with unlocked_file(path) as is_abandoned:
            if is_abandoned:
                path.unlink(missing_ok=True)


@contextmanager
def unlocked_file(path: Path) -> Iterator[bool]:
    """Yield whether no process holds the lock of a file, and hold it in the block; yield False without locks."""
    if fcntl is None:
        yield False
        return
    try:
        # The file is opened for writing, because some network file systems lock only such files.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # it has been renamed or removed, or belongs to another user
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_abandoned = True
    except OSError:
        is_abandoned = False
    try:
        yield is_abandoned
    finally:
        os.close(descriptor)


def _prefix(name: str) -> str:
    return f".{name[:_LONGEST_PREFIX]}."


def hold_lock(descriptor: int) -> None:
    """Take the lock of an open file, if the system has locks. The lock ends with the process."""
    if fcntl is not None:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)


def take_lock(descriptor: int) -> bool:
    """Take the lock of an open file unless another process holds it; return False if one does.

    Without locks in the system or the file system, the result is True.
    """
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems have no locks
            pass
    return True


def release_lock(descriptor: int) -> None:
    """End the lock of an open file, which forked processes hold too."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _mode_of(target: Path) -> int | None:
    """Return the permissions of a file that is replaced, which the new file gets; None if the file is missing."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return None
    if kind := describe_kind(mode):
        raise UnsafeFileError(
            f"{target} is {kind}, and only regular files are replaced: remove it, or give another path"
        )
    return stat.S_IMODE(mode) & 0o777

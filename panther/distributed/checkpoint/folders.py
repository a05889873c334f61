"""The folders of a directory of checkpoints: their names, their order, and how they are published and removed.

A folder is written under a name that ends in ``.tmp``, and renamed when it is completely on the disk. While it is
written, a file beside it is locked, so that processes that save to the same directory do not remove each other's
folders.
"""

__all__ = ["checkpoints", "folder_of", "latest", "make_temporary", "note_damage", "publish", "remove", "tidy"]

import errno
import os
import re
import secrets
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

from panther.distributed.checkpoint.manifest import MANIFEST, damage, read_manifest
from panther.errors import FormatError
from panther.files import sync_folder, write_text
from panther.files.writer import hold_lock, unlocked_file

_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LOCK, _NOTE = ".lock", "damaged.txt"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of the complete checkpoints of a directory, the oldest step first.

    Args:
        directory: Directory of the checkpoints; if it is missing, there are none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     checkpoints(directory)
        []
    """
    paths = Path(directory).iterdir() if Path(directory).is_dir() else ()
    # Folders of a step that was saved again have numbers, in the order of writing.
    return sorted((path for path in paths if _FOLDER.fullmatch(path.name) and path.is_dir()), key=_step_and_number)


def _step_and_number(path: Path) -> tuple[int, int]:
    """Return the step and the number in the name of a checkpoint's folder, or (-1, 0) for any other name."""
    match = _FOLDER.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the latest complete checkpoint, or None.

    A warning names each later checkpoint that is skipped because files are missing. :func:`load` checks the contents of
    files.

    Args:
        directory: Directory of the checkpoints.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     latest(directory) is None
        True
    """
    for folder in reversed(checkpoints(directory)):
        try:
            wrong = damage(folder, read_manifest(folder))
        except FormatError as error:
            wrong = str(error)
        if wrong is None:
            return folder
        warnings.warn(f"{folder} is skipped: {wrong}", UserWarning, stacklevel=2)
    return None


def folder_of(path: Path) -> Path:
    """Return the path if it is the folder of a checkpoint, and otherwise the folder of the latest checkpoint in it."""
    if (path / MANIFEST).exists():
        return path
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        folder = latest(path)
    if folder is None:
        raise FormatError(
            f"{path} is not a checkpoint and contains none: give a folder that panther.distributed.checkpoint wrote"
        )
    return folder


def make_temporary(directory: Path, name: str, pattern: str) -> Path:
    """Make a temporary folder for this process only; remove those, by their pattern, that killed processes left."""
    directory.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(directory, pattern)
    name = f"{name}.{secrets.token_hex(8)}"
    lock = _new_lock(directory / f"{name}{_LOCK}")
    temporary = directory / f"{name}.tmp"
    try:
        temporary.mkdir()
    except BaseException:
        _release(directory / f"{name}{_LOCK}", lock)
        raise
    _locks[temporary] = lock
    return temporary


def publish(temporary: Path) -> Path:
    """Rename a finished folder to its final name, such that after a crash it is complete or does not exist.

    A step that is saved again, also by two runs at the same time, gets a number that increases.
    """
    sync_folder(temporary)
    name = temporary.name.partition(".")[0]
    while True:
        numbers = [
            number for step, number in map(_step_and_number, temporary.parent.iterdir()) if step == int(name[5:])
        ]
        final = temporary.with_name(f"{name}.{max(numbers) + 1}" if numbers else name)
        try:
            temporary.rename(final)
            break
        except OSError as error:  # another process was faster
            if error.errno not in _TAKEN or not final.exists():
                raise
    sync_folder(final.parent)
    _end_writing(temporary)
    return final


def tidy(final: Path, keep: int | None) -> None:
    """Remove earlier checkpoints of the step of a new checkpoint, and the oldest ones beyond ``keep``.

    A damaged checkpoint is not removed and not counted, because it may be all that is left of a run.
    """
    step, number = _step_and_number(final)
    for folder in checkpoints(final.parent):
        if (step, -1) < _step_and_number(folder) < (step, number) and _is_sound(folder):
            remove(folder)
    sound = [folder for folder in checkpoints(final.parent) if folder == final or _is_sound(folder)]
    for folder in sound[: -keep if keep else 0]:
        if folder != final:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder after renaming it, so that a killed process never leaves a partial checkpoint."""
    temporary = folder
    if folder.suffix != ".tmp":
        # A rename is atomic, but removing file by file is not.
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            folder.rename(temporary)
        except FileNotFoundError:  # another process that saves to the directory has removed the folder
            return
    shutil.rmtree(temporary, ignore_errors=True)
    _end_writing(temporary)


def note_damage(folder: Path, reason: str | None) -> None:
    """Write a note that a checkpoint is damaged, so that no later save removes it; None removes the note."""
    with suppress(OSError):  # without write permission, later saves cannot remove the folder either
        if reason is None:
            (folder / _NOTE).unlink(missing_ok=True)
        elif _FOLDER.fullmatch(folder.name) and folder.is_dir():
            write_text(folder / _NOTE, f"This checkpoint could not be loaded, and is not removed: {reason}\n")


def _is_sound(folder: Path) -> bool:
    """Return whether all files of a checkpoint exist, and no load has found damage in them."""
    try:
        return damage(folder, read_manifest(folder)) is None and not (folder / _NOTE).exists()
    except (FormatError, FileNotFoundError):  # damaged, or another process that saves to the directory has removed it
        return False


# File descriptors of the locks of the folders that this process writes.
_locks: dict[Path, int] = {}


def _new_lock(path: Path) -> int:
    """Make a lock file and hold its lock, which tells other processes that the folder is being written."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        hold_lock(descriptor)
        if os.fstat(descriptor).st_nlink:  # 0 if another process removed the file before the lock was held
            return descriptor
        os.close(descriptor)


def _end_writing(temporary: Path) -> None:
    if (descriptor := _locks.pop(temporary, None)) is not None:
        _release(temporary.with_suffix(_LOCK), descriptor)


def _release(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _remove_abandoned(directory: Path, pattern: str) -> None:
    """Remove temporary folders whose writers have ended (without support for locks, folders without a lock file)."""
    for leftover in directory.glob(f"{pattern}.tmp"):
        # Folders without a lock file are left from an interrupted removal, or from an older version of Panther.
        if not leftover.with_suffix(_LOCK).exists():
            remove(leftover)
    for path in directory.glob(f"{pattern}{_LOCK}"):
        with unlocked_file(path) as is_abandoned:
            if is_abandoned:
                remove(path.with_suffix(".tmp"))
                path.unlink(missing_ok=True)

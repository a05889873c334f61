"""The folders of a directory of checkpoints: their names, their order, and how they appear and disappear.

A folder is written under a name that ends in ``.tmp``, and renamed once it is completely on the disk. As long as it is
written, a file beside it is locked, so that processes which save to one directory leave each other's folders alone.
"""

__all__ = ["begin", "checkpoints", "folder_of", "latest", "make_temporary", "note_damage", "publish", "remove", "tidy"]

import errno
import os
import re
import secrets
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

from panther.distributed.checkpoint._manifest import MANIFEST, damage, read_manifest
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
    # A step that was saved again has a number, by which its folders are in the order of writing.
    return sorted((path for path in paths if _FOLDER.fullmatch(path.name) and path.is_dir()), key=_step_and_number)


def _step_and_number(path: Path) -> tuple[int, int]:
    """Return what the name of a checkpoint's folder says; -1 for a different name."""
    match = _FOLDER.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the latest checkpoint whose files are all there, or None.

    It warns of every later one that it skips. The contents of files are checked by :func:`load`.

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
    """Return the path if it is the folder of a checkpoint, else the folder of the latest checkpoint in it."""
    if (path / MANIFEST).exists():
        return path
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        found = latest(path)
    if found is None:
        raise FormatError(
            f"{path} is not a checkpoint and contains none: give a folder that panther.distributed.checkpoint wrote"
        )
    return found


def begin(directory: Path, step: int) -> Path:
    """Make a temporary folder for a checkpoint, and remove those that killed processes left."""
    return make_temporary(directory, f"step-{step:08d}", "step-*")


def make_temporary(directory: Path, name: str, pattern: str) -> Path:
    """Make a temporary folder, which nobody else writes to; remove abandoned ones whose names match the pattern."""
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
    """Give a finished folder its name, such that after a crash of the computer all of it is there or nothing.

    A step can be saved again, after resuming from an earlier one, or by two runs at the same time. Its folders then
    have numbers, the latest the highest.
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
    """Remove earlier checkpoints of the step of a new one, and the oldest ones beyond ``keep``.

    A damaged checkpoint is not removed and not counted: a part of it may be all that is left of a run.
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
    """Remove a folder, renaming it first, so that a killed process never leaves a partial checkpoint."""
    temporary = folder
    if folder.suffix != ".tmp":
        # A rename is atomic; removing file by file is not.
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            folder.rename(temporary)
        except FileNotFoundError:  # another process that saves there has removed it
            return
    shutil.rmtree(temporary, ignore_errors=True)
    _end_writing(temporary)


def note_damage(folder: Path, reason: str | None) -> None:
    """Write in a folder that it is damaged, so that no later save removes it; None removes the note."""
    with suppress(OSError):  # a folder that cannot be written to cannot be removed either
        if reason is None:
            (folder / _NOTE).unlink(missing_ok=True)
        elif _FOLDER.fullmatch(folder.name) and folder.is_dir():
            write_text(folder / _NOTE, f"This checkpoint could not be loaded, and is not removed: {reason}\n")


def _is_sound(folder: Path) -> bool:
    """Return whether all files of a checkpoint are there, and no load has found damage in them."""
    try:
        return damage(folder, read_manifest(folder)) is None and not (folder / _NOTE).exists()
    except FormatError:
        return False


# Descriptors of the locks of the folders that this process writes.
_locks: dict[Path, int] = {}


def _new_lock(path: Path) -> int:
    """Make a lock file and hold its lock, by which other processes know that a folder is being written."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)
        hold_lock(descriptor)
        if os.fstat(descriptor).st_nlink:  # else another process took it for abandoned, between these two lines
            return descriptor
        os.close(descriptor)


def _end_writing(temporary: Path) -> None:
    if (descriptor := _locks.pop(temporary, None)) is not None:
        _release(temporary.with_suffix(_LOCK), descriptor)


def _release(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _remove_abandoned(directory: Path, pattern: str) -> None:
    """Remove the temporary folders whose writers have ended; where there are no locks, only those without a lock."""
    for leftover in directory.glob(f"{pattern}.tmp"):
        if not leftover.with_suffix(_LOCK).exists():  # of a checkpoint that was being removed, or of an older Panther
            remove(leftover)
    for path in directory.glob(f"{pattern}{_LOCK}"):
        with unlocked_file(path) as is_abandoned:
            if is_abandoned:
                remove(path.with_suffix(".tmp"))
                path.unlink(missing_ok=True)

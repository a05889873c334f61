"""The folders of a directory of checkpoints: their names, their order, and how they appear and disappear.

A folder is written under a name that ends in ``.tmp``, and renamed once it is completely on the disk.
"""

__all__ = ["begin", "checkpoints", "folder_of", "latest", "publish", "remove", "tidy"]

import os
import re
import shutil
import warnings
from itertools import chain, count
from pathlib import Path

from panther.distributed.checkpoint._storage import MANIFEST, damage, read_manifest
from panther.errors import FormatError
from panther.files import sync_folder

_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


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
    found = []
    for path in Path(directory).iterdir() if Path(directory).is_dir() else ():
        if (match := _FOLDER.fullmatch(path.name)) and path.is_dir():
            # A step that was saved again has a number, by which its folders are in the order of writing.
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found)]


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


def begin(directory: Path, step: int) -> tuple[Path, Path]:
    """Make a temporary folder and choose its final name; remove the folders that killed processes left."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob("step-*.tmp"):
        remove(leftover)
    # A step can be saved again, after resuming from an earlier one; its first folder stays until then.
    name, taken = f"step-{step:08d}", {path.name for path in directory.iterdir()}
    names = chain([name], (f"{name}.{again}" for again in count(1)))
    final = directory / next(name for name in names if name not in taken)
    temporary = final.with_name(final.name + ".tmp")
    temporary.mkdir()
    return temporary, final


def publish(temporary: Path, final: Path) -> None:
    """Give a finished folder its name, such that after a crash of the machine all of it is there or nothing."""
    sync_folder(temporary)
    temporary.rename(final)
    sync_folder(final.parent)


def tidy(final: Path, keep: int | None) -> None:
    """Remove earlier checkpoints of the step of a new one, and the oldest ones beyond ``keep``."""
    step = final.name.partition(".")[0]
    for folder in checkpoints(final.parent):
        if folder != final and folder.name.partition(".")[0] == step:
            remove(folder)
    for folder in checkpoints(final.parent)[: -keep if keep else 0]:
        if folder != final:
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder, renaming it first, so that a killed process never leaves a partial checkpoint."""
    if folder.suffix != ".tmp":
        # A rename is atomic; removing file by file is not.
        aside = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        folder = folder.rename(aside)
    shutil.rmtree(folder, ignore_errors=True)

"""Options of several subcommands: how they are added, their types, and checks of their values before the work."""

__all__ = [
    "add_option", "check_files", "check_folder", "check_new_folder", "non_negative", "note", "note_if_wide",
    "performance_noted", "positive", "positive_float", "seed",
    "whole_number",
]  # fmt: skip

import argparse
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from panther.errors import NumericalWarning, PantherError, PerformanceWarning


def add_option(
    parser: Any, flag: str, kind: Callable[[str], Any], help_text: str, default: Any = None, metavar: str = "N"
) -> None:
    """Add an option to a parser or group; its help ends in the default, if there is one."""
    default_text = "" if default is None else " (default: %(default)s)"
    parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=help_text + default_text)


def whole_number(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    """Return a function that converts a text to a whole number in a range; its errors end argparse with status 2."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise argparse.ArgumentTypeError(f"{value} must be {bound}")
        return value

    return convert


positive, non_negative, seed = whole_number(1), whole_number(0), whole_number(0, 2**32 - 1)


def positive_float(text: str) -> float:
    """Return a finite number above 0."""
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return value


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} must be finite")
    return value


def check_folder(path: str, flag: str = "--out") -> Path:
    """Return the folder of an option, or raise PantherError if it, or its nearest parent, cannot be written to.

    The folder is created with its first file, so that a run that fails leaves no empty folder.
    """
    if not path:
        raise PantherError(f"{flag} is empty: name a folder")
    folder = Path(path)
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise PantherError(f"{flag} {path} cannot be written to ({error.strerror}): give another folder") from None
    return folder


def check_new_folder(path: str) -> Path:
    """Check the folder of ``--out`` as :func:`check_folder` does, and that it holds no files."""
    folder = check_folder(path)
    if folder.is_dir() and any(folder.iterdir()):
        raise PantherError(f"--out {folder} is not empty, and might hold another model: give a new folder, or clear it")
    return folder


def check_files(**paths: str | None) -> None:
    """Raise unless the files that options name can be written: ``report`` is the file of ``--report``."""
    for name, path in paths.items():
        if path is None:
            continue
        parent = Path(path).parent
        if not parent.is_dir() or not os.access(parent, os.W_OK) or Path(path).is_dir():
            raise PantherError(
                f"--{name} {path} cannot be written: name a file in an existing folder that you may write to"
            )


def note(text: object) -> None:
    """Print a note to standard error; the command continues."""
    print(f"panther: note: {text}", file=sys.stderr)


@contextmanager
def performance_noted() -> Iterator[None]:
    """Print each PerformanceWarning as a note; a NumericalWarning is in the report of what the block calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PerformanceWarning)
        warnings.simplefilter("ignore", NumericalWarning)
        warnings.showwarning = lambda message, *_, **__: note(message)
        yield


def note_if_wide(sketch_size: int, hidden: int) -> None:
    """Print a note if sketched layers need no fewer operations than dense ones at these sizes."""
    if 2 * sketch_size >= hidden:
        note(
            f"--sketch-size {sketch_size} at --hidden {hidden} needs no fewer operations than a dense layer: sketching "
            "is faster while --hidden is more than twice --sketch-size"
        )

"""What subcommands share: types of arguments, which argparse reports with exit code 2, and checks before the work."""

__all__ = ["check_file", "note_if_wide", "positive", "positive_float", "seed", "writable"]

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

from panther.errors import PantherError


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(text, 1)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not value > 0 or math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return value


def seed(text: str) -> int:
    """A whole number from 0 to 2^32 - 1."""
    value = _at_least(text, 0)
    if value >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{value} must be below 2^32")
    return value


def writable(out: str, flag: str = "--out") -> Path:
    """The folder of ``--out``, made and tried before the work, not after it."""
    if not out:
        raise PantherError(f"{flag} is empty: name a folder")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PantherError(f"{flag} {out} cannot be written to ({error.strerror}): give another folder") from None
    return folder


def check_file(flag: str, path: str | None) -> None:
    """Refuse a file that could not be written after the work."""
    if path is None:
        return
    parent = Path(path).parent
    if not parent.is_dir() or not os.access(parent, os.W_OK) or Path(path).is_dir():
        raise PantherError(f"{flag} {path} cannot be written: name a file in a folder that is there and open to you")


def note_if_wide(sketch_size: int, hidden: int) -> None:
    """Say once if sketched layers cannot pay at these sizes."""
    if 4 * sketch_size >= hidden:
        print(
            f"panther: note: --sketch-size {sketch_size} at --hidden {hidden} multiplies by no fewer "
            "numbers than a dense layer: sketching pays while --hidden is more than four times --sketch-size",
            file=sys.stderr,
        )


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} must be at least {least}")
    return value

"""Open and read regular files, and nothing else: a FIFO would be waited for without end, and a device has no end."""

__all__ = ["UnsafeFileError", "describe_kind", "open_file", "parse_json", "read_json", "read_text"]

import json
import os
import stat
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from panther.errors import PantherError

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
# A FIFO that takes the place of a file between the check and the opening must not be waited for.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class UnsafeFileError(PantherError, OSError):
    """A path leads to something other than a regular file, such as a FIFO, a device or a folder."""


def describe_kind(mode: int) -> str | None:
    """Return the kind of file of a ``st_mode``, such as ``"a FIFO"``, or None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def open_file(path: str | os.PathLike[str], buffer_bytes: int = -1) -> BufferedReader:
    """Open a regular file for reading.

    Links are followed, because the files in the cache of the Hugging Face hub are links to regular files.

    Args:
        path: The file.
        buffer_bytes: Number of bytes that are read at once; -1 leaves it to Python.

    Raises:
        UnsafeFileError: If it is a FIFO, a device, a socket or a folder.
        OSError: If it is missing or cannot be opened.
    """
    _check_regular(path, os.stat(path).st_mode)  # opening a device can have effects, so its kind is read first
    descriptor = os.open(path, _READ_FLAGS)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
        return cast(BufferedReader, os.fdopen(descriptor, "rb", buffer_bytes))
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(path: str | os.PathLike[str], mode: int) -> None:
    if kind := describe_kind(mode):
        raise UnsafeFileError(f"{os.fspath(path)} is {kind}, and only regular files are read: give a regular file")


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        UnsafeFileError: If it is not a regular file.
        OSError: If it cannot be read.
        ValueError: If it is not UTF-8.
    """
    with open_file(path) as file:
        return file.read().decode("utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value in a JSON file.

    Raises:
        UnsafeFileError: If it is not a regular file.
        OSError: If it cannot be read.
        ValueError: If it is not JSON, names a key twice or is nested too deeply.
    """
    return parse_json(read_text(Path(path)))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If it is not JSON, names a key of an object twice or is nested too deeply to be read.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r} is there twice")
    return values

"""Open and read regular files, and nothing else: a FIFO would be waited for without end, and a device has no end."""

__all__ = [
    "UnsafeFileError", "check_inside", "check_no_pointer", "check_plain_name", "describe_kind", "file_checksum",
    "is_plain_name", "open_file", "parse_json", "read_json", "read_text",
]  # fmt: skip

import json
import os
import stat
import zlib
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from panther.errors import FormatError, PantherError

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_TEXT, _BLOCK = 2**28, 2**22  # bytes
# A FIFO that takes the place of a file between the check and the opening must not be waited for.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class UnsafeFileError(PantherError, OSError):
    """A path leads to something other than a regular file, such as a FIFO, a device or a folder."""


def describe_kind(mode: int) -> str | None:
    """Return the kind of file of a ``st_mode``, such as ``"a FIFO"``, or None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def open_file(path: str | os.PathLike[str], buffer_bytes: int = -1) -> BufferedReader:
    """Open a regular file for reading; raise UnsafeFileError for a FIFO, a device, a socket or a folder.

    Links are followed, because the files in the cache of the Hugging Face hub are links to regular files.
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


def check_no_pointer(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Raise FormatError if an open file, which is at its beginning, is a pointer of Git LFS in place of weights."""
    beginning = file.read(len(_POINTER))
    file.seek(0)
    if beginning == _POINTER:
        raise FormatError(f"{os.fspath(path)} is a pointer of Git LFS and no weights: run git lfs pull there")


def is_plain_name(name: Any) -> bool:
    """Return whether a value is the name of a file in a folder: not a path, and neither ``.`` nor ``..``."""
    return (
        isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0") and not Path(name).drive
    )


def check_plain_name(name: Any, named_by: str | os.PathLike[str]) -> None:
    """Raise FormatError unless a name that a file ``named_by`` holds is the name of a file in the folder of this file.

    Every name that is read from a file is checked, because a path such as ``..`` leads out of the folder.
    """
    if not is_plain_name(name):
        raise FormatError(
            f"{os.fspath(named_by)} names {name!r:.60}, and may name only files and folders beside it: write a plain "
            "name, without slashes"
        )


def check_inside(path: Path, folder: Path) -> None:
    """Raise FormatError if links make a path in a folder lead out of the folder.

    In a snapshot of the cache of the Hugging Face hub, every file is a link to a blob of the same repository, which
    counts as inside.
    """
    actual, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    snapshots = [each for each in root.parents if each.name == "snapshots" and "--" in each.parent.name]
    is_blob = any(actual.parent == each.with_name("blobs") for each in snapshots)
    if not (is_blob or actual.is_relative_to(root)):
        raise FormatError(
            f"{path} is a link that leaves {folder}, and might lead to a private file: put a copy of the file in place "
            "of the link, or remove the link"
        )


def file_checksum(path: str | os.PathLike[str]) -> int:
    """Return the CRC-32 of the contents of a regular file, which is read a few megabytes at a time."""
    checksum = 0
    with open_file(path) as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file in UTF-8; raise ValueError if it is not UTF-8, or has more than 256 MiB."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LONGEST_TEXT:  # a sparse file can have any size
            raise ValueError(f"it has {size:,} bytes, and a text has at most {_LONGEST_TEXT:,}")
        return file.read().decode("utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value in a JSON file, or raise the errors of :func:`read_text` and :func:`parse_json`."""
    return parse_json(read_text(Path(path)))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError for a key that is there twice, and too deep nesting too."""
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

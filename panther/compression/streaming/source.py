"""Notice that the files of a model change while it is compressed, because their weights are mapped and not copied."""

__all__ = ["SourceFiles"]

import os
import zlib
from contextlib import suppress
from pathlib import Path

from panther.files.reader import file_checksum


class SourceFiles:
    """The files of the folder from which a model is loaded, with checksums of their contents.

    Sizes and times of files are read often, which takes no time, and their contents if these have changed, and in the
    end. Files that come meanwhile do not count.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        paths = [folder / name for name in names if name.endswith((".safetensors", ".json"))]
        self._paths = [path for path in paths if path.is_file()]
        self._stats = {path: _stat(path) for path in self._paths}  # before the contents, which may change meanwhile
        self._checksums = {path: _checksum(path) for path in self._paths}

    def __str__(self) -> str:
        contents = repr([(path.name, self._checksums[path]) for path in self._paths])
        return f"{self._folder.resolve()} with files {zlib.crc32(contents.encode()):08x}"

    def change(self, *, is_end: bool = False) -> str:
        """Return a message about a file whose contents have changed; empty if none has.

        Contents are read if the size or a time of a file has changed, and at the end.
        """
        for path in self._paths:
            stat = _stat(path)
            if is_end or stat != self._stats[path]:
                if _checksum(path) != self._checksums[path]:
                    return (
                        f"{path} has changed while the model was compressed, and nothing was written: let nothing else "
                        "write to the source, and start again"
                    )
                self._stats[path] = stat
        return ""


def _stat(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _checksum(path: Path) -> int | None:
    """Return the checksum of a file; None if it cannot be read."""
    with suppress(OSError):
        return file_checksum(path)
    return None

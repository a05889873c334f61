"""JSON files that tell whether this user has written them, and in this place.

A folder of somebody else can hold every file. What a process writes for the process that continues its work is
therefore signed with a key of the user, which is kept outside of all such folders, and with the place of the file: a
file that was copied, moved, changed, or written by another user is refused.
"""

__all__ = ["cache_folder", "read_signed", "write_signed"]

import hashlib
import hmac
import json
import logging
import os
import secrets
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from panther.errors import FormatError
from panther.files.reader import open_file, parse_json, read_text
from panther.files.writer import write_text

_log = logging.getLogger(__name__)
_KEY, _KEY_BYTES = "signing-key", 32


def write_signed(path: Path, value: Any) -> None:
    """Write a value as JSON, as :func:`panther.files.write_json` does, with a signature."""
    text = json.dumps(value)
    write_text(path, f"{_signature(path, text)}\n{text}")


def read_signed(path: Path) -> Any:
    """Return the value in a file of :func:`write_signed`.

    FormatError says that the file is damaged, or that this user has not written it in this place.
    """
    try:
        signature, _, text = read_text(path).partition("\n")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} is damaged ({error})") from None
    if not hmac.compare_digest(signature.encode(), _signature(path, text).encode()):
        raise FormatError(f"{path} is damaged, or was not written by this user on this machine in this folder")
    return parse_json(text)


def _signature(path: Path, text: str) -> str:
    place = os.fsencode(os.path.realpath(path))
    return hmac.new(_key(), place + b"\0" + text.encode(), hashlib.sha256).hexdigest()


def cache_folder() -> Path:
    """Return the folder in which this user's key is; raise RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "panther"


@cache
def _key() -> bytes:
    """Return the key of this user, which is made at the first use. Where it cannot be kept, the process has its own."""
    new = secrets.token_bytes(_KEY_BYTES)
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / _KEY).exists():
            descriptor, name = tempfile.mkstemp(dir=folder)  # which nobody else can read
            with os.fdopen(descriptor, "wb") as file:
                file.write(new)
            with suppress(FileExistsError):  # another process was faster, and both take its key
                os.link(name, folder / _KEY)
            os.unlink(name)
        with open_file(folder / _KEY) as file:
            key = file.read()
    except (OSError, RuntimeError) as error:  # there is no home, or nothing can be written to it
        _log.warning("no key of this user can be kept (%s): another process cannot continue this work", error)
        return new
    if len(key) != _KEY_BYTES:
        raise FormatError(f"{folder / _KEY} has {len(key)} bytes and should have {_KEY_BYTES}: remove it")
    return key

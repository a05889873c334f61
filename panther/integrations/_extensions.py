"""Where torch compiles extensions of other libraries, and locks that an interrupted build has left there."""

__all__ = ["check_locks", "private_folder"]

import hashlib
import os
import sys
from pathlib import Path

import torch

from panther.errors import ConfigError

_VARIABLE = "TORCH_EXTENSIONS_DIR"


def private_folder() -> Path:
    """Return the folder for compiled extensions, after setting TORCH_EXTENSIONS_DIR to it if that is not set.

    torch's default is shared by all environments of a user that have the same version of Python, so that an extension
    compiled for another version of torch may be loaded, or a build in one environment stops another one. This folder
    is of the environment, the version of torch and the machine alone.
    """
    if not os.environ.get(_VARIABLE):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        of = f"{sys.prefix} {sys.version} {torch.__version__} {os.uname().nodename}"
        name = hashlib.blake2b(of.encode(), digest_size=8).hexdigest()
        os.environ[_VARIABLE] = str(cache / "panther" / "torch_extensions" / name)
    return Path(os.environ[_VARIABLE])


def check_locks(folder: Path) -> None:
    """Raise ConfigError if a build that was interrupted has left its lock: torch would wait for it without a limit.

    A lock is left over if no process of this machine has its file open; torch keeps it open while it builds. Without
    ``/proc`` nothing is checked.
    """
    for lock in sorted(folder.glob("*/lock")):
        if Path("/proc/self/fd").exists() and not _is_open(lock) and lock.exists():
            raise ConfigError(
                f"{lock} was left by a build that was interrupted, and every later one would wait for it: remove it "
                f"with rm '{lock}'"
            )


def _is_open(path: Path) -> bool:
    """Return whether a process of this user has the file open."""
    try:
        wanted = os.stat(path)
    except FileNotFoundError:
        return True  # the build has ended
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            for descriptor in (process / "fd").iterdir():
                found = os.stat(descriptor)
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
        except OSError:  # it has ended, or is of another user
            continue
    return False

"""Choose the folder in which torch compiles extensions of other libraries, and find locks of interrupted builds."""

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

    All environments of a user with the same version of Python share torch's default folder, so that torch may load an
    extension compiled for a different version of torch, or a build in one environment may block a build in a different
    one. The folder returned here belongs to one environment, one version of torch and one node.
    """
    if not os.environ.get(_VARIABLE):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        of = f"{sys.prefix} {sys.version} {torch.__version__} {os.uname().nodename}"
        name = hashlib.blake2b(of.encode(), digest_size=8).hexdigest()
        os.environ[_VARIABLE] = str(cache / "panther" / "torch_extensions" / name)
    return Path(os.environ[_VARIABLE])


def check_locks(folder: Path) -> None:
    """Raise ConfigError if an interrupted build has left its lock, for which torch would wait without a limit.

    A lock is left over if no process of this node has its file open, because torch keeps the file open during a build.
    Without ``/proc`` nothing is checked.
    """
    for lock in sorted(folder.glob("*/lock")):
        if Path("/proc/self/fd").exists() and not _is_open(lock) and lock.exists():
            raise ConfigError(
                f"{lock} was left by an interrupted build, and every later build would wait for it: remove it with "
                f"rm '{lock}'"
            )


def _is_open(path: Path) -> bool:
    """Return whether a process of this user has the file open."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return True  # the build has ended
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            for descriptor in (process / "fd").iterdir():
                open_status = os.stat(descriptor)
                if (open_status.st_dev, open_status.st_ino) == (status.st_dev, status.st_ino):
                    return True
        except OSError:  # the process has ended, or belongs to a different user
            continue
    return False

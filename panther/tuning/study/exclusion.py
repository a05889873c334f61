"""Exclusive access of a search to a study in a database, by an entry in the study that the search renews.

A file has a lock, which ends with its process. Nodes may share a database, so every search writes an entry into the
study's attributes before it reads the entries of other searches. If two searches start at the same time, at least one
sees the other. The entry of a killed search remains. On the same node its process does not exist any more. An entry of
another node expires if it is not renewed for a minute, measured by the clock of the reading process.
"""

__all__ = ["exclusive_access"]

import json
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from panther.errors import ConfigError

_PREFIX = "panther search "  # prefix of the attributes, before the name of a search
_BEAT_S = 5.0  # interval between renewals
_SILENT_S = 60.0  # An entry of another node expires after this time without a renewal.
_POLL_S = 0.5

_logger = logging.getLogger("panther.tuning")


@contextmanager
def exclusive_access(study: Any, storage: Any) -> Iterator[None]:
    """Exclude other searches from a study meanwhile.

    Raises:
        ConfigError: If another search uses the study. It is not disturbed.
    """
    name = _PREFIX + secrets.token_hex(8)
    entry = _place() | {"state": "claims", "beat": 0}
    study.set_user_attr(name, json.dumps(entry))
    stopped = threading.Event()
    beating = threading.Thread(target=_beat, args=(study, name, entry, stopped), name="panther-tune", daemon=True)
    beating.start()
    try:
        _wait_for_others(study, name, storage)
        entry["state"] = "holds"
        study.set_user_attr(name, json.dumps(entry))
        yield
    finally:
        stopped.set()
        beating.join()
        try:
            study.set_user_attr(name, None)
        except Exception as error:  # An error that ended the search must not be replaced.
            _logger.warning(
                "the end of the search could not be written to the storage (%s): searches on other nodes will "
                "wait for %g s", error, _SILENT_S,
            )  # fmt: skip


def _beat(study: Any, name: str, entry: dict[str, Any], stopped: threading.Event) -> None:
    """Renew an entry until the search has ended, also if the database is temporarily unavailable."""
    while not stopped.wait(_BEAT_S):
        entry["beat"] += 1
        try:
            study.set_user_attr(name, json.dumps(entry))
        except Exception as error:
            _logger.debug("the entry of the search could not be renewed in the storage: %s", error)


def _wait_for_others(
    study: Any,
    name: str,
    storage: Any,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once no other search uses the study, and raise if a search uses it.

    If searches start at the same time, the first one by name continues.
    """
    first_beats: dict[str, Any] = {}
    began = clock()
    while True:
        unclear = False
        for other, entry in _entries(study).items():
            if other == name or (alive := _is_alive(entry)) is False:
                continue
            # A search on another node is alive if its entry is renewed.
            if alive is None and entry.get("beat") == first_beats.setdefault(other, entry.get("beat")):
                unclear = unclear or clock() - began < _SILENT_S
                continue
            if entry.get("state") == "claims" and other > name:
                unclear = True  # It will see this entry and fail, or hold the study soon.
                continue
            raise ConfigError(
                f"storage={str(storage)!r} is open in another search, process {entry.get('process')} on "
                f"{entry.get('machine')}: wait until it has ended, use another storage, or run the trials of one "
                "search in processes with parallel="
            )
        if not unclear:
            return
        sleep(_POLL_S)


def _entries(study: Any) -> dict[str, dict[str, Any]]:
    """Return the entries of searches that have not ended, by name."""
    texts = {name: text for name, text in study.user_attrs.items() if name.startswith(_PREFIX) and text is not None}
    return {name: json.loads(text) for name, text in texts.items()}


def _place() -> dict[str, Any]:
    """Return the machine and the identity of this process, with which other processes can check that it lives."""
    return {"machine": platform.node(), "space": _process_space(), "process": os.getpid(), "start": _start()}


def _is_alive(entry: dict[str, Any]) -> bool | None:
    """Return whether the process of an entry lives, or None if this process cannot know."""
    here, process = _place(), entry.get("process")
    is_here = all(entry.get(key) == here[key] for key in ("machine", "space"))
    if not is_here or type(process) is not int or process < 1:
        return None
    if os.name != "posix":  # os.kill has no signal 0 there.
        return True if process == here["process"] else None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        pass
    return entry.get("start") == _start(process)  # Otherwise another process has its number.


def _process_space() -> str:
    """Return the namespace of process numbers, for example of a container."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start(process: int | None = None) -> int | None:
    """Return when a process began, in clock ticks since the boot, or None if this is unknown."""
    try:
        text = Path(f"/proc/{process or 'self'}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])

"""A study in a database is open in one search at a time: the search that has it says so in the study, again and again.

A file has a lock, which ends with its process. Several nodes may share a database, so every search writes an entry of
its own into the study's attributes before it looks at the entries of others: of two that start together at least one
sees the other. A search that was killed leaves its entry: on this node its process is looked for, and an entry of
another node counts as dead once it was not renewed for a while, by the clock of the process that looks.
"""

__all__ = ["claimed"]

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

_PREFIX = "panther search "  # of the attributes; the rest is the name of a search
_BEAT_S = 5.0  # between two renewals
_SILENT_S = 60.0  # without a renewal, after which a search of another node counts as dead
_POLL_S = 0.5

_logger = logging.getLogger("panther.tuning")


@contextmanager
def claimed(study: Any, storage: Any) -> Iterator[None]:
    """Keep other searches from a study meanwhile.

    Raises:
        ConfigError: If another search has it; that search is not disturbed.
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
        except Exception as error:  # the error that ends the search is the one to show
            _logger.warning(
                "the end of the search could not be noted in the storage (%s): on another node the next search "
                "begins after %g s", error, _SILENT_S,
            )  # fmt: skip


def _beat(study: Any, name: str, entry: dict[str, Any], stopped: threading.Event) -> None:
    """Renew an entry until the search has ended; a database that is away for a while is asked again."""
    while not stopped.wait(_BEAT_S):
        entry["beat"] += 1
        try:
            study.set_user_attr(name, json.dumps(entry))
        except Exception as error:
            _logger.debug("the search could not be renewed in the storage: %s", error)


def _wait_for_others(
    study: Any,
    name: str,
    storage: Any,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once no other search has the study, and raise if one has it.

    Of searches that start together the one whose name comes first continues.
    """
    first_beats: dict[str, Any] = {}
    began = clock()
    while True:
        unclear = False
        for other, entry in _entries(study).items():
            if other == name or (alive := _is_alive(entry)) is False:
                continue
            # An entry of another node is of a search that lives if it is renewed.
            if alive is None and entry.get("beat") == first_beats.setdefault(other, entry.get("beat")):
                unclear = unclear or clock() - began < _SILENT_S
                continue
            if entry.get("state") == "claims" and other > name:
                unclear = True  # it will see this one, or has not seen it and holds the study in a moment
                continue
            raise ConfigError(
                f"storage={str(storage)!r} is open in another search, process {entry.get('process')} on "
                f"{entry.get('machine')}: wait until that has ended, give another storage, or run the trials of one "
                "search in several processes with parallel="
            )
        if not unclear:
            return
        sleep(_POLL_S)


def _entries(study: Any) -> dict[str, dict[str, Any]]:
    """Return the entries of all searches that have not ended, by name."""
    texts = {name: text for name, text in study.user_attrs.items() if name.startswith(_PREFIX) and text is not None}
    return {name: json.loads(text) for name, text in texts.items()}


def _place() -> dict[str, Any]:
    """Return where this process is, so that another one can look whether it lives."""
    return {"machine": platform.node(), "space": _process_space(), "process": os.getpid(), "start": _start()}


def _is_alive(entry: dict[str, Any]) -> bool | None:
    """Return whether the process of an entry lives; None if it cannot be seen from here."""
    here, process = _place(), entry.get("process")
    is_here = all(entry.get(key) == here[key] for key in ("machine", "space"))
    if not is_here or type(process) is not int or process < 1:
        return None
    if os.name != "posix":  # where os.kill sends no signal 0
        return True if process == here["process"] else None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        pass
    return entry.get("start") == _start(process)  # else its number was given to another process


def _process_space() -> str:
    """Return the name of the space in which process numbers count, as of a container."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start(process: int | None = None) -> int | None:
    """Return when a process began, in ticks since the machine did; None where the system does not tell."""
    try:
        text = Path(f"/proc/{process or 'self'}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])

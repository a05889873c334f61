"""Storage of a study: exclusive access, repair after a kill, and a check that the search is the same."""

__all__ = ["DESCRIBED_FUNCTIONS", "OpenStudy", "open_study"]

import json
import logging
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from panther.errors import ConfigError, require_extra
from panther.tuning.config import TuneConfig
from panther.tuning.goal import Figures, Goal
from panther.tuning.samplers import make_pruner, quiet

_PREFIX = "panther search "  # prefix of the attributes, before the name of a search
_BEAT_S = 5.0  # interval between renewals
_SILENT_S = 60.0  # An entry of another node expires after this time without a renewal.
_POLL_S = 0.5

_logger = logging.getLogger("panther.tuning")


@contextmanager
def exclusive_access(study: Any, storage: Any) -> Iterator[None]:
    """Exclude other searches from a study in a database meanwhile, by an entry that the search renews.

    A file has a lock, which ends with its process. Nodes may share a database, so every search writes an entry into the
    study's attributes before it reads the entries of other searches. If two searches start at the same time, at least
    one sees the other. The entry of a killed search remains. On the same node its process does not exist any more. An
    entry of another node expires if it is not renewed for a minute, measured by the clock of the reading process.

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
        for other, content in study.user_attrs.items():
            if not other.startswith(_PREFIX) or other == name or content is None:  # None: it has ended.
                continue
            entry = json.loads(content)
            if (alive := _is_alive(entry)) is False:
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


def _place() -> dict[str, Any]:
    """Return the machine and the identity of this process, with which other processes can check that it lives."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # of process numbers, for example of a container
    except OSError:
        namespace = ""
    return {"machine": platform.node(), "space": namespace, "process": os.getpid(), "start": _start()}


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


def _start(process: int | None = None) -> int | None:
    """Return when a process began, in clock ticks since the boot, or None if this is unknown."""
    try:
        return int(Path(f"/proc/{process or 'self'}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


_NAME = "panther.tune"  # name of the study in the storage
_IDENTITY, _UNCHANGED = "panther identity", "panther unchanged"
DESCRIBED_FUNCTIONS = ("forward_fn", "loss_fn", "mask_fn")
_EARLIER = re.compile(r"\S+( [0-9a-f]{8})?(?<!none)")  # the name of a function, and a hash of its code alone
# Relative difference of the unchanged model's metric that is allowed in a resumed study, for another machine's
# rounding.
_AGREES = 1e-4


@dataclass(frozen=True)
class OpenStudy:
    """An open study.

    Attributes:
        study: Optuna's study.
        storage: The storage, as the user gave it.
        seed: The seed of the search.
        remembered: Stored figures of the unchanged model; empty for a new study.
        notes: Repairs of the storage.
    """

    study: Any
    storage: Any
    seed: int
    remembered: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def check_unchanged_model(self, goal: Goal, unchanged: Figures) -> None:
        """Store the unchanged model's figures and the seed in a new study.

        Raises:
            ConfigError: If a resumed study has other figures.
        """
        if not self.remembered:
            self.study.set_user_attr(_UNCHANGED, json.dumps(asdict(unchanged) | {"seed": self.seed}))
            return
        names = {"evaluate": "metric"} | ({} if isinstance(goal.objective, str) else {goal.name: "objective"})
        for function, figure in names.items():
            earlier, now = self.remembered[figure], getattr(unchanged, figure)
            if abs(earlier - now) > _AGREES * max(abs(earlier), abs(now)):
                raise ConfigError(
                    f"storage={self.storage!r} has another study, in which {function} returned {earlier:.6g} for the "
                    f"unchanged model, and now it returns {now:.6g}: use a new file, or the same data and function"
                )


@contextmanager
def open_study(config: TuneConfig, description: Mapping[str, str]) -> Iterator[OpenStudy]:
    """Create or resume the study of a storage, which no other search can open meanwhile.

    Args:
        config: The arguments of the search.
        description: What must not change when the search is resumed, by name.

    Raises:
        ConfigError: If the storage cannot be opened, is open, or has another study.
    """
    optuna: Any = require_extra("optuna", "tune")
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    class SearchedStudy(optuna.Study):
        """A study whose trials the search runs, outside of Optuna's loop."""

        is_exhausted = False

        def stop(self) -> None:  # Exhausted samplers call it. The method of the base class only works in Optuna's loop.
            self.is_exhausted = True

    storage: Any = config.storage
    path: Any = storage
    pruner = make_pruner(optuna, config.pruner)
    if storage is not None and not isinstance(storage, str | os.PathLike | optuna.storages.BaseStorage):
        raise ConfigError(
            f"storage must be a path, a database's URL or a storage of Optuna, not {type(storage).__name__}"
        )
    is_file = storage is not None and isinstance(storage, str | os.PathLike) and "://" not in str(storage)
    with _locked_and_repaired(path) if is_file else nullcontext(()) as notes:
        try:
            with quiet():
                backend = JournalStorage(JournalFileBackend(str(storage))) if is_file else storage
                backend = optuna.storages.get_storage(backend)
                directions = config.goal.directions
                optuna.create_study(storage=backend, study_name=_NAME, directions=directions, load_if_exists=True)
                sampler = None if isinstance(config.sampler, str) else config.sampler
                study = SearchedStudy(_NAME, backend, sampler, pruner)
                stored = json.loads(study.user_attrs.get(_IDENTITY, "{}"))
                remembered = json.loads(study.user_attrs.get(_UNCHANGED, "{}"))
                is_new = not (stored or study.get_trials(deepcopy=False))
        except Exception as error:
            raise _unreadable(storage, error) from error
        seed = int(remembered.get("seed", config.new_seed))
        if is_new:
            study.set_user_attr(_IDENTITY, json.dumps(dict(description)))
        elif differences := _differences(stored, description, seed, config):
            raise ConfigError(f"storage={storage!r} has another study ({differences}): use a new file, or delete it")
        with exclusive_access(study, storage) if storage is not None and not is_file else nullcontext():
            yield OpenStudy(study, storage, seed, remembered, notes)


def _differences(stored: Mapping[str, str], description: Mapping[str, str], seed: int, config: TuneConfig) -> str:
    """Return in which properties a stored search differs from this one, or "" if they are equal."""
    names = [name for name in {**description, **stored} if stored.get(name) != description.get(name)]
    differences = [f"{name} {stored.get(name)} instead of {description.get(name)}" for name in names]
    if config.seed is not None and seed != config.new_seed:
        differences.append(f"seed {seed} instead of {config.seed}")
    hint = ""
    if any(_EARLIER.fullmatch(stored.get(name, "")) for name in DESCRIBED_FUNCTIONS if name in names):
        hint = ", where an earlier version of Panther described functions by less"
    return ", ".join(differences[:3]) + hint


def _unreadable(storage: Any, error: Exception) -> ConfigError:
    return ConfigError(
        f"storage={storage!r} cannot be opened ({type(error).__name__}: {error}): use a new file, or a file of a study "
        "of panther.tune"
    )


@contextmanager
def _locked_and_repaired(path: str | os.PathLike[str]) -> Iterator[tuple[str, ...]]:
    """Lock a file of a search until the process ends, and yield notes about its repair.

    Optuna's lock is only held during a write, and remains after a kill.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"storage={str(path)!r} is open in another search: wait until it has ended, or use another file"
            ) from None
        except (ImportError, OSError):  # Windows and some network file systems
            yield ()
            return
        try:
            yield _repair(path, file)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # Forked processes still have the file open.


def _repair(path: str | os.PathLike[str], file: IO[bytes]) -> tuple[str, ...]:
    """Remove an incomplete last line from a file of a search, and return a note about it.

    A process that is killed during a write leaves an incomplete line, and the next line would be appended to it.
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")
    if lines and rest:
        with suppress(ValueError, AttributeError):
            if json.loads(lines[0]).get("study_name") == _NAME:
                file.truncate(sum(map(len, lines)) + len(lines))
                return (f"storage={str(path)!r} ended within a line: its {len(rest)} bytes were removed",)
    return ()

"""Storage of a study: exclusive access, repair after a kill, and a check that the search is the same."""

__all__ = ["OpenStudy", "describe_search", "open_study"]

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from torch import Tensor, nn

from panther._descriptions import describe_function
from panther.compression.calibration.descriptions import checksum, described_batches, shortened
from panther.errors import ConfigError, require_extra
from panther.nn.sketch_record import plain_state
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


_NAME = "panther.tune"  # name of the study in the storage
_IDENTITY, _UNCHANGED = "panther identity", "panther unchanged"
_FUNCTIONS = ("forward_fn", "loss_fn", "mask_fn")
_EARLIER = re.compile(r"\S+( [0-9a-f]{8})?(?<!none)")  # the name of a function, and a hash of its code alone
# Relative difference of the unchanged model's metric that is allowed in a resumed study, for another machine's
# rounding.
_AGREES = 1e-4


@dataclass(frozen=True)
class OpenStudy:
    """An open study.

    Attributes:
        study: Optuna's study.
        config: The arguments of the search.
        remembered: Stored figures of the unchanged model, and the seed; empty for a new study.
        notes: Repairs of the storage.
    """

    study: Any
    config: TuneConfig
    remembered: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())

    @property
    def seed(self) -> int:
        """Return the seed of the study.

        Raises:
            ConfigError: If the stored seed differs from the argument.
        """
        new_seed = self.config.new_seed
        seed = int(self.remembered.get("seed", new_seed))
        if self.config.seed is not None and seed != new_seed:
            raise self.differs(f"seed {seed} instead of {self.config.seed}")
        return seed

    def differs(self, how: str) -> ConfigError:
        """Return the error about a storage that has another study."""
        return ConfigError(f"storage={self.config.storage!r} has another study ({how}): use a new file, or delete it")

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
            before, now = self.remembered[figure], getattr(unchanged, figure)
            if abs(before - now) > _AGREES * max(abs(before), abs(now)):
                raise ConfigError(
                    f"storage={self.config.storage!r} has another study, in which {function} returned {before:.6g} for "
                    f"the unchanged model, and now it returns {now:.6g}: use a new file, or the same data and function"
                )


@contextmanager
def open_study(config: TuneConfig, description: Mapping[str, str]) -> Iterator[OpenStudy]:
    """Create or resume the study of a storage, which no other search can open meanwhile.

    Args:
        config: The arguments of the search.
        description: What must not change when the search is resumed, by :func:`describe_search`.

    Raises:
        ConfigError: If the storage cannot be opened, is open, or has another study.
    """
    optuna: Any = require_extra("optuna", "tune")
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    storage: Any = config.storage
    pruner = make_pruner(optuna, config.pruner)
    if storage is not None and not isinstance(storage, str | os.PathLike | optuna.storages.BaseStorage):
        raise ConfigError(
            f"storage must be a path, a database's URL or a storage of Optuna, not {type(storage).__name__}"
        )
    is_file = storage is not None and isinstance(storage, str | os.PathLike) and "://" not in str(storage)
    path: Any = storage
    with _locked(path) if is_file else nullcontext(None) as file:
        notes = _repaired(path, file) if file is not None else ()
        try:
            with quiet():
                study = optuna.create_study(
                    storage=JournalStorage(JournalFileBackend(str(path))) if is_file else storage,
                    sampler=None if isinstance(config.sampler, str) else config.sampler,
                    pruner=pruner,
                    study_name=_NAME,
                    directions=config.goal.directions,
                    load_if_exists=True,
                )
                stored = json.loads(study.user_attrs.get(_IDENTITY, "{}"))
                num_trials = len(study.get_trials(deepcopy=False))
        except Exception as error:
            raise _unreadable(storage, error) from error
        opened = OpenStudy(study, config, json.loads(study.user_attrs.get(_UNCHANGED, "{}")), notes)
        if not (stored or num_trials):
            study.set_user_attr(_IDENTITY, json.dumps(dict(description)))
        elif differing := [name for name in {**description, **stored} if stored.get(name) != description.get(name)]:
            how = ", ".join(f"{name} {stored.get(name)} instead of {description.get(name)}" for name in differing[:3])
            if any(_EARLIER.fullmatch(stored.get(name, "")) for name in _FUNCTIONS if name in differing):
                how += ", where an earlier version of Panther described functions by less"
            raise opened.differs(how)
        with exclusive_access(study, storage) if storage is not None and not is_file else nullcontext():
            yield opened


def describe_search(config: TuneConfig, model: nn.Module, space: str, /, **entries: str) -> dict[str, str]:
    """Describe the properties of a search that must not change when its study is resumed."""
    goal = config.goal
    tensors = [(name, value) for name, value in plain_state(model).items() if isinstance(value, Tensor)]
    description = {
        "objective": goal.name,
        "constraint": " and ".join(constraint.text for constraint in goal.constraints) or "none",
        "direction": "maximize" if goal.higher_is_better else "minimize",
        "space": space,
        **{name: describe_function(getattr(config, name)) for name in _FUNCTIONS},
        "repeats": str(config.repeats),
        "model": f"{type(model).__name__} {checksum(tensors):08x}",
        "calibration": "none" if config.calibration is None else described_batches(config.calibration),
    }
    return {name: shortened(text) for name, text in (description | entries).items()}


def _unreadable(storage: Any, error: Exception) -> ConfigError:
    return ConfigError(
        f"storage={storage!r} cannot be opened ({type(error).__name__}: {error}): use a new file, or a file of a study "
        "of panther.tune"
    )


@contextmanager
def _locked(path: str | os.PathLike[str]) -> Iterator[IO[bytes] | None]:
    """Lock a file until the process ends. Yield None if the file system has no locks.

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
            yield None
            return
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # Forked processes still have the file open.


def _repaired(path: str | os.PathLike[str], file: IO[bytes]) -> tuple[str, ...]:
    """Remove an incomplete last line from a file of a search, and return a note about it.

    A process that is killed during a write leaves an incomplete line, and the next line would be appended to it.
    """
    with open(path, "rb") as read:
        first = read.readline()
        read.seek(0)
        data = read.read() if first.endswith(b"\n") else b""
    if not data or data.endswith(b"\n"):
        return ()
    with suppress(ValueError, AttributeError):
        if json.loads(first).get("study_name") == _NAME:
            complete_bytes = data.rindex(b"\n") + 1
            file.truncate(complete_bytes)
            return (f"storage={str(path)!r} ended within a line: its {len(data) - complete_bytes} bytes were removed",)
    return ()

"""Storage of a study: exclusive access, repair after a kill, and a check that the search is the same."""

__all__ = ["OpenStudy", "check_agrees", "open_study"]

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from panther.errors import ConfigError, require_extra
from panther.tuning.goal import Figures, Goal
from panther.tuning.search.claim import exclusive_access
from panther.tuning.search.samplers import make_pruner, quiet

_NAME = "panther.tune"  # name of the study in the storage
_IDENTITY, _UNCHANGED = "panther identity", "panther unchanged"
# Relative difference of the unchanged model's metric that is allowed in a resumed study, for another machine's
# rounding.
_AGREES = 1e-4


@dataclass(frozen=True)
class OpenStudy:
    """An open study.

    Attributes:
        study: Optuna's study.
        storage: The user's argument, for messages.
        remembered: Stored figures of the unchanged model, and the seed; empty for a new study.
        notes: Repairs of the storage.
    """

    study: Any
    storage: Any
    remembered: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())

    def other(self, how: str) -> ConfigError:
        """Return the error about a storage that has another study."""
        return ConfigError(f"storage={self.storage!r} has another study ({how}): use a new file, or delete it")


@contextmanager
def open_study(storage: Any, goal: Goal, identity: Mapping[str, str], sampler: Any, pruner: Any) -> Iterator[OpenStudy]:
    """Create or resume the study of a storage, which no other search can open meanwhile.

    Raises:
        ConfigError: If the storage cannot be opened, is open, or has another study.
    """
    optuna = require_extra("optuna", "tune")
    made_pruner = make_pruner(optuna, pruner)
    _check(optuna, storage)
    is_file = storage is not None and isinstance(storage, str | os.PathLike) and "://" not in str(storage)
    with _locked(storage) if is_file else nullcontext(None) as file:
        notes = _repaired(storage, file) if file is not None else ()
        try:
            with quiet():
                study = optuna.create_study(
                    storage=_backend(optuna, storage) if is_file else storage,
                    sampler=None if isinstance(sampler, str) else sampler,
                    pruner=made_pruner,
                    study_name=_NAME,
                    directions=goal.directions,
                    load_if_exists=True,
                )
                stored = json.loads(study.user_attrs.get(_IDENTITY, "{}"))
                num_trials = len(study.get_trials(deepcopy=False))
        except Exception as error:
            raise _unreadable(storage, error) from error
        opened = OpenStudy(study, storage, json.loads(study.user_attrs.get(_UNCHANGED, "{}")), notes)
        if stored or num_trials:
            if differing := [name for name in {**identity, **stored} if stored.get(name) != identity.get(name)]:
                differences = ", ".join(
                    f"{name} {stored.get(name)} instead of {identity.get(name)}" for name in differing[:3]
                )
                raise opened.other(differences)
        else:
            study.set_user_attr(_IDENTITY, json.dumps(dict(identity)))
        with exclusive_access(study, storage) if storage is not None and not is_file else nullcontext():
            yield opened


def check_agrees(opened: OpenStudy, goal: Goal, unchanged: Figures, seed: int) -> None:
    """Store the unchanged model's figures and the seed in a new study, or raise if a resumed study has others."""
    if not opened.remembered:
        opened.study.set_user_attr(_UNCHANGED, json.dumps(asdict(unchanged) | {"seed": seed}))
        return
    names = {"evaluate": "metric"} | ({} if isinstance(goal.objective, str) else {goal.name: "objective"})
    for function, figure in names.items():
        before, now = opened.remembered[figure], getattr(unchanged, figure)
        if abs(before - now) > _AGREES * max(abs(before), abs(now)):
            raise ConfigError(
                f"storage={opened.storage!r} has another study, in which {function} returned {before:.6g} for the "
                f"unchanged model, and now it returns {now:.6g}: use a new file, or the same data and function"
            )


def _check(optuna: Any, storage: Any) -> None:
    if storage is not None and not isinstance(storage, str | os.PathLike | optuna.storages.BaseStorage):
        raise ConfigError(
            f"storage must be a path, a database's URL or a storage of Optuna, not {type(storage).__name__}"
        )


def _unreadable(storage: Any, error: Exception) -> ConfigError:
    return ConfigError(
        f"storage={storage!r} cannot be opened ({type(error).__name__}: {error}): use a new file, or a file of a study "
        "of panther.tune"
    )


def _backend(optuna: Any, path: str | os.PathLike[str]) -> Any:
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))


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

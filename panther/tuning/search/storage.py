"""Where a study is stored: opened by one search at a time, whole again after a kill, and of the same search."""

__all__ = ["Opened", "check_agrees", "opened_study"]

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from panther.errors import ConfigError, require_extra
from panther.tuning.goal import Figures, Goal
from panther.tuning.search.claim import claimed
from panther.tuning.search.samplers import make_pruner, quiet

_NAME = "panther.tune"  # of the study in the storage
_IDENTITY, _UNCHANGED = "panther identity", "panther unchanged"
_AGREES = 1e-4  # relative difference of the unchanged model's metric in a study that is continued: another machine's


@dataclass(frozen=True)
class Opened:
    """A study that is open.

    Attributes:
        study: Optuna's.
        storage: As it was given, for messages.
        known: What it remembers of the unchanged model, and the seed; empty if it is new.
        notes: What was mended.
    """

    study: Any
    storage: Any
    known: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())

    def other(self, how: str) -> ConfigError:
        """Return the error of a storage that holds another study."""
        return ConfigError(f"storage={self.storage!r} holds another study ({how}): give a new file, or delete it")


@contextmanager
def opened_study(storage: Any, goal: Goal, identity: Mapping[str, str], sampler: Any, pruner: Any) -> Iterator[Opened]:
    """Make or continue the study of a storage, which no other search can open meanwhile.

    Raises:
        ConfigError: If the storage cannot be opened, is open, or holds another study.
    """
    optuna = require_extra("optuna", "tune")
    chosen = make_pruner(optuna, pruner)
    _check(optuna, storage)
    is_file = storage is not None and isinstance(storage, str | os.PathLike) and "://" not in str(storage)
    with _locked(storage) if is_file else nullcontext(None) as file:
        notes = _mended(storage, file) if file is not None else ()
        try:
            with quiet():
                study = optuna.create_study(
                    storage=_backend(optuna, storage) if is_file else storage,
                    sampler=None if isinstance(sampler, str) else sampler,
                    pruner=chosen,
                    study_name=_NAME,
                    directions=goal.directions,
                    load_if_exists=True,
                )
                known = json.loads(study.user_attrs.get(_IDENTITY, "{}"))
                found = len(study.get_trials(deepcopy=False))
        except Exception as error:
            raise _unreadable(storage, error) from error
        opened = Opened(study, storage, json.loads(study.user_attrs.get(_UNCHANGED, "{}")), notes)
        if known or found:
            if differing := [name for name in {**identity, **known} if known.get(name) != identity.get(name)]:
                shown = ", ".join(f"{name} {known.get(name)} instead of {identity.get(name)}" for name in differing[:3])
                raise opened.other(shown)
        else:
            study.set_user_attr(_IDENTITY, json.dumps(dict(identity)))
        with claimed(study, storage) if storage is not None and not is_file else nullcontext():
            yield opened


def check_agrees(opened: Opened, goal: Goal, unchanged: Figures, seed: int) -> None:
    """Note the unchanged model's figures and the seed in the study, or raise if those that it has are others."""
    if not opened.known:
        opened.study.set_user_attr(_UNCHANGED, json.dumps(asdict(unchanged) | {"seed": seed}))
        return
    names = {"evaluate": "metric"} | ({} if isinstance(goal.objective, str) else {goal.name: "objective"})
    for function, figure in names.items():
        before, now = opened.known[figure], getattr(unchanged, figure)
        if abs(before - now) > _AGREES * max(abs(before), abs(now)):
            raise ConfigError(
                f"storage={opened.storage!r} holds another study, in which {function} returned {before:.6g} for the "
                f"unchanged model, and now it returns {now:.6g}: give a new file, or the same data and function"
            )


def _check(optuna: Any, storage: Any) -> None:
    if storage is not None and not isinstance(storage, str | os.PathLike | optuna.storages.BaseStorage):
        raise ConfigError(
            f"storage must be a path, a database's URL or a storage of Optuna, not {type(storage).__name__}"
        )


def _unreadable(storage: Any, error: Exception) -> ConfigError:
    return ConfigError(
        f"storage={storage!r} cannot be opened ({type(error).__name__}: {error}): give a new file, or one of a study "
        "of panther.tune"
    )


def _backend(optuna: Any, path: str | os.PathLike[str]) -> Any:
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))


@contextmanager
def _locked(path: str | os.PathLike[str]) -> Iterator[IO[bytes] | None]:
    """Hold a lock on a file, which ends with the process; None where the file system has no locks.

    It is not Optuna's own lock, which is held for a write alone, and which a kill leaves behind.
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
                f"storage={str(path)!r} is open in another search: wait until that has ended, or give another file"
            ) from None
        except (ImportError, OSError):  # Windows; some network file systems
            yield None
            return
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # processes that were forked meanwhile hold the file too


def _mended(path: str | os.PathLike[str], file: IO[bytes]) -> tuple[str, ...]:
    """Remove an incomplete last line from a file of ours, and return a note of it.

    A process that is killed as it writes leaves one, to which the next line would be joined.
    """
    with open(path, "rb") as read:
        first = read.readline()
        read.seek(0)
        data = read.read() if first.endswith(b"\n") else b""
    if not data or data.endswith(b"\n"):
        return ()
    with suppress(ValueError, AttributeError):
        if json.loads(first).get("study_name") == _NAME:
            whole = data.rindex(b"\n") + 1
            file.truncate(whole)
            return (f"storage={str(path)!r} ended within a line: its {len(data) - whole} bytes were removed",)
    return ()

"""Storage of a study: exclusive access, repair after a kill, and a check that the search is the same."""

__all__ = ["OpenStudy", "describe_search", "open_study"]

import json
import os
import re
from collections.abc import Iterator, Mapping
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
from panther.tuning.study.exclusion import exclusive_access

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
                    storage=_backend(optuna, path) if is_file else storage,
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

"""Storage of a study: exclusive access, repair after a kill, and a check that the search is the same."""

__all__ = ["OpenStudy", "describe_search", "open_study"]

import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import IO, Any

from torch import Tensor, nn

from panther._torch import tree_leaves
from panther.errors import ConfigError, require_extra
from panther.tuning.config import TuneConfig
from panther.tuning.goal import Figures, Goal
from panther.tuning.guards import checksum
from panther.tuning.samplers import make_pruner, quiet
from panther.tuning.study.exclusion import exclusive_access

_NAME = "panther.tune"  # name of the study in the storage
_IDENTITY, _UNCHANGED = "panther identity", "panther unchanged"
# Relative difference of the unchanged model's metric that is allowed in a resumed study, for another machine's
# rounding.
_AGREES = 1e-4
_LONG = 80  # An entry of a description with more characters is replaced by its beginning and a hash.
_PLAIN = (str, bytes, int, float, bool, type(None))


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
            raise opened.differs(
                ", ".join(f"{name} {stored.get(name)} instead of {description.get(name)}" for name in differing[:3])
            )
        with exclusive_access(study, storage) if storage is not None and not is_file else nullcontext():
            yield opened


def describe_search(config: TuneConfig, model: nn.Module, space: str, /, **entries: str) -> dict[str, str]:
    """Describe the properties of a search that must not change when its study is resumed."""
    goal = config.goal
    tensors = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    description = {
        "objective": goal.name,
        "constraint": " and ".join(constraint.text for constraint in goal.constraints) or "none",
        "direction": "maximize" if goal.higher_is_better else "minimize",
        "space": space,
        **{name: _function_name(getattr(config, name)) for name in ("forward_fn", "loss_fn", "mask_fn")},
        "repeats": str(config.repeats),
        "model": f"{type(model).__name__} {checksum(tensors):08x}",
        "calibration": "none" if config.calibration is None else _batches(config.calibration),
    }
    return {name: _short(text) for name, text in (description | entries).items()}


def _function_name(function: Callable[..., Any] | None) -> str:
    """Return the name of a function, with a hash of its code, because all lambdas have the same name."""
    if function is None:
        return "none"
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return name if code is None else f"{name} {zlib.crc32(repr(_code(code)).encode()):08x}"


def _code(code: CodeType) -> list[Any]:
    """Return the bytecode, names and constants of a function, without addresses and line numbers."""
    constants = [_code(constant) if isinstance(constant, CodeType) else constant for constant in code.co_consts]
    return [code.co_code, code.co_names, [constant for constant in constants if isinstance(constant, (*_PLAIN, list))]]


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({zlib.crc32(text.encode()):08x})"


def _batches(calibration: Any) -> str:
    """Return the number of batches and a hash of their tensors, or only the type unless the batches are a sequence."""
    if not isinstance(calibration, Sequence):
        return f"a {type(calibration).__name__}"
    leaves = [
        leaf for batch in calibration for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    ]
    return f"{len(calibration)} batches {checksum(enumerate(leaves)):08x}"


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

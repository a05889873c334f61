"""What a training run is told: one frozen record, from Python, JSON or TOML."""

__all__ = ["TrainConfig"]

import dataclasses
import difflib
import functools
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from panther.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a :class:`Trainer`; checked when it is made, and never changed.

    Raises:
        ConfigError: If a value is of another type, outside of its range, or does not go with another.

    Example:
        >>> config = TrainConfig(epochs=3, learning_rate=1e-3)
        >>> TrainConfig.from_dict({"epochs": 3, "learning_rat": 1e-3})
        Traceback (most recent call last):
        panther.errors.ConfigError: 'learning_rat' is no setting: did you mean 'learning_rate'?
    """

    epochs: int | None = None
    """Passes over the training data; either this or ``max_steps``, one epoch with neither."""

    max_steps: int | None = None
    """Steps of the optimizer after which training ends, in the middle of an epoch too."""

    batch_size: int | None = None
    """Samples a process and batch, where a Dataset is given instead of a DataLoader."""

    gradient_accumulation_steps: int = 1
    """Batches whose gradients make one step of the optimizer; they are averaged over ranks once a step."""

    gradient_clipping: float | None = None
    """Largest norm of the gradient of the whole model; None does not clip."""

    strategy: Literal["auto", "ddp", "fsdp", "zero1", "replicate", "tp", "pp", "hybrid"] = "auto"
    """How the model is spread over the processes: copied (``ddp``), sharded (``fsdp``), copied with the optimizer's
    states shared out (``zero1``), layers cut (``tp``), cut into stages (``pp``), or several at once (``hybrid``).
    ``auto`` asks :func:`panther.distributed.plan_parallelism`, and cuts layers only where nothing else fits."""

    data_parallel_size: int | None = None
    """Processes along the axis of data parallelism; None is what the other two leave of the world."""

    tensor_parallel_size: int | None = None
    """Processes that share layers; None is the world for ``tp``, else 1."""

    pipeline_parallel_size: int | None = None
    """Stages of a pipeline; None is the world for ``pp``, else 1."""

    pipeline_layers: str | None = None
    """Name of the ModuleList at whose elements the model is cut into stages; an nn.Sequential needs none."""

    pipeline_microbatches: int | None = None
    """Pieces of a batch in a pipeline; None is as many as there are stages."""

    pipeline_schedule: str = "1f1b"
    """As in :func:`panther.distributed.make_schedule`."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What products are computed in; parameters stay as they are. fp16 scales the loss."""

    learning_rate: float | None = None
    """Of the largest step, in every group of parameters; None leaves the optimizer's own, or AdamW's 1e-3 where none
    is given."""

    learning_rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How the learning rate grows with the number of data-parallel processes."""

    warmup_steps: int = 0
    """Steps in which the learning rate rises linearly from 0."""

    schedule: Literal["constant", "linear", "cosine", "own"] = "constant"
    """How the learning rate falls to 0 after that, by the last step; ``own`` leaves it to a callback."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is computed again in backward: nothing, all but the products of matrices, or blocks as a whole."""

    compile: bool = False
    """Whether the model goes through torch.compile."""

    seed: int = 0
    """Of weights made later, of the order of samples, and of dropout."""

    deterministic: bool = False
    """Whether torch may use only algorithms that give the same bits every time; others raise."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do about a loss or gradient that is not finite: stop with an error, or leave out and count the step."""

    checkpoint_dir: str | None = None
    """Where checkpoints, the log and the trackers' files go; None writes nothing."""

    checkpoint_every_n_steps: int | None = None
    """Steps between two checkpoints; there is always one at the end."""

    checkpoint_every_n_epochs: int | None = None
    """Epochs between two checkpoints."""

    checkpoint_asynchronously: bool = True
    """Whether training goes on while a checkpoint is written."""

    keep_checkpoints: int | None = 3
    """Checkpoints that are left; None leaves all."""

    resume: str = "auto"
    """``"auto"`` goes on from the latest sound checkpoint of ``checkpoint_dir``, if there is one; ``"never"`` starts
    anew, and refuses a directory with checkpoints; else the path of a checkpoint."""

    log_every_n_steps: int = 10
    """Steps between two records of the history and the trackers."""

    validate_every_n_steps: int | None = None
    """Steps between two passes over the validation data; None is once an epoch."""

    trackers: tuple[Literal["jsonl", "tensorboard", "mlflow"], ...] = ("jsonl",)
    """Where records go besides the history; on the first rank only."""

    run_name: str = "run"
    """How trackers call the run."""

    progress: bool = True
    """Whether the first rank shows a progress bar, if it writes to a terminal."""

    profile: bool = False
    """Whether the first steps are profiled to ``checkpoint_dir/profile``."""

    find_unused_parameters: bool = False
    """For DDP: whether forwards may leave parameters unused."""

    bucket_cap_mb: float | None = None
    """For DDP: megabytes of gradients that are sent together; None is torch's choice."""

    comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    """For DDP: what gradients are compressed by."""

    timeout_s: float = 300.0
    """Seconds to wait for other ranks."""

    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Whatever the user wants to keep with the run; stored in checkpoints and trackers."""

    def __post_init__(self) -> None:
        """Check every value, and the pairs that exclude each other."""
        for name, kind in _types().items():
            value = getattr(self, name)
            if isinstance(value, list):  # JSON and TOML have no tuples
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, str) and typing.get_origin(kind) is tuple:  # one, and a comma for more
                object.__setattr__(self, name, tuple(value.split(",")))
            elif isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif isinstance(value, int) and not isinstance(value, bool) and float in (*typing.get_args(kind), kind):
                object.__setattr__(self, name, float(value))
            _check(name, getattr(self, name), kind)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        for name in ("gradient_clipping", "learning_rate", "bucket_cap_mb", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value} must be positive and finite")
        if self.epochs is not None and self.max_steps is not None:
            raise ConfigError(f"epochs={self.epochs} and max_steps={self.max_steps} exclude each other: give one")
        if self.schedule == "own" and self.warmup_steps:
            raise ConfigError(f"schedule='own' and warmup_steps={self.warmup_steps} exclude each other: give one")
        if self.seed >= 1 << 63:
            raise ConfigError(f"seed={self.seed} must be below 2^63")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"trackers={list(self.trackers)} names one twice: name each once")
        for name in ("run_name", "resume", "checkpoint_dir"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty")
        if self.resume not in ("auto", "never") and self.resume.lower() in ("auto", "never", "none", "true", "false"):
            raise ConfigError(f"resume={self.resume!r} must be 'auto', 'never' or the path of a checkpoint")
        try:
            json.dumps(dict(self.extra))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"extra={self.extra!r} must be what JSON can hold ({error})") from None
        saving = self.checkpoint_every_n_steps or self.checkpoint_every_n_epochs
        if saving and self.checkpoint_dir is None:
            raise ConfigError("checkpoints are asked for and checkpoint_dir is None: name a directory")
        if self.profile and self.checkpoint_dir is None:
            raise ConfigError("profile=True and checkpoint_dir=None: name a directory to write the profile to")
        beside = set(self.trackers) & {"tensorboard", "mlflow"}
        if beside and self.checkpoint_dir is None:
            raise ConfigError(
                f"the trackers {', '.join(sorted(beside))} write to checkpoint_dir, which is None: name one"
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make one from a mapping.

        Raises:
            ConfigError: If a key is unknown, with the nearest known one, or a value does not fit.
        """
        known = [entry.name for entry in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"use some of {', '.join(known)}"
                raise ConfigError(f"{key!r} is no setting: {hint}")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """All settings, as JSON has them."""
        return {
            entry.name: list(value) if isinstance(value := getattr(self, entry.name), tuple) else _plain(value)
            for entry in dataclasses.fields(self)
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a TOML or JSON file; of one with a table ``train``, that table.

        Raises:
            ConfigError: If it cannot be read, or a setting is wrong.
        """
        settings = read_settings(path)
        inner = settings.get("train")
        return cls.from_dict(inner if isinstance(inner, Mapping) else settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TOML or JSON file, by the name's ending; settings that are None are left out of TOML.

        Raises:
            ConfigError: If the name ends in something else.
        """
        path, settings = Path(path), self.to_dict()
        if path.suffix == ".json":
            text = json.dumps(settings, indent=2) + "\n"
        elif path.suffix == ".toml":
            text = _to_toml({key: value for key, value in settings.items() if value is not None})
        else:
            raise ConfigError(f"{path} must end in .toml or .json")
        path.write_text(text, encoding="utf-8")


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a TOML or JSON file holds, which must be a table.

    Raises:
        ConfigError: If it cannot be read.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path} must be TOML or JSON, and be called so: give a name that ends in .toml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a TOML or JSON file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no sound {path.suffix[1:].upper()} ({error})") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a table of settings")
    return settings


_LEAST = {
    "epochs": 1,
    "max_steps": 1,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "pipeline_microbatches": 1,
    "warmup_steps": 0,
    "seed": 0,
    "checkpoint_every_n_steps": 1,
    "checkpoint_every_n_epochs": 1,
    "keep_checkpoints": 1,
    "log_every_n_steps": 1,
    "validate_every_n_steps": 1,
}


def asks_for_text(name: str) -> bool:
    """Whether a setting is a text, or may be."""
    kind = _types().get(name)
    return kind is str or (typing.get_origin(kind) is types.UnionType and str in typing.get_args(kind))


@functools.cache
def _types() -> dict[str, Any]:
    return typing.get_type_hints(TrainConfig)


def _check(name: str, value: Any, kind: Any) -> None:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return
        kind = next(arg for arg in args if arg is not type(None))
        origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{name}={value!r} is unknown: use one of {', '.join(map(repr, args))}")
    elif origin is tuple:
        if not isinstance(value, tuple):
            raise ConfigError(f"{name}={value!r} must be a list")
        for item in value:
            _check(name, item, args[0])
    else:
        wanted = Mapping if origin is not None else kind
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"{name}={value!r} must be {_WORDS.get(wanted, 'a table')}, not {type(value).__name__}")


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _to_toml(settings: Mapping[str, Any]) -> str:
    """Settings as TOML: of its types, JSON's strings, numbers, booleans and arrays of them are written alike."""
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(key, value)}" for key, value in settings.items() if key not in tables]
    for name, table in tables.items():
        if table:
            lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_value(key, value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _value(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(inner)} = {_value(inner, item)}" for inner, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(key, item) for item in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, bool | int | float | str):
        return _text(value)
    raise ConfigError(f"{key}={value!r} cannot be written as TOML: use JSON")


def _text(value: bool | int | float | str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

"""The settings of a training run, from Python, JSON or TOML."""

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

# The fields that replace a setting's name in other libraries, where spelling alone does not lead to it.
_NAMES_ELSEWHERE = {
    "lr": "learning_rate",
    "amp": "mixed_precision",
    "bf16": "mixed_precision",
    "fp16": "mixed_precision",
    "max_norm": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "output_dir": "checkpoint_dir",
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a :class:`Trainer`, checked when the object is made and constant afterwards.

    Raises:
        ConfigError: If a name is unknown, a value has the wrong type or is out of range, or two settings contradict
            each other.

    Example:
        >>> config = TrainConfig(epochs=3, learning_rate=1e-3)
        >>> TrainConfig(epochs=3, lr=1e-3)
        Traceback (most recent call last):
        panther.errors.ConfigError: 'lr' is not a setting of TrainConfig: did you mean 'learning_rate'?
    """

    epochs: int | None = None
    """Number of passes over the training data. Set either this or ``max_steps``; with neither it is 1."""

    max_steps: int | None = None
    """Number of optimizer steps after which training ends, also in the middle of an epoch."""

    batch_size: int | None = None
    """Samples per batch and process. It is needed where the data is a Dataset and not a DataLoader."""

    gradient_accumulation_steps: int = 1
    """Number of batches whose gradients are added for one optimizer step. Ranks exchange gradients once per step."""

    gradient_clipping: float | None = None
    """Largest allowed norm of the gradient of the whole model. None does not clip."""

    strategy: Literal["auto", "ddp", "fsdp", "zero1", "replicate", "tp", "pp", "hybrid"] = "auto"
    """How the model is distributed over the processes: replicated (``ddp``; ``replicate`` does the same with FSDP2),
    sharded (``fsdp``), replicated with a sharded optimizer state (``zero1``), tensor parallelism (``tp``), pipeline
    parallelism (``pp``), or several of them (``hybrid``). ``auto`` follows
    :func:`panther.distributed.plan_parallelism`, and uses tensor parallelism only if nothing else fits."""

    data_parallel_size: int | None = None
    """Number of data-parallel ranks. None is the world size divided by the other two sizes."""

    tensor_parallel_size: int | None = None
    """Number of ranks that share each layer. None is the world size for ``tp``, otherwise 1."""

    pipeline_parallel_size: int | None = None
    """Number of ranks that a pipeline extends over. None is the world size for ``pp``, otherwise 1."""

    pipeline_layers: str | None = None
    """Name of the ModuleList between whose modules the model is split into stages. An nn.Sequential needs none."""

    num_microbatches: int | None = None
    """Number of microbatches that a pipeline splits each batch into. None is ``pipeline_parallel_size``."""

    pipeline_schedule: str = "1f1b"
    """Schedule of the pipeline, one of those of :func:`panther.distributed.make_schedule`."""

    mixed_precision: Literal["bf16", "fp16"] | None = None
    """Dtype of matrix products under autocast; parameters keep theirs. ``fp16`` also scales the loss. None computes in
    the dtype of the parameters."""

    learning_rate: float | None = None
    """Peak learning rate of every parameter group. None keeps the optimizer's own (1e-3 for the default AdamW)."""

    learning_rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How the learning rate grows with the number of data-parallel ranks."""

    warmup_steps: int = 0
    """Number of steps in which the learning rate rises linearly from 0 to its peak."""

    schedule: Literal["constant", "linear", "cosine", "callback"] = "constant"
    """How the learning rate develops after the warm-up: it stays constant, or falls to 0 until the last step.
    ``callback`` leaves it to a scheduler in a callback."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes to save memory: nothing, everything except matrix products, or whole blocks."""

    compile: bool = False
    """Whether the model is compiled by ``torch.compile``."""

    seed: int = 0
    """Seed of weights that are drawn after ``fit`` begins, of the order of the samples, and of dropout."""

    deterministic: bool = False
    """Whether torch may only use algorithms that give the same bits in every run. Operations without one raise."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens when a loss or a gradient is infinite or NaN: training stops with an error, or the step is skipped
    and counted."""

    checkpoint_dir: str | None = None
    """Directory of checkpoints, the log and the files of trackers. None writes nothing."""

    checkpoint_every_n_steps: int | None = None
    """Number of steps between checkpoints. The last step is always saved."""

    checkpoint_every_n_epochs: int | None = None
    """Number of epochs between checkpoints."""

    checkpoint_asynchronously: bool = True
    """Whether training continues while a checkpoint is being written."""

    keep_checkpoints: int | None = 3
    """Number of checkpoints to keep; older ones are removed. None keeps all."""

    resume: str = "auto"
    """Where training starts: ``"auto"`` continues from the latest undamaged checkpoint of ``checkpoint_dir`` if there
    is one, ``"never"`` starts anew and refuses a directory with checkpoints, any other value is the path of the
    checkpoint to continue from."""

    log_every_n_steps: int = 10
    """Number of steps between records of the history and the trackers."""

    validate_every_n_steps: int | None = None
    """Number of steps between passes over the validation data. None validates once per epoch."""

    trackers: tuple[Literal["jsonl", "tensorboard", "mlflow"], ...] = ("jsonl",)
    """Where the first rank writes records, in addition to the history."""

    run_name: str = "run"
    """Name of the run in the trackers."""

    progress: bool = True
    """Whether the first rank shows a progress bar when its output is a terminal."""

    profile: bool = False
    """Whether the first steps are profiled into ``checkpoint_dir/profile``."""

    find_unused_parameters: bool = False
    """For DDP, whether a forward pass may leave some parameters unused."""

    bucket_cap_mb: float | None = None
    """For DDP, the size in megabytes of the buckets in which gradients are sent. None keeps torch's default."""

    comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    """For DDP, how gradients are compressed before they are sent. None sends them unchanged."""

    timeout_s: float = 300.0
    """Seconds to wait for other ranks."""

    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Anything else to keep with the run, of types that JSON has. It is stored in checkpoints and trackers."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuse unknown names before ``__init__`` does, which could not suggest the right one."""
        known = [entry.name for entry in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                near = [_NAMES_ELSEWHERE.get(name, ""), *difflib.get_close_matches(name, known, 1)]
                suggestion = next(filter(None, near), None)
                hint = f"did you mean {suggestion!r}?" if suggestion else f"use some of {', '.join(known)}"
                raise ConfigError(f"{name!r} is not a setting of TrainConfig: {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Convert and check every value, and refuse settings that contradict each other."""
        for name, kind in _types().items():
            value = getattr(self, name)
            if isinstance(value, list):  # JSON and TOML have no tuples
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, str) and typing.get_origin(kind) is tuple:  # "a,b", from the command line
                object.__setattr__(self, name, tuple(value.split(",")))
            elif isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif isinstance(value, int) and not isinstance(value, bool) and float in (*typing.get_args(kind), kind):
                object.__setattr__(self, name, float(value))
            # After the conversions, which the frozen dataclass allows only by object.__setattr__.
            _check(name, getattr(self, name), kind)
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise ConfigError(f"{name}={value} must be at least {minimum}")
        for name in ("gradient_clipping", "learning_rate", "bucket_cap_mb", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name}={value} must be positive and finite")
        if self.epochs is not None and self.max_steps is not None:
            raise ConfigError(f"epochs={self.epochs} and max_steps={self.max_steps} exclude each other: give one")
        if self.schedule == "callback" and self.warmup_steps:
            raise ConfigError(f"schedule='callback' and warmup_steps={self.warmup_steps} exclude each other: give one")
        if self.seed >= 1 << 63:
            raise ConfigError(f"seed={self.seed} must be below 2^63")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"trackers={list(self.trackers)} repeats a tracker: name each once")
        for name in ("run_name", "resume", "checkpoint_dir"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty")
        if self.resume not in ("auto", "never") and self.resume.lower() in ("auto", "never", "none", "true", "false"):
            raise ConfigError(f"resume={self.resume!r} must be 'auto', 'never' or the path of a checkpoint")
        try:
            json.dumps(dict(self.extra))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"extra={self.extra!r} must hold only values that JSON can represent ({error})") from None
        saving = self.checkpoint_every_n_steps or self.checkpoint_every_n_epochs
        if saving and self.checkpoint_dir is None:
            raise ConfigError(
                "checkpoint_every_n_steps and checkpoint_every_n_epochs need checkpoint_dir, which is None: set it"
            )
        if self.profile and self.checkpoint_dir is None:
            raise ConfigError("profile=True needs checkpoint_dir, which is None: set it")
        beside = set(self.trackers) & {"tensorboard", "mlflow"}
        if beside and self.checkpoint_dir is None:
            raise ConfigError(f"trackers={sorted(beside)} need checkpoint_dir, which is None: set it")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Return the configuration with these settings.

        Raises:
            ConfigError: If a key is unknown or a value is invalid.
        """
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings in types that JSON has."""
        return {
            entry.name: list(value) if isinstance(value := getattr(self, entry.name), tuple) else _plain(value)
            for entry in dataclasses.fields(self)
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a TOML or JSON file. If it has a table ``train``, only that is used.

        Raises:
            ConfigError: If the file cannot be read, or a setting is invalid.
        """
        settings = read_settings(path)
        inner = settings.get("train")
        return cls.from_dict(inner if isinstance(inner, Mapping) else settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TOML or JSON file, depending on the suffix. TOML omits settings that are None.

        Raises:
            ConfigError: If the suffix is neither .toml nor .json.
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
    """Return the table in a TOML or JSON file.

    Raises:
        ConfigError: If the file cannot be read or does not hold a table.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path} must end in .toml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a TOML or JSON file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()} ({error})") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a table of settings")
    return settings


_COUNTS = (
    "epochs", "max_steps", "batch_size", "gradient_accumulation_steps", "data_parallel_size", "tensor_parallel_size",
    "pipeline_parallel_size", "num_microbatches", "checkpoint_every_n_steps", "checkpoint_every_n_epochs",
    "keep_checkpoints", "log_every_n_steps", "validate_every_n_steps",
)  # fmt: skip
_MINIMUM = {"warmup_steps": 0, "seed": 0} | dict.fromkeys(_COUNTS, 1)


def asks_for_text(name: str) -> bool:
    """Return whether a setting is, or may be, a string; the command line then does not parse it."""
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
    """Return settings as TOML.

    The standard library only reads TOML. Strings, numbers, booleans and arrays are written as in JSON.
    """
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

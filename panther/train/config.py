"""The settings of a training run, from Python, JSON or TOML."""

__all__ = ["TrainConfig"]

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from panther.distributed.parallelize.config import ParallelismSettings
from panther.distributed.parallelize.rules import check_rules
from panther.errors import ConfigError
from panther.files import parse_json, read_text, write_json


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ParallelismSettings):
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

    _needs: ClassVar[tuple[tuple[str, str, str], ...]] = (
        *ParallelismSettings._needs,
        ("cluster_file", "strategy", "auto"),
        ("scaler_init_scale", "mixed_precision", "fp16"),
        ("scaler_growth_interval", "mixed_precision", "fp16"),
    )
    _may_be_zero: ClassVar[tuple[str, ...]] = ("warmup_steps", "seed")

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
    parallelism (``pp``), or several of them (``hybrid``, which is ``fsdp`` along the data-parallel ranks). With
    ``tensor_parallel_size`` or ``pipeline_parallel_size``, ``fsdp`` and ``replicate`` are for the data-parallel ranks.
    ``auto`` is ``ddp`` unless the other settings or the memory forbid it, or unless ``cluster_file`` is given and by
    its measured speeds another layout is at least 1.2 times as fast. Where ``ddp`` does not fit, it is sharded data
    parallelism, and where that does not fit either, the layout with stages or sharded layers that
    :func:`panther.distributed.plan_parallelism` ranks first among the layouts that the settings, the model, the loss
    and the data allow. The first rank prints the choice with its reason, and a better layout that cannot be built. A
    step has the batches of all processes in any layout: ranks that share layers or stages have larger batches."""

    cluster_file: str | None = None
    """For ``auto``, a file of measured speeds that ``panther advise --measure`` or
    :meth:`panther.distributed.ClusterSpec.save` wrote, by which the advisor compares layouts. Without it speeds are
    uncalibrated, and no layout is chosen for them."""

    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble"] = "1f1b"
    """Schedule of the pipeline, as for :func:`panther.distributed.make_schedule`."""

    scaler_init_scale: float | None = None
    """For ``fp16``, the factor of the loss in the first step. None is torch's, 65536."""

    scaler_growth_interval: int | None = None
    """For ``fp16``, the number of finite steps in a row after which the factor doubles. None is torch's, 2000."""

    learning_rate: float | None = None
    """Peak learning rate of every parameter group. None keeps the optimizer's own (1e-3 for the default AdamW)."""

    learning_rate_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How the learning rate grows with the number of data-parallel ranks; for ``auto``, of all ranks."""

    warmup_steps: int = 0
    """Number of steps in which the learning rate rises linearly from 0 to its peak."""

    schedule: Literal["constant", "linear", "cosine", "callback"] = "constant"
    """How the learning rate develops after the warm-up: it stays constant, or falls to 0 until the last step.
    ``callback`` leaves it to a scheduler in a callback."""

    scheduler_interval: Literal["step", "epoch"] = "step"
    """Whether the Trainer's ``scheduler`` steps after each step that the optimizer took, or after each epoch."""

    scheduler_metric: str | None = None
    """The quantity of the history that steps of ``ReduceLROnPlateau`` take, ``"loss"`` or ``"validation_..."``. None is
    ``"validation_loss"``."""

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
    """Whether the first rank shows the progress, in a line for each tenth of the run, and each 30 seconds at least.
    The logger ``panther.train.progress`` writes them at level INFO: a program that has set up logging gets them through
    its own handlers, and otherwise they go to standard error."""

    profile: bool = False
    """Whether the first steps are profiled into ``checkpoint_dir/profile``."""

    initial_weights: str | None = None
    """Folder of the values of a model on the meta device, or that a function builds, as for
    :func:`panther.distributed.materialize_`. Compressed layers in it take the place of dense ones. Where a strategy
    shards, each rank reads its shards alone. None draws them by ``seed``."""

    timeout_s: float | None = None
    """Seconds to wait for other ranks, in every operation. None is the timeout of the process group if there is one, as
    inside of :func:`panther.distributed.launch`, and otherwise 300."""

    grace_period_s: float | None = None
    """Seconds that this process has to finish its step, save and end after a second SIGTERM, SIGHUP, SIGUSR1 or SIGINT,
    or after its launcher has died. Then it is ended wherever it is, and the stacks of its threads are shown. None is
    the launcher's ``--grace-period``, or 15 without one."""

    def __post_init__(self) -> None:
        """Convert and check every value, and refuse settings that contradict each other."""
        super().__post_init__()
        if self.epochs is not None and self.max_steps is not None:
            raise ConfigError(f"epochs={self.epochs} and max_steps={self.max_steps} exclude each other: give one")
        check_rules(self)
        if self.comm_hook == "powersgd" and self.mixed_precision == "fp16":
            raise ConfigError(
                "comm_hook='powersgd' keeps gradients for the next step and does not follow the loss scale of "
                "mixed_precision='fp16': use mixed_precision='bf16'"
            )
        if self.schedule == "callback" and self.warmup_steps:
            raise ConfigError(f"schedule='callback' and warmup_steps={self.warmup_steps} exclude each other: give one")
        if self.seed >= 1 << 63:
            raise ConfigError(f"seed={self.seed} must be below 2^63")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"trackers={list(self.trackers)} repeats a tracker: name each once")
        if self.resume not in ("auto", "never") and self.resume.lower() in ("auto", "never", "none", "true", "false"):
            raise ConfigError(f"resume={self.resume!r} must be 'auto', 'never' or the path of a checkpoint")
        for name in ("checkpoint_every_n_steps", "checkpoint_every_n_epochs", "profile", "trackers"):
            value = getattr(self, name)
            # Without a directory the log is not written, which is no reason to refuse the default.
            if self.checkpoint_dir is None and value and value != ("jsonl",):
                raise ConfigError(f"{name}={value!r} needs checkpoint_dir, which is None: set it")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a TOML or JSON file. If it has a table ``train``, only that is used.

        Raises:
            ConfigError: If the file cannot be read, or a setting is invalid.
        """
        settings = read_settings(path)
        inner = settings.get("train")
        return cls(**inner if isinstance(inner, Mapping) else settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file with all settings.

        Raises:
            ConfigError: If the suffix is not .json.
        """
        if Path(path).suffix != ".json":
            raise ConfigError(f"{path} must end in .json")
        write_json(path, dataclasses.asdict(self), indent=2)


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table in a TOML or JSON file."""
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path} must end in .toml or .json")
    try:
        contents = read_text(path)
        settings = parse_json(contents) if path.suffix == ".json" else tomllib.loads(contents)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}): give a TOML or JSON file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix[1:].upper()} ({error})") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a table of settings")
    return settings

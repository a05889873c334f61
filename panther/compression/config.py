"""Settings of :func:`panther.sketch_layers_` and of healing."""

__all__ = ["HealConfig", "SketchConfig"]

import math
import os
from dataclasses import dataclass
from typing import Literal

from panther.errors import ConfigError, check_size
from panther.train.config import Settings, TrainConfig

_INITS = ("svd", "lstsq", "random")
_WARM_UP = 0.1  # of all steps of healing


@dataclass(frozen=True, kw_only=True)
class SketchConfig(Settings):
    """How layers are sketched without data.

    Raises:
        ConfigError: If a setting is unknown, or not given by name.
        TypeError: If a size is not an integer.
        ShapeError: If a size is below 1.
        ValueError: If ``init`` is unknown.

    Example:
        >>> SketchConfig(low_rank=64).rank
        128
    """

    num_terms: int = 1
    """Terms L of each layer."""
    low_rank: int
    """Rank k of each half of a term; the layer has rank ``2 num_terms low_rank``."""
    init: str = "svd"
    """``"svd"``, ``"lstsq"`` or ``"random"``, as for :meth:`panther.nn.SKLinear.from_linear`."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_size("num_terms", self.num_terms, least=1)
        check_size("low_rank", self.low_rank, least=1)
        if self.init not in _INITS:
            raise ValueError(f"init={self.init!r} is unknown: use one of {', '.join(map(repr, _INITS))}")

    @property
    def rank(self) -> int:
        """Return the rank of a layer's weight."""
        return 2 * self.num_terms * self.low_rank


@dataclass(frozen=True, kw_only=True)
class HealConfig(Settings):
    """How a compressed model is healed; settings that a :class:`~panther.train.TrainConfig` has too mean the same.

    Raises:
        ConfigError: If a value has the wrong type, is out of range or unknown.

    Example:
        >>> HealConfig(max_steps=200, match="output").learning_rate
        0.0005
    """

    max_steps: int = 300
    """Optimizer steps, one batch each (one on every rank of a group)."""

    learning_rate: float = 5e-4
    """Peak of the schedule: a tenth of the steps up to it, the rest down to zero along a cosine."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""

    gradient_clipping: float | None = 1.0
    """Largest norm of the gradient of all trained parameters together; None does not clip."""

    mixed_precision: Literal["bf16", "fp16"] | None = None
    """Dtype to compute in under autocast; None computes in the model's own."""

    match: Literal["hidden", "output"] = "hidden"
    """``"hidden"``: the outputs of the blocks and of the model. ``"output"``: the model's output only."""

    train: Literal["factors", "all"] = "factors"
    """``"factors"``: only the parameters of the new layers. ``"all"``: also every other one that requires grad.

    The new layers' are trained also where the model is frozen; the flags are put back afterwards."""

    validate_every_n_steps: int = 25
    """Steps between two checks on the held-out batches, from which the best point is kept."""

    checkpoint_dir: str | os.PathLike[str] | None = None
    """Folder for checkpoints, written at each check, and the log; if it holds this run already, it is continued."""

    trackers: tuple[Literal["jsonl", "tensorboard", "mlflow"], ...] = ("jsonl",)
    """Where records go besides the report; they need ``checkpoint_dir``."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        self.train_config(seed=0, progress=False)
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay} must be at least 0 and finite: use 0 for none")

    def train_config(self, *, seed: int, progress: bool, scaled: bool = False) -> TrainConfig:
        """Return the Trainer's settings; with ``scaled`` the loss is scaled, as float16 parameters need."""
        saving = self.checkpoint_dir is not None
        return TrainConfig(
            max_steps=self.max_steps,
            learning_rate=self.learning_rate,
            gradient_clipping=self.gradient_clipping,
            mixed_precision="fp16" if scaled else self.mixed_precision,
            strategy="ddp",
            find_unused_parameters=True,  # a layer that a batch does not reach, as in a mixture of experts
            warmup_steps=max(1, round(_WARM_UP * self.max_steps)),
            schedule="cosine",
            on_nonfinite="skip",
            validate_every_n_steps=self.validate_every_n_steps,
            log_every_n_steps=1,
            checkpoint_dir=self.checkpoint_dir,  # type: ignore[arg-type]
            checkpoint_every_n_steps=self.validate_every_n_steps if saving else None,
            checkpoint_asynchronously=False,
            trackers=self.trackers,
            run_name="healing",
            progress=progress,
            seed=seed,
        )

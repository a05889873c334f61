"""Settings of :func:`panther.sketch_layers_` and of healing."""

__all__ = ["HealConfig", "SketchConfig"]

import math
import os
from dataclasses import dataclass, fields
from typing import Literal

from panther._settings import Settings
from panther.errors import ConfigError, check_size
from panther.train.config import TrainConfig

_WARM_UP = 0.1  # share of the steps in which the learning rate rises
_CHECKS = 0.05  # share of the cost of healing that goes into checks on the held-out batches
_FIRST_CHECK = 25  # steps; an earlier check could take the loss of the warm-up for divergence


@dataclass(frozen=True, kw_only=True)
class SketchConfig(Settings):
    """How layers are sketched without data.

    Raises:
        ConfigError: If a setting is unknown, or not given by name, or ``init`` is unknown.
        TypeError: If a size is not an integer.
        ShapeError: If a size is below 1.

    Example:
        >>> SketchConfig(low_rank=64).rank
        128
    """

    num_terms: int = 1
    """Terms L of each layer."""
    low_rank: int
    """Rank k of each half of a term; the layer has rank ``2 num_terms low_rank``."""
    init: Literal["svd", "lstsq", "random"] = "svd"
    """``"svd"``, ``"lstsq"`` or ``"random"``, as for :meth:`panther.nn.SKLinear.from_linear`."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("num_terms", "low_rank"):  # sizes of layers may be NumPy integers; they are converted to int
            object.__setattr__(self, name, check_size(name, getattr(self, name), least=1))
        super().__post_init__()

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
        >>> HealConfig(max_steps=200, match="output").match
        'output'
    """

    max_steps: int = 300
    """Optimizer steps; each step takes one batch (on every rank of a group)."""

    max_seconds: float | None = None
    """Seconds that healing may take, checks and the runs that it continues included; it can exceed them by a step.

    The learning rate then falls to zero by whichever bound comes first, and the result depends on the machine's speed.
    None bounds the steps only."""

    learning_rate: float | None = None
    """Peak of the schedule: the rate rises during a tenth of the steps, and then falls to zero along a cosine.

    A number is the peak for all parameters. None sets the peak of each parameter relative to the parameter's root mean
    square: 0.01 times it for the factors of SKLinear, and 0.003 times it for all other parameters, such as the scales
    of quantized weights (for a bias at least 3e-5)."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""

    gradient_clipping: float | None = 1.0
    """Largest norm of the gradient of all trained parameters together; None does not clip."""

    mixed_precision: Literal["bf16", "fp16"] | None = None
    """Dtype to compute in under autocast; None computes in the model's own."""

    match: Literal["hidden", "output"] = "hidden"
    """``"hidden"``: the outputs of the blocks and of the model. ``"output"``: the model's output only."""

    train: Literal["factors", "all"] = "factors"
    """``"factors"``: only the parameters of the new layers. ``"all"``: also every other parameter that requires grad.

    The parameters of the new layers are trained even if the model is frozen; ``requires_grad`` is restored
    afterwards."""

    validate_every_n_steps: int | None = None
    """Steps between two checks on the held-out batches; the parameters of the best check are kept.

    None chooses the number with which checks are a twentieth of the cost, but at most a quarter of ``max_steps`` or 25,
    whichever is larger. The last step is always checked."""

    checkpoint_dir: str | os.PathLike[str] | None = None
    """Folder for checkpoints, written at each check, and for the log; if the folder holds this run, it is resumed."""

    trackers: tuple[Literal["jsonl", "tensorboard", "mlflow"], ...] = ("jsonl",)
    """Where records go besides the report; they need ``checkpoint_dir``."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        self.train_config(seed=0, progress=False)
        if self.max_seconds is not None and not 0 < self.max_seconds < math.inf:
            raise ConfigError(f"max_seconds={self.max_seconds} must be positive and finite: None is for no bound")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay={self.weight_decay} must be at least 0 and finite: use 0 for none")

    @property
    def warmup_steps(self) -> int:
        """Return the steps in which the learning rate rises."""
        return max(1, round(_WARM_UP * self.max_steps))

    def check_interval(self, held_out: int) -> int:
        """Return the number of steps between validations, given ``held_out`` batches."""
        if self.validate_every_n_steps is not None:
            return self.validate_every_n_steps
        # A check takes a forward for each batch, and a step about three: its backward takes two.
        return min(math.ceil(held_out / (3 * _CHECKS)), max(_FIRST_CHECK, math.ceil(self.max_steps / 4)))

    def train_config(self, *, seed: int, progress: bool, scaled: bool = False, held_out: int = 1) -> TrainConfig:
        """Return the Trainer's settings; with ``scaled`` the loss is scaled, as float16 parameters need."""
        settings = {entry.name: getattr(self, entry.name) for entry in fields(TrainConfig) if hasattr(self, entry.name)}
        interval = settings["validate_every_n_steps"] = self.check_interval(held_out)
        if self.max_seconds is None:
            settings |= {"schedule": "cosine", "warmup_steps": self.warmup_steps}
        else:
            settings |= {"schedule": "callback", "warmup_steps": 0}  # only healing measures the elapsed time
        if scaled:
            settings["mixed_precision"] = "fp16"
        return TrainConfig(
            **settings,
            strategy="ddp",
            find_unused_parameters=True,  # a layer that a batch does not reach, as in a mixture of experts
            on_nonfinite="skip",
            log_every_n_steps=1,
            checkpoint_every_n_steps=None if self.checkpoint_dir is None else interval,
            checkpoint_asynchronously=False,
            run_name="healing",
            progress=progress,
            seed=seed,
        )

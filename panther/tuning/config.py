"""The arguments of :func:`panther.tune`, checked."""

__all__ = ["TuneConfig"]

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from panther.compression.calibration.targets import Selector
from panther.compression.config import CompressConfig, HealConfig
from panther.errors import ConfigError, check_size, require_extra
from panther.sketch import check_seed
from panther.tuning.goal import Goal, make_goal

# The budget of the first choice, in which losses are measured: the share of int8 in float32.
_FIRST_BUDGET = 0.25
_SAMPLERS = ("tpe", "gp", "random")
# Arguments that have the same meaning in panther.compress.
_OF_COMPRESS = (
    "calibration", "exclude", "rank_multiple", "group_size", "activations", "symmetric", "forward_fn", "loss_fn",
    "mask_fn", "statistics_memory_bytes", "progress",
)  # fmt: skip


@dataclass(frozen=True)
class TuneConfig:
    """The arguments of :func:`panther.tune` except for the model, checked; the function documents them.

    The function has its signature from here, by :func:`panther._hints.takes_settings`.
    """

    evaluate: Callable[[nn.Module], Any]
    calibration: Any = None
    _: KW_ONLY
    space: Any = "auto"
    objective: str | Callable[[nn.Module], float] = "size"
    constraint: Any = None
    direction: str | None = None
    trials: int = 30
    first: int | None = None
    timeout_s: float | None = None
    sampler: Any = "tpe"
    pruner: Any = "median"
    storage: Any = None
    repeats: int = 1
    catch: type[Exception] | Sequence[type[Exception]] = ()
    parallel: int | str = 1
    heal: HealConfig | Mapping[str, Any] | None = None
    forms: str | Sequence[str] | None = None
    rank_multiple: int = 8
    group_size: int | None = 128
    activations: str | None = None
    symmetric: bool = False
    include: Selector | Sequence[Selector] | None = None
    exclude: Selector | Sequence[Selector] | None = None
    forward_fn: Callable[[nn.Module, Any], Any] | None = None
    loss_fn: Any = None
    mask_fn: Callable[[Any], Tensor | None] | None = None
    statistics_memory_bytes: int | None = None
    seed: int | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        require_extra("optuna", "tune")
        if not callable(self.evaluate):
            raise TypeError(f"evaluate must be a function of a model, not a {type(self.evaluate).__name__}")
        self.goal  # noqa: B018 (raises if the objective or a constraint is not understood)
        check_size("trials", self.trials, least=1)
        check_size("repeats", self.repeats, least=1)
        if self.first is not None:
            check_size("first", self.first, least=0)
        timeout_s, parallel = self.timeout_s, self.parallel
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float | None):
            raise TypeError(f"timeout_s must be a number of seconds, not {timeout_s!r}")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s={timeout_s} must be positive and finite: use None for no bound")
        _check_sampler(self.sampler)
        if parallel != "ray" and (isinstance(parallel, bool) or not isinstance(parallel, int) or parallel < 1):
            raise ConfigError(f"parallel={parallel!r} must be a number of processes, at least 1, or 'ray'")
        self.caught_exceptions  # noqa: B018 (raises unless they are exceptions)
        if self.calibration is None:
            needs = {"latency": self.goal.timed, "heal": self.heal is not None, "loss_fn": self.loss_fn is not None}
            if name := next((name for name, is_needed in needs.items() if is_needed), None):
                raise ConfigError(f"{name} needs calibration=, a list of batches, on which the model is run")

    @cached_property
    def goal(self) -> Goal:
        """Return the objective and the constraints."""
        return make_goal(self.objective, self.constraint, self.direction)

    @cached_property
    def caught_exceptions(self) -> tuple[type[Exception], ...]:
        """Return the exceptions of ``catch`` as a tuple."""
        catch: Any = self.catch
        is_list = isinstance(catch, Iterable) and not isinstance(catch, str | type)
        exceptions: tuple[Any, ...] = tuple(catch) if is_list else (catch,)
        for kind in exceptions:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"catch must be exception classes, such as torch.OutOfMemoryError, and has {kind!r}")
        return exceptions

    @cached_property
    def new_seed(self) -> int:
        """Return the seed of a new study, drawn at the first use if none was given."""
        return check_seed(self.seed)

    def compress_config(self, forms: Any, include: Any) -> CompressConfig:
        """Return the settings with which the layers of a trained model are fitted."""
        return CompressConfig(
            budget=_FIRST_BUDGET,
            forms=forms,
            include=include,
            method="svd" if self.calibration is None else "two_sided",
            **{name: getattr(self, name) for name in _OF_COMPRESS},
        )


def _check_sampler(sampler: Any) -> None:
    """Raise ConfigError unless this is a name, or a sampler of Optuna."""
    optuna = require_extra("optuna", "tune")
    if isinstance(sampler, str) and sampler not in _SAMPLERS:
        raise ConfigError(f"sampler={sampler!r} is unknown: use {', '.join(map(repr, _SAMPLERS))}, or one of Optuna's")
    if not isinstance(sampler, str | optuna.samplers.BaseSampler):
        raise ConfigError(f"sampler must be a name or one of Optuna's samplers, not a {type(sampler).__name__}")

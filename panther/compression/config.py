"""Settings of :func:`panther.compress`, :func:`panther.sketch_layers_` and healing, and the rules of the former."""

__all__ = ["SIZES", "CompressConfig", "HealConfig", "SketchConfig", "form_settings"]

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from panther._settings import Settings
from panther.compression.calibration.runner import Loss
from panther.compression.calibration.targets import Selector
from panther.compression.forms import DENSE, LOW_RANK, FormSettings, default_forms, form_named, known_forms
from panther.compression.readers import BLOCK, FORMATS, Reader, default_reader, reader_of
from panther.errors import ConfigError, check_flag, check_size
from panther.nn.quantized.linear import check_activations
from panther.train.config import TrainConfig

_WARM_UP = 0.1  # share of the steps in which the learning rate rises
_CHECKS = 0.05  # share of the cost of healing that goes into checks on the held-out batches
_FIRST_CHECK = 25  # steps; an earlier check could take the loss of the warm-up for divergence


@dataclass(frozen=True, kw_only=True)
class SketchConfig(Settings):
    """How layers are sketched without data.

    Raises:
        ConfigError: If a setting is unknown, not given by name, out of range, or not for layers of this ``kind``.
        TypeError: If a size is not an integer.
        ShapeError: If a size is below 1.

    Example:
        >>> SketchConfig(low_rank=64).rank
        128
    """

    num_terms: int = 1
    """Terms L of each sketched layer."""
    low_rank: int | None = None
    """Rank k of each half of a term; the weight has rank ``2 num_terms low_rank``."""
    init: Literal["lstsq", "random", "svd"] = "lstsq"
    """``"lstsq"`` or ``"random"``, as for :meth:`panther.nn.SKLinear.from_linear`; or ``"svd"``, for a
    :class:`panther.nn.LowRankLinear` of this rank in place of a sketched layer."""
    kind: Literal["sketched", "monarch"] = "sketched"
    """``"sketched"``: layers of one size, ``low_rank``. ``"monarch"``: each linear layer becomes the
    :class:`panther.nn.MonarchLinear` nearest to its weight with the ``fraction`` of its numbers."""
    fraction: float | None = None
    """Share of the dense weight's numbers that a Monarch layer stores, above 0 and at most 1."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("num_terms", "low_rank"):  # sizes of layers may be NumPy integers; they are converted to int
            if (size := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_size(name, size, least=1))
        super().__post_init__()
        is_monarch = self.kind == "monarch"
        if (self.fraction is not None, self.low_rank is None) != (is_monarch, is_monarch):
            needed, refused = ("fraction", "low_rank") if is_monarch else ("low_rank", "fraction")
            raise ConfigError(
                f"kind={self.kind!r} takes {needed} and not {refused}: {needed}={getattr(self, needed)}, "
                f"{refused}={getattr(self, refused)}"
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction} must be above 0 and at most 1")
        if is_monarch and (self.num_terms, self.init) != (1, "lstsq"):
            raise ConfigError(
                f"num_terms={self.num_terms} and init={self.init!r} are for sketched layers: leave them out with "
                "kind='monarch', whose layers are the nearest ones"
            )

    @property
    def rank(self) -> int | None:
        """Return the rank of a sketched layer's weight; None of Monarch layers, whose rank follows from each size."""
        return None if self.low_rank is None else 2 * self.num_terms * self.low_rank


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

    learning_rate: float | None = None
    """Peak of the schedule: the rate rises during a tenth of the steps, and then falls to zero along a cosine.

    A number is the peak for all parameters. None sets the peak of each parameter relative to the parameter's root mean
    square: 0.01 times it for the factors of low rank, and 0.003 times it for all other parameters, such as the scales
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

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        self.train_config(seed=0, progress=False)
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
        settings["validate_every_n_steps"] = self.check_interval(held_out)
        if scaled:
            settings["mixed_precision"] = "fp16"
        return TrainConfig(
            **settings,
            schedule="cosine",
            strategy="ddp",
            find_unused_parameters=True,  # a layer that a batch does not reach, as in a mixture of experts
            on_nonfinite="skip",
            log_every_n_steps=1,
            progress=progress,
            seed=seed,
        )


_GROUP_SIZE = 128
_METHODS = ("two_sided", "activation", "svd", "random")
_CALIBRATED = ("two_sided", "activation")
SIZES = ("budget", "bits", "max_bytes", "max_error", "speedup", "max_latency_ms")
_TIMED = ("speedup", "max_latency_ms")


@dataclass(frozen=True)
class CompressConfig:
    """The arguments of :func:`panther.compress` except for the model, checked; the function documents them.

    The function has its signature from here, by :func:`panther._hints.takes_settings`.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an option is unknown or out of range, or options exclude each other.
    """

    budget: float | None = None
    calibration: Any = None
    _: KW_ONLY
    bits: float | None = None
    max_bytes: int | None = None
    max_error: float | None = None
    speedup: float | None = None
    max_latency_ms: float | None = None
    forward_fn: Callable[[nn.Module, Any], Any] | None = None
    loss_fn: Loss | None = None
    mask_fn: Callable[[Any], Tensor | None] | None = None
    group: dist.ProcessGroup | None = None
    forms: str | Sequence[str] | None = None
    include: Selector | Sequence[Selector] | None = None
    exclude: Selector | Sequence[Selector] | None = None
    allow_slower: bool | None = None
    group_size: int | None = _GROUP_SIZE
    symmetric: bool = False
    activations: str | None = None
    rank_multiple: int = 8
    target: str | None = None
    reader: str | None = None
    method: str = "two_sided"
    allocate: str | None = None
    heal: HealConfig | None = None
    statistics_memory_bytes: int | None = None
    seed: int | None = None
    measure_speed: bool = True
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        for rule in _RULES:
            if rule.is_broken(self):
                raise rule.error(rule.message(self))
        self.form_settings  # noqa: B018 (raises if forms are unknown)
        if self.statistics_memory_bytes is not None:
            check_size("statistics_memory_bytes", self.statistics_memory_bytes, least=1)

    @cached_property
    def form_settings(self) -> FormSettings:
        """Return the forms to choose from, with the settings of their options."""
        return form_settings(
            self.forms, self.rank_multiple, self.group_size, self.method, self.activations, self.symmetric,
            self.foreign_reader,
        )  # fmt: skip

    @cached_property
    def foreign_reader(self) -> Reader | None:
        """Return the program that will read the model in another format; None if only Panther will."""
        if self.target is None and self.reader is None:
            return None
        return reader_of(default_reader(self.target or FORMATS[0]) if self.reader is None else self.reader)

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the arguments that say how small or fast the model has to be; exactly one of them is given."""
        return {name: value for name in SIZES if (value := getattr(self, name)) is not None}

    @property
    def is_calibrated(self) -> bool:
        """Return whether layers are fitted to their inputs; the methods svd and random look at the weights only."""
        return self.method in _CALIBRATED

    @property
    def speed_setting(self) -> str | None:
        """Return the argument that asks for measured times, None if there is none."""
        name = next((name for name in _TIMED if name in self.sizes), None)
        return name or ("allow_slower=False" if self.allow_slower is False else None)

    @property
    def is_by_time(self) -> bool:
        """Return whether the size is a time."""
        return not self.sizes.keys().isdisjoint(_TIMED)

    @property
    def avoids_slower(self) -> bool:
        """Return whether forms slower than dense are used only where they are worth it.

        Times of Panther's own layers do not count in another program.
        """
        return self.allow_slower is None and self.forms is None and self.foreign_reader is None


@dataclass(frozen=True)
class _Rule:
    """What must not hold for arguments, and the message and the error if it does."""

    is_broken: Callable[[CompressConfig], bool]
    message: Callable[[CompressConfig], str]
    error: type[Exception] = ValueError


def _one_of(name: str, values: Sequence[str], *, optional: bool = False) -> _Rule:
    return _Rule(
        lambda c: getattr(c, name) not in values and not (optional and getattr(c, name) is None),
        lambda c: f"{name}={getattr(c, name)!r} is unknown: use one of {', '.join(map(repr, values))}",
    )


def _size(config: CompressConfig) -> tuple[str, Any]:
    return next(iter(config.sizes.items()))


def _is_out_of_range(name: str, value: float) -> bool:
    return not 0 < value < math.inf or (name == "budget" and value > 1) or (name == "speedup" and value < 1)


_RANGES = {"budget": "a fraction in (0, 1]", "speedup": "finite and at least 1"}

# In the order in which they are checked. Each rule may rely on the rules before it.
_RULES: tuple[_Rule, ...] = (
    _one_of("method", _METHODS),
    _one_of("allocate", ("global", "uniform"), optional=True),
    _one_of("target", FORMATS, optional=True),
    _Rule(
        lambda c: None not in (c.target, c.reader) and reader_of(c.reader or "").format != c.target,
        lambda c: f"reader={c.reader!r} does not read target={c.target!r}: leave one of them out",
    ),
    _Rule(
        lambda c: c.foreign_reader is not None and c.foreign_reader.has_one_width and c.allocate == "global",
        lambda c: (
            f"allocate='global' gives layers different widths, and reader={c.reader!r} fuses layers, which need one "
            "width: leave allocate out"
        ),
    ),
    _Rule(
        lambda c: len(c.sizes) != 1,
        lambda c: (
            f"exactly one of {', '.join(SIZES[:-1])} and {SIZES[-1]} must be given, not "
            f"{' and '.join(c.sizes) or 'none'}: budget=0.5 keeps half of the eligible layers' bytes"
        ),
    ),
    _Rule(
        lambda c: not isinstance(_size(c)[1], int | float) or isinstance(_size(c)[1], bool),
        lambda c: (
            f"{_size(c)[0]} must be a number, not {type(_size(c)[1]).__name__}: give one, such as budget=0.5 or "
            "bits=4.25"
        ),
        TypeError,
    ),
    _Rule(
        lambda c: _is_out_of_range(*_size(c)),
        lambda c: "{}={!r} must be ".format(*_size(c)) + _RANGES.get(_size(c)[0], "positive and finite"),
    ),
    _Rule(
        lambda c: c.calibration is None and (c.is_calibrated or c.max_error is not None or c.heal is not None),
        lambda c: (
            (f"method={c.method!r}" if c.is_calibrated else "max_error" if c.max_error is not None else "heal")
            + " needs calibration=, a list of batches: or use method='svd' with a budget"
        ),
    ),
    _Rule(
        lambda c: c.method != "two_sided" and (c.allocate == "global" or c.loss_fn is not None),
        lambda c: (
            ("allocate='global'" if c.allocate == "global" else "loss_fn")
            + " needs method='two_sided', the only one that uses the output's gradients"
        ),
    ),
    _Rule(
        lambda c: c.heal is not None and not isinstance(c.heal, HealConfig),
        lambda c: f"heal must be a HealConfig, not {type(c.heal).__name__}",
        TypeError,
    ),
    _Rule(
        lambda c: c.allow_slower is not None and not isinstance(c.allow_slower, bool),
        lambda c: f"allow_slower must be None, True or False, not {type(c.allow_slower).__name__}",
        TypeError,
    ),
    _Rule(
        lambda c: c.speed_setting is not None and not c.measure_speed,
        lambda c: (
            f"{c.speed_setting} needs measured times, and measure_speed=False forbids them: leave measure_speed out"
        ),
    ),
    _Rule(
        lambda c: c.speed_setting is not None and c.calibration is None,
        lambda c: f"{c.speed_setting} needs calibration=, a list of batches, because layers are timed on one of them",
    ),
)


def form_settings(
    forms: Any,
    rank_multiple: int,
    group_size: int | None,
    method: str,
    activations: str | None,
    symmetric: bool = False,
    reader: Reader | None = None,
) -> FormSettings:
    """Return the forms to choose from (by default all forms that the method can make), or raise if there are none."""
    if forms is None and reader is not None:
        forms = _readable_forms(reader)
    elif forms is None:
        forms = (DENSE, LOW_RANK) if method == "random" else default_forms()
    if not isinstance(forms, Iterable):
        raise TypeError(f"forms must be names of forms, such as ('int4', 'low_rank'), not {type(forms).__name__}")
    names = (forms,) if isinstance(forms, str) else tuple(forms)
    for name in names:
        if name not in known_forms():
            close = get_close_matches(str(name), known_forms(), 1)
            guess = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"form {name!r} is unknown{guess}: use some of {', '.join(map(repr, known_forms()))}")
    if not set(names) - {DENSE}:
        raise ValueError(f"forms={names} has no form but 'dense', which changes nothing: add one, such as 'low_rank'")
    if method == "random" and not {DENSE, LOW_RANK}.issuperset(names):
        raise ValueError("method='random' makes seeded sketches only: leave forms out, or use another method")
    if check_size("rank_multiple", rank_multiple, least=2) % 2:
        raise ValueError(f"rank_multiple={rank_multiple} must be even, because a low-rank layer has two halves")
    if group_size is not None:
        check_size("group_size", group_size, least=1)
    check_flag("symmetric", symmetric)
    if reader is not None and reader.has_blocks and group_size == _GROUP_SIZE:
        group_size = BLOCK  # The format has this size alone, so that the default of other formats is not an error.
    if reader is not None:
        _check_readable(reader, names, group_size, activations)
    settings = FormSettings(
        tuple(dict.fromkeys(names)), rank_multiple, group_size, check_activations(activations),
        symmetric, reader,
    )  # fmt: skip
    if activations is not None and not any(form.is_quantized for form in settings.forms):
        raise ValueError(
            f"activations={activations!r} is for quantized forms, and forms={names} has none: add one, such as 'int8', "
            "or leave activations out"
        )
    return settings


def _readable_forms(reader: Reader, *, corrected: bool = False) -> tuple[str, ...]:
    """Return the names of the forms that a reader holds; with ``corrected`` also forms that need an adapter."""
    dense = () if reader.has_one_width else (DENSE,)
    forms = ((name, form_named(name)) for name in known_forms())
    return (*dense, *(name for name, form in forms if form.bits in reader.widths and corrected >= form.has_rank))


def _check_readable(reader: Reader, names: tuple[str, ...], group_size: int | None, activations: str | None) -> None:
    """Raise ValueError if a reader does not hold forms, groups or rounded inputs."""
    readable = _readable_forms(reader, corrected=reader.takes_adapters)
    if refused := [name for name in names if name not in readable]:
        raise ValueError(
            f"form {refused[0]!r} is not held by reader={reader.name!r}: use some of {', '.join(map(repr, readable))}"
        )
    sizes: tuple[int | None, ...] = reader.group_sizes or (group_size,)
    sizes = sizes if reader.has_blocks else (None, *sizes)
    if group_size not in sizes:
        choices = f"{sizes[0]}" + (f" or one of {', '.join(map(str, sizes[1:]))}" if sizes[1:] else "")
        raise ValueError(f"group_size={group_size} is not held by reader={reader.name!r}: use {choices}")
    if activations is not None:
        raise ValueError(f"activations={activations!r} is not held by reader={reader.name!r}: leave activations out")

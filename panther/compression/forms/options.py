"""The forms that a weight can take, each with its bytes, its time where that was measured, and its loss."""

__all__ = [
    "DEFAULT_FORMS", "DENSE", "INT8_LOW_RANK", "INTERPOLATIVE", "KNOWN_FORMS", "LOW_RANK", "SLOWER", "Choice", "Forms",
    "Option", "Options", "Times", "least_bytes", "quantized_bytes", "total_bytes", "total_loss",
]  # fmt: skip

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from panther.compression.targets import LEAST_RANK, Target
from panther.errors import CompressionError
from panther.nn import interpolative
from panther.nn.quantized import stored_bytes

# A weight has multiples of rank_multiple as ranks if its largest rank is at least this many multiples; smaller weights
# have even ranks.
_FINE = 8
# Largest rank of a correction. The rounding error has nearly equal singular values, so that higher ranks cost more
# bytes than they save.
_LARGEST_CORRECTION = 64
_WIDTHS = (8, 6, 5, 4, 3, 2)

DENSE, LOW_RANK, INT8_LOW_RANK, CORRECTED = "dense", "low_rank", "int8_low_rank", "+low_rank"
INTERPOLATIVE = "interpolative"

KNOWN_FORMS = (
    DENSE, LOW_RANK, INTERPOLATIVE, INT8_LOW_RANK, *(f"int{bits}" for bits in _WIDTHS),
    *(f"int{bits}{CORRECTED}" for bits in _WIDTHS),
)  # fmt: skip

DEFAULT_FORMS = (DENSE, LOW_RANK, INTERPOLATIVE, *(f"int{bits}" for bits in _WIDTHS))
"""The default forms of :func:`panther.compress`.

Corrected forms and low rank in 8 bits are not among them: on the models that were measured they were hardly ever on the
hull, and they take an SVD for each width.
"""

SLOWER = 0.8  # a form is slower if it has less than this share of the dense layer's speed; a ratio near 1 can be noise
_SAME_TIME = 1.02  # times of two widths that differ by less than this factor are equal up to noise


@dataclass(frozen=True)
class Option:
    """One way to store a weight.

    Attributes:
        form: One of ``KNOWN_FORMS``.
        bytes: Bytes on disk.
        rank: Rank of the low-rank form (in every group of a convolution) or of the correction.
        bits: Width of the codes; None if the weight is not quantized.
        loss: Predicted squared effect on the model's output; zero if nothing was fitted.
        error: Predicted relative error of the layer's own output; None if nothing was fitted.
        time_s: Seconds that the layers of this weight take in one batch; None if they were not timed.
    """

    form: str
    bytes: int
    rank: int | None = None
    bits: int | None = None
    loss: float = 0.0
    error: float | None = None
    time_s: float | None = None


@dataclass(frozen=True)
class Times:
    """Measured times of a weight's layers in one batch.

    Attributes:
        dense_s: Seconds of the dense layers.
        curves: For each form, the ranks at which it was timed, in rising order (0 for a form without a rank), and the
            seconds at these ranks.
    """

    dense_s: float
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]]

    def of(self, option: Option) -> float:
        """Return the seconds of an option, interpolated linearly between the ranks that were timed."""
        if option.form == DENSE:
            return self.dense_s
        ranks, times = self.curves[option.form]
        rank = option.rank or 0
        place = min(max(bisect_left(ranks, rank), 1), len(ranks) - 1)
        if not place:
            return times[0]
        share = (rank - ranks[place - 1]) / (ranks[place] - ranks[place - 1])
        return times[place - 1] + share * (times[place] - times[place - 1])


Options = Mapping[Target, Sequence[Option]]
"""The options of every weight, the smallest first."""

Choice = dict[Target, Option]
"""One option for every weight."""


@dataclass(frozen=True)
class Forms:
    """The forms that weights may take, and settings from which the options of a weight follow.

    Attributes:
        names: Names of forms, of ``KNOWN_FORMS``.
        rank_multiple: Ranks are multiples of this number; weights too small for eight such ranks have even ranks.
        group_size: Columns of a quantized weight that share a scale; None is the entire row.
        activations: How quantized linear layers round their inputs, None or "int8".
        times: Times of each target; empty if they were not measured.
        slower: Whether forms that were measured below ``SLOWER`` of the dense layer's speed are options.
        by_time: Whether the choice is by time. An option is then useful only if it is faster than dense, and a width
            only if no larger width is as fast.
    """

    names: tuple[str, ...] = DEFAULT_FORMS
    rank_multiple: int = 8
    group_size: int | None = 128
    activations: str | None = None
    times: Mapping[Target, Times] = field(default_factory=dict)
    slower: bool = True
    by_time: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the widths of the quantized forms in bits, in rising order."""
        return tuple(sorted({bits for name in self.names if (bits := _width(name)) is not None}))

    def quantizes(self, target: Target) -> bool:
        """Return whether a weight can be quantized."""
        return bool(self.widths_of(target))

    def widths_of(self, target: Target) -> tuple[int, ...]:
        """Return the widths that a weight can have in bits, in rising order."""
        return tuple(sorted({option.bits for option in self.options(target) if option.bits is not None}))

    def options(self, target: Target) -> list[Option]:
        """Return the options of a weight that are not larger than the dense weight, without losses, sorted by bytes.

        Raises:
            CompressionError: If the weight can take none of the forms, which happens for convolutions.
        """
        names = tuple(name for name in self.names if _is_possible(target, name))
        if not names:
            groups = "" if target.groups == 1 else f" in {target.groups} groups"
            raise CompressionError(
                f"layer {target.name!r} is a {target.kind}{groups}, which none of forms={self.names} can be: add "
                f"'low_rank' or 'int8', or pass exclude=nn.{target.kind}"
            )
        options = [option for name in names for option in self._of_form(target, name)]
        if self.times:
            options = self._timed(target, options)
        return sorted(options, key=lambda option: option.bytes)

    def _timed(self, target: Target, options: Sequence[Option]) -> list[Option]:
        """Return the options that are fast enough, with their times; the dense weight alone if there is none."""
        times = self.times[target]
        timed = [replace(option, time_s=times.of(option)) for option in options]
        if not self.slower:
            timed = self.without_slower(target, timed)
        if self.by_time:
            timed = [option for option in timed if option.form == DENSE or (option.time_s or 0.0) < times.dense_s]
            fastest: dict[str, float] = {}  # seconds of the fastest larger width, with and without a correction
            for name in sorted({option.form for option in timed if option.bits is not None}, reverse=True):
                kind = CORRECTED if name.endswith(CORRECTED) else ""
                time_s = times.curves[name][1][0]
                if time_s * _SAME_TIME >= fastest.get(kind, math.inf):
                    timed = [option for option in timed if option.form != name]
                fastest[kind] = min(time_s, fastest.get(kind, math.inf))
        return timed or [self._dense(target)]

    def is_slower(self, target: Target, option: Option) -> bool:
        """Return whether an option was measured below ``SLOWER`` of the dense layer's speed."""
        return option.time_s is not None and option.time_s * SLOWER > self.times[target].dense_s

    def without_slower(self, target: Target, options: Sequence[Option]) -> list[Option]:
        """Return the options that are not slower; if there is none, the dense weight alone."""
        return [option for option in options if not self.is_slower(target, option)] or [self._dense(target)]

    def _dense(self, target: Target) -> Option:
        return Option(DENSE, target.dense_bytes, error=0.0, time_s=self.times[target].dense_s)

    def _of_form(self, target: Target, name: str) -> list[Option]:
        bits = _width(name)
        if name == DENSE:
            return [Option(DENSE, target.dense_bytes, error=0.0)]
        if name == LOW_RANK:
            return [Option(LOW_RANK, target.bytes(rank), rank) for rank in self.ranks(target, name)]
        if name == INTERPOLATIVE:
            options = [Option(name, interpolative_bytes(target, rank), rank) for rank in self.ranks(target, name)]
        elif bits is not None and not name.endswith(CORRECTED):
            options = [Option(name, quantized_bytes(target, bits, self.group_size, 0), None, bits)]
        else:
            options = [
                Option(name, quantized_bytes(target, bits, self.group_size, rank), rank, bits)
                for rank in self.ranks(target, name)
            ]
        return [option for option in options if option.bytes < target.dense_bytes]

    def ranks(self, target: Target, name: str) -> range:
        """Return the ranks that a form of a weight can have; an empty range if the form has no rank."""
        least = min(target.inner, target.outer)
        if name == LOW_RANK:
            largest = target.largest_rank
        elif not _is_possible(target, name):
            return range(0)
        elif name in (INT8_LOW_RANK, INTERPOLATIVE):
            largest = least
        elif name.endswith(CORRECTED):
            largest = min(least, _LARGEST_CORRECTION)
        else:
            return range(0)
        step = self.rank_multiple if largest >= _FINE * self.rank_multiple else min(LEAST_RANK, largest)
        return range(step, largest + 1, step)

    def largest_correction(self, target: Target) -> int:
        """Return the largest rank of a correction; 0 if there are no corrected forms."""
        corrected = [name for name in self.names if name.endswith(CORRECTED) and _is_possible(target, name)]
        return max((self.ranks(target, name)[-1] for name in corrected), default=0)

    def smallest_bytes(self, target: Target) -> int:
        """Return the bytes of the smallest option that is not dense, or the dense bytes if there is none."""
        sizes = (option.bytes for option in self.options(target) if option.form != DENSE)
        return min(sizes, default=target.dense_bytes)


def _width(name: str) -> int | None:
    return next((bits for bits in _WIDTHS if name in (f"int{bits}", f"int{bits}{CORRECTED}")), None)


def _is_possible(target: Target, name: str) -> bool:
    """Return whether a weight can take a form at all, whatever its size."""
    if name == INTERPOLATIVE:
        return not isinstance(target.modules[0], nn.Conv2d)
    # Each group of a convolution has its own metric, and a low-rank matrix across all groups would fit none of them.
    return target.groups == 1 or (name != INT8_LOW_RANK and not name.endswith(CORRECTED))


def quantized_bytes(target: Target, bits: int | None, group_size: int | None, rank: int) -> int:
    """Return the bytes of a quantized form of a weight on disk."""
    return stored_bytes(
        target.inner, target.groups * target.outer, bits, group_size=group_size, low_rank=rank,
        conv=isinstance(target.modules[0], nn.Conv2d),
    )  # fmt: skip


def interpolative_bytes(target: Target, rank: int) -> int:
    """Return the bytes of an interpolative form of a weight on disk."""
    return interpolative.stored_bytes(target.inner, target.outer, rank, target.weight.dtype)


def total_loss(choice: Choice) -> float:
    """Return the sum of the predicted squared effects of all weights."""
    return sum(option.loss for option in choice.values())


def total_bytes(choice: Choice) -> int:
    """Return the bytes of all weights on disk."""
    return sum(option.bytes for option in choice.values())


def least_bytes(options: Options) -> int:
    """Return the bytes of all weights in their smallest form."""
    return sum(min(option.bytes for option in target_options) for target_options in options.values())

r"""The forms that a weight can take, each with its bytes and its loss, and the choice of one for every weight.

*Global*: each option of each weight has a predicted squared effect on the output. From the smallest option on, bytes go
to whichever weight gains most per byte. Gains fall along each weight's lower convex hull over all its options, on which
this greedy choice is optimal except for the last step; the hull ends in the dense weight, which loses nothing.
*Uniform*: the same form, and the same kept fraction, everywhere.
"""

__all__ = [
    "DEFAULT_FORMS", "DENSE", "INT8_LOW_RANK", "INTERPOLATIVE", "KNOWN_FORMS", "LOW_RANK", "Choice", "Forms", "Option",
    "Options", "choose_global", "choose_uniform", "least_bytes", "quantized_bytes", "total_bytes", "total_loss",
]  # fmt: skip

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from panther.compression.targets import LEAST_RANK, Target
from panther.errors import CompressionError
from panther.nn import interpolative
from panther.nn.quantized import stored_bytes

_FRACTION_STEPS = 50  # halvings of the kept fraction, to the resolution of a float
_FINE = 8  # multiples of a rank that a weight must have room for; smaller weights have even ranks
_LARGEST_CORRECTION = 64  # rank: what rounding leaves is nearly white, and a higher one costs more than it saves
_WIDTHS = (8, 6, 5, 4, 3, 2)

DENSE, LOW_RANK, INT8_LOW_RANK, CORRECTED = "dense", "low_rank", "int8_low_rank", "+low_rank"
INTERPOLATIVE = "interpolative"

KNOWN_FORMS = (
    DENSE, LOW_RANK, INTERPOLATIVE, INT8_LOW_RANK, *(f"int{bits}" for bits in _WIDTHS),
    *(f"int{bits}{CORRECTED}" for bits in _WIDTHS),
)  # fmt: skip

DEFAULT_FORMS = (DENSE, LOW_RANK)
"""The forms of :func:`panther.compress` where none are named."""


@dataclass(frozen=True)
class Option:
    """One way to store a weight.

    Attributes:
        form: One of ``KNOWN_FORMS``.
        bytes: Bytes on disk.
        rank: Rank of the low-rank form, in every group of a convolution, or of the correction.
        bits: Width of the codes, where the weight is quantized.
        loss: Predicted squared effect on the model's output; zero where nothing was fitted.
        error: Predicted relative error of the layer's own output; None where nothing was fitted.
    """

    form: str
    bytes: int
    rank: int | None = None
    bits: int | None = None
    loss: float = 0.0
    error: float | None = None


Options = Mapping[Target, Sequence[Option]]
"""The options of every weight, the smallest first."""

Choice = dict[Target, Option]
"""One option for every weight."""


@dataclass(frozen=True)
class Forms:
    """Which options there are.

    Attributes:
        names: Some of ``KNOWN_FORMS``.
        rank_multiple: What ranks are multiples of, except for weights too small for eight of it, whose ranks are even.
        group_size: Columns of a quantized weight that share a scale; None is the whole row.
    """

    names: tuple[str, ...] = DEFAULT_FORMS
    rank_multiple: int = 8
    group_size: int | None = 128

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the widths of the quantized forms, the least first."""
        return tuple(sorted({bits for name in self.names if (bits := _width(name)) is not None}))

    def quantizes(self, target: Target) -> bool:
        """Return whether a weight can be quantized."""
        return bool(self.widths) and _is_linear(target)

    def options(self, target: Target) -> list[Option]:
        """Return the options of a weight that are no larger than it, the smallest first, without their losses.

        Raises:
            CompressionError: If it is a convolution, and all forms are those of linear layers.
        """
        names = self.names
        if not _is_linear(target):
            names = tuple(name for name in names if name in (DENSE, LOW_RANK))
            if not names:
                raise CompressionError(
                    f"layer {target.name!r} is a {target.kind}, which can only be dense or low rank, and forms="
                    f"{self.names} has neither: add 'low_rank', or pass exclude={target.kind!r}"
                )
        found = [option for name in names for option in self._of_form(target, name)]
        return sorted(found, key=lambda option: option.bytes)

    def _of_form(self, target: Target, name: str) -> list[Option]:
        bits = _width(name)
        if name == DENSE:
            return [Option(DENSE, target.dense_bytes, error=0.0)]
        if name == LOW_RANK:
            return [Option(LOW_RANK, target.bytes(rank), rank) for rank in self.ranks(target, name)]
        if name == INTERPOLATIVE:
            several = [Option(name, interpolative_bytes(target, rank), rank) for rank in self.ranks(target, name)]
        elif bits is not None and not name.endswith(CORRECTED):
            several = [Option(name, quantized_bytes(target, bits, self.group_size, 0), None, bits)]
        else:
            several = [
                Option(name, quantized_bytes(target, bits, self.group_size, rank), rank, bits)
                for rank in self.ranks(target, name)
            ]
        return [option for option in several if option.bytes < target.dense_bytes]

    def ranks(self, target: Target, name: str) -> range:
        """Return the ranks that a form of a weight can have; an empty range if the form has no rank."""
        least = min(target.inner, target.outer)
        if name == LOW_RANK:
            largest = target.largest_rank
        elif name in (INT8_LOW_RANK, INTERPOLATIVE) and _is_linear(target):
            largest = least
        elif name.endswith(CORRECTED) and _is_linear(target):
            largest = min(least, _LARGEST_CORRECTION)
        else:
            return range(0)
        step = self.rank_multiple if largest >= _FINE * self.rank_multiple else min(LEAST_RANK, largest)
        return range(step, largest + 1, step)

    def largest_correction(self, target: Target) -> int:
        """Return the largest rank of a correction; 0 if there are no corrected forms."""
        return max((self.ranks(target, name)[-1] for name in self.names if name.endswith(CORRECTED)), default=0)

    def smallest_bytes(self, target: Target) -> int:
        """Return the bytes of the smallest option that is not dense; those of the dense weight if there is none."""
        sizes = (option.bytes for option in self.options(target) if option.form != DENSE)
        return min(sizes, default=target.dense_bytes)


def _width(name: str) -> int | None:
    return next((bits for bits in _WIDTHS if name in (f"int{bits}", f"int{bits}{CORRECTED}")), None)


def _is_linear(target: Target) -> bool:
    return target.groups == 1 and not isinstance(target.modules[0], nn.Conv2d)


def quantized_bytes(target: Target, bits: int | None, group_size: int | None, rank: int) -> int:
    """Return the bytes of a quantized form of a weight on disk."""
    return stored_bytes(target.inner, target.outer, bits, group_size=group_size, low_rank=rank)


def interpolative_bytes(target: Target, rank: int) -> int:
    """Return the bytes of an interpolative form of a weight on disk."""
    return interpolative.stored_bytes(target.inner, target.outer, rank, target.weight.dtype)


def choose_uniform(options: Options, limit: int) -> Choice:
    """Give every weight the same form and the same fraction, the largest with which all fit into ``limit`` bytes.

    Of several forms it is the one of the least loss. Where a weight does not have the form, it takes another one.
    """
    forms = [{option.form for option in several} - {DENSE} for several in options.values()]
    # Those that all weights have, except that a convolution has none of the quantized ones.
    names = sorted({name for several in forms for name in several})
    shared = [name for name in names if all(name in several or several <= {LOW_RANK} for several in forms)]
    found = [_uniform(options, limit, name) for name in shared or names or (DENSE,)]
    fitting = [choice for choice in found if total_bytes(choice) <= limit]
    if not fitting:
        return {target: several[0] for target, several in options.items()}
    return min(fitting, key=lambda choice: (total_loss(choice), sum((o.error or 0.0) ** 2 for o in choice.values())))


def _uniform(options: Options, limit: int, name: str) -> Choice:
    allowed = {}
    for target, several in options.items():
        same = [option for option in several if option.form in (name, DENSE)]
        allowed[target] = same if any(option.form == name for option in same) else several
    sizes = {target: [option.bytes for option in several] for target, several in allowed.items()}

    def at(fraction: float) -> Choice:
        return {
            target: several[max(bisect_right(sizes[target], fraction * target.dense_bytes) - 1, 0)]
            for target, several in allowed.items()
        }

    low, high = 0.0, 1.0
    if total_bytes(at(high)) <= limit:
        return at(high)
    for _ in range(_FRACTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if total_bytes(at(middle)) <= limit else (low, middle)
    return at(low)


def choose_global(options: Options, limit: int) -> Choice:
    """Return the options of the least total loss within ``limit`` bytes."""
    steps = []  # gain per byte, target and option
    for target, several in options.items():
        for option, better in pairwise(_hull(several)):
            steps.append((_gain(option, better), target, better))
    chosen = {target: several[0] for target, several in options.items()}
    left = limit - total_bytes(chosen)
    stopped = set()
    for _, target, option in sorted(steps, key=lambda step: -step[0]):
        if target in stopped:
            continue
        cost = option.bytes - chosen[target].bytes
        if cost <= left:
            chosen[target], left = option, left - cost
        else:
            stopped.add(target)  # later steps of its hull begin where this one ends
    # Bytes remain where the hull's steps were too large: they are spent on the options between.
    while True:
        gains = [
            (_gain(now, option), target, option)
            for target, now in chosen.items()
            for option in options[target]
            if 0 < option.bytes - now.bytes <= left and option.loss < now.loss
        ]
        if not gains:
            return chosen
        _, target, option = max(gains, key=lambda gain: gain[0])
        left -= option.bytes - chosen[target].bytes
        chosen[target] = option


def _gain(option: Option, better: Option) -> float:
    return (option.loss - better.loss) / (better.bytes - option.bytes)


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the lower convex hull of options sorted by size, along which the gain per byte falls."""
    hull: list[Option] = []
    for option in options:
        if hull and (option.bytes <= hull[-1].bytes or option.loss > hull[-1].loss):
            continue
        while len(hull) > 1:
            first, last = hull[-2:]
            # Not the ratios: with losses of zero they are the same.
            if (first.loss - last.loss) * (option.bytes - last.bytes) > (last.loss - option.loss) * (
                last.bytes - first.bytes
            ):
                break
            hull.pop()
        hull.append(option)
    return hull


def total_loss(choice: Choice) -> float:
    """Return the predicted squared effect of all weights together."""
    return sum(option.loss for option in choice.values())


def total_bytes(choice: Choice) -> int:
    """Return the bytes of all weights on disk."""
    return sum(option.bytes for option in choice.values())


def least_bytes(options: Options) -> int:
    """Return the bytes of all weights in their smallest form."""
    return sum(several[0].bytes for several in options.values())

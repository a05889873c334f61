r"""The forms that a weight can take, each with its bytes and its loss, and the choice of one for every weight.

*Global*: each option of each weight has a predicted squared effect on the output. From the smallest option on, bytes go
to whichever weight gains most per byte. Gains fall along each weight's lower convex hull over all its options, on which
this greedy choice is optimal except for the last step; the hull ends in the dense weight, which loses nothing.
*Uniform*: the same form, and the same kept fraction, everywhere.
"""

__all__ = [
    "Choice", "Forms", "Option", "Options", "choose_global", "choose_uniform", "least_bytes", "total_bytes",
    "total_loss",
]  # fmt: skip

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from panther.compression.targets import LEAST_RANK, Target

_FRACTION_STEPS = 50  # halvings of the kept fraction, to the resolution of a float
_FINE = 4  # multiples of a rank that a weight must have room for; smaller ones have even ranks


@dataclass(frozen=True)
class Option:
    """One way to store a weight.

    Attributes:
        form: ``"dense"`` or ``"low_rank"``.
        bytes: Bytes on disk.
        rank: Rank of the low-rank form, in every group of a convolution.
        loss: Predicted squared effect on the model's output; zero where nothing was fitted.
        error: Predicted relative error of the layer's own output; None where nothing was fitted.
    """

    form: str
    bytes: int
    rank: int | None = None
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
        rank_multiple: What ranks are multiples of, except for weights too small for four of it, whose ranks are even.
    """

    rank_multiple: int = 2

    def options(self, target: Target) -> tuple[Option, ...]:
        """Return the options of a weight, the smallest first, without their losses."""
        step = self.rank_multiple if target.largest_rank >= _FINE * self.rank_multiple else LEAST_RANK
        ranks = range(step, target.largest_rank + 1, step)
        low_rank = (Option("low_rank", target.bytes(rank), rank) for rank in ranks)
        return (*low_rank, Option("dense", target.dense_bytes, error=0.0))


def choose_uniform(options: Options, limit: int) -> Choice:
    """Give every weight the same fraction, the largest with which all fit into ``limit`` bytes."""
    sizes = {target: [option.bytes for option in several] for target, several in options.items()}

    def at(fraction: float) -> Choice:
        return {
            target: several[max(bisect_right(sizes[target], fraction * target.dense_bytes) - 1, 0)]
            for target, several in options.items()
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

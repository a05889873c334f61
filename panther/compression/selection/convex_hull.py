r"""The choice of one option for every weight, within a limit on the sum of their bytes or times.

*Global*: each option of each weight has a predicted squared effect on the output. Starting from the cheapest options,
each step spends a part of the limit on the weight with the largest gain for its cost. Gains fall along the lower convex
hull of each weight's options, where this greedy choice is optimal except for the last step. The hull ends in the dense
weight, which has no loss.
*Uniform*: the same form, and the same kept fraction, everywhere.
"""

__all__ = ["BYTES", "Cost", "choose_global", "choose_uniform", "options_near_global"]

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from panther.compression.calibration.targets import Target
from panther.compression.forms import DENSE, LOW_RANK, Choice, Option, Options, total_loss

_FRACTION_STEPS = 50  # halvings of the kept fraction, to the resolution of a float


@dataclass(frozen=True)
class Cost:
    """A cost of options, on which a choice has a limit.

    Attributes:
        of: Returns the cost of an option.
        dense: Returns the cost of the dense weight.
    """

    of: Callable[[Option], float]
    dense: Callable[[Target], float]

    def total(self, choice: Choice) -> float:
        """Return the cost of all weights."""
        return sum(map(self.of, choice.values()))

    def least(self, options: Options) -> float:
        """Return the cost of all weights in their cheapest form."""
        return self.total(self.cheapest(options))

    def cheapest(self, options: Options) -> Choice:
        """Return the cheapest option of every weight; among equally cheap ones, the option of the least loss."""
        return {target: min(target_options, key=self._order) for target, target_options in options.items()}

    def sorted(self, options: Options) -> Options:
        """Return the options of every weight, sorted by cost and then by loss."""
        return {target: sorted(target_options, key=self._order) for target, target_options in options.items()}

    def _order(self, option: Option) -> tuple[float, float]:
        return self.of(option), option.loss


BYTES = Cost(attrgetter("bytes"), attrgetter("dense_bytes"))
"""Bytes on disk."""


def choose_uniform(options: Options, limit: float, cost: Cost = BYTES) -> Choice:
    """Give every weight the same form, and the largest common fraction with which all weights fit into ``limit``.

    Each form that the weights share is tried, and the one with the least total loss is returned. A weight without this
    form takes a different one.
    """
    options = cost.sorted(options)
    forms = [
        {option.form for option in target_options} - {DENSE}
        for target, target_options in options.items()
        if target.kind.has_metric
    ] or [{option.form for option in target_options} - {DENSE} for target_options in options.values()]
    # A form is shared if all weights have it, apart from weights (small or grouped ones) that can only be low rank, and
    # from embeddings, large layers and experts, which can only be codes.
    names = sorted({name for names_of_target in forms for name in names_of_target})
    shared = [
        name
        for name in names
        if all(name in names_of_target or names_of_target <= {LOW_RANK} for names_of_target in forms)
    ]
    choices = [_uniform(options, limit, name, cost) for name in shared or names or (DENSE,)]
    fitting = [choice for choice in choices if cost.total(choice) <= limit]
    if not fitting:
        return cost.cheapest(options)
    return min(fitting, key=lambda choice: (total_loss(choice), sum((o.error or 0.0) ** 2 for o in choice.values())))


def _uniform(options: Options, limit: float, name: str, cost: Cost) -> Choice:
    allowed = {}
    for target, target_options in options.items():
        same = [option for option in target_options if option.form in (name, DENSE)]
        allowed[target] = same if any(option.form == name for option in same) else target_options
    costs = {target: [cost.of(option) for option in target_options] for target, target_options in allowed.items()}
    dense_costs = {target: cost.dense(target) for target in allowed}

    def at(fraction: float) -> Choice:
        return {
            target: target_options[max(bisect_right(costs[target], fraction * dense_costs[target]) - 1, 0)]
            for target, target_options in allowed.items()
        }

    low, high = 0.0, 1.0
    if cost.total(at(high)) <= limit:
        return at(high)
    for _ in range(_FRACTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost.total(at(middle)) <= limit else (low, middle)
    return at(low)


def choose_global(options: Options, limit: float, cost: Cost = BYTES) -> Choice:
    """Choose options greedily along the convex hulls, for a small total loss and a total cost of at most ``limit``.

    If even the cheapest options cost more, these are returned.
    """
    options = cost.sorted(options)
    choice = {target: target_options[0] for target, target_options in options.items()}
    left = limit - cost.total(choice)
    stopped = set()
    for _, target, option in _steps(options, cost):
        if target in stopped:
            continue
        more = cost.of(option) - cost.of(choice[target])
        if more <= left:
            choice[target], left = option, left - more
        else:
            stopped.add(target)  # later steps of its hull begin where this one ends
    # If the next steps along the hulls are too large for what remains of the limit, spend it on options between them.
    while True:
        gains = [
            (_gain(now, option, cost), target, option)
            for target, now in choice.items()
            for option in options[target]
            if 0 < cost.of(option) - cost.of(now) <= left and option.loss < now.loss
        ]
        if not gains:
            return choice
        _, target, option = max(gains, key=lambda gain: gain[0])
        left -= cost.of(option) - cost.of(choice[target])
        choice[target] = option


def options_near_global(options: Options, limit: float, factor: float) -> Options:
    """Return the options that the global choice within ``limit`` bytes can take if losses are wrong by ``factor``.

    A weight takes an option if its gain per byte over the one before it on the hull is at least the least gain for
    which there are bytes left, and the gain of the next option is not. The losses of any one weight may be larger or
    smaller than in ``options`` by up to ``factor``.
    """
    options = BYTES.sorted(options)
    left = limit - sum(target_options[0].bytes for target_options in options.values())
    least_gain = 0.0
    sizes = {target: target_options[0].bytes for target, target_options in options.items()}
    for gain, target, option in _steps(options, BYTES):
        left -= option.bytes - sizes[target]
        if left < 0:
            least_gain = gain
            break
        sizes[target] = option.bytes
    near = {}
    for target, target_options in options.items():
        hull = _hull(target_options, BYTES)
        gains = [math.inf, *(_gain(option, better, BYTES) for option, better in pairwise(hull)), 0.0]
        near[target] = [
            option
            for option, (gain, next_gain) in zip(hull, pairwise(gains), strict=True)
            if gain >= least_gain / factor and next_gain <= least_gain * factor
        ]
    return near


def _steps(options: Options, cost: Cost) -> list[tuple[float, Target, Option]]:
    """Return the steps along the hulls of sorted options, the largest gain for the cost first."""
    steps = [
        (_gain(option, better, cost), target, better)
        for target, target_options in options.items()
        for option, better in pairwise(_hull(target_options, cost))
    ]
    return sorted(steps, key=lambda step: -step[0])


def _gain(option: Option, better: Option, cost: Cost) -> float:
    return (option.loss - better.loss) / (cost.of(better) - cost.of(option))


def _hull(options: Sequence[Option], cost: Cost) -> list[Option]:
    """Return the lower convex hull of options sorted by cost, along which the gain for the cost falls."""
    hull: list[Option] = []
    for option in options:
        if hull and (cost.of(option) <= cost.of(hull[-1]) or option.loss > hull[-1].loss):
            continue
        while len(hull) > 1:
            first, last = hull[-2:]
            # Cross-multiplied, to compare the gains for the cost without divisions.
            gained = (first.loss - last.loss) * (cost.of(option) - cost.of(last))
            if gained > (last.loss - option.loss) * (cost.of(last) - cost.of(first)):
                break
            hull.pop()
        hull.append(option)
    return hull

r"""The choice of one option for every weight, within a limit on their bytes or on their time together.

*Global*: each option of each weight has a predicted squared effect on the output. From the cheapest option on, the
limit is spent on whichever weight gains most for it. Gains fall along each weight's lower convex hull over all its
options, on which this greedy choice is optimal except for the last step; the hull ends in the dense weight, which loses
nothing.
*Uniform*: the same form, and the same kept fraction, everywhere.
"""

__all__ = ["BYTES", "Cost", "choose_global", "choose_uniform", "seconds"]

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from panther.compression.forms.options import DENSE, LOW_RANK, Choice, Option, Options, Times, total_loss
from panther.compression.targets import Target

_FRACTION_STEPS = 50  # halvings of the kept fraction, to the resolution of a float


@dataclass(frozen=True)
class Cost:
    """What a choice spends.

    Attributes:
        of: Returns the cost of an option.
        dense: Returns that of the dense weight.
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
        """Return the cheapest option of every weight; of several, that of the least loss."""
        return {target: min(several, key=self._order) for target, several in options.items()}

    def sorted(self, options: Options) -> Options:
        """Return the options of every weight, the cheapest first."""
        return {target: sorted(several, key=self._order) for target, several in options.items()}

    def _order(self, option: Option) -> tuple[float, float]:
        return self.of(option), option.loss


BYTES = Cost(attrgetter("bytes"), attrgetter("dense_bytes"))
"""Bytes on disk."""


def seconds(times: Mapping[Target, Times]) -> Cost:
    """Return the cost in seconds of one batch, for options that were timed."""
    return Cost(attrgetter("time_s"), lambda target: times[target].dense_s)


def choose_uniform(options: Options, limit: float, cost: Cost = BYTES) -> Choice:
    """Give every weight the same form and the same fraction, the largest with which all fit into ``limit``.

    Of several forms it is the one of the least loss. Where a weight does not have the form, it takes another one.
    """
    options = cost.sorted(options)
    forms = [{option.form for option in several} - {DENSE} for several in options.values()]
    # Those that all weights have, except those that can be low rank or dense alone, as small ones and groups may.
    names = sorted({name for several in forms for name in several})
    shared = [name for name in names if all(name in several or several <= {LOW_RANK} for several in forms)]
    found = [_uniform(options, limit, name, cost) for name in shared or names or (DENSE,)]
    fitting = [choice for choice in found if cost.total(choice) <= limit]
    if not fitting:
        return cost.cheapest(options)
    return min(fitting, key=lambda choice: (total_loss(choice), sum((o.error or 0.0) ** 2 for o in choice.values())))


def _uniform(options: Options, limit: float, name: str, cost: Cost) -> Choice:
    allowed = {}
    for target, several in options.items():
        same = [option for option in several if option.form in (name, DENSE)]
        allowed[target] = same if any(option.form == name for option in same) else several
    costs = {target: [cost.of(option) for option in several] for target, several in allowed.items()}

    def at(fraction: float) -> Choice:
        return {
            target: several[max(bisect_right(costs[target], fraction * cost.dense(target)) - 1, 0)]
            for target, several in allowed.items()
        }

    low, high = 0.0, 1.0
    if cost.total(at(high)) <= limit:
        return at(high)
    for _ in range(_FRACTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if cost.total(at(middle)) <= limit else (low, middle)
    return at(low)


def choose_global(options: Options, limit: float, cost: Cost = BYTES) -> Choice:
    """Return the options of the least total loss within ``limit``."""
    options = cost.sorted(options)
    steps = []  # gain for the cost, target and option
    for target, several in options.items():
        for option, better in pairwise(_hull(several, cost)):
            steps.append((_gain(option, better, cost), target, better))
    chosen = {target: several[0] for target, several in options.items()}
    left = limit - cost.total(chosen)
    stopped = set()
    for _, target, option in sorted(steps, key=lambda step: -step[0]):
        if target in stopped:
            continue
        more = cost.of(option) - cost.of(chosen[target])
        if more <= left:
            chosen[target], left = option, left - more
        else:
            stopped.add(target)  # later steps of its hull begin where this one ends
    # Something remains where the hull's steps were too large: it is spent on the options between.
    while True:
        gains = [
            (_gain(now, option, cost), target, option)
            for target, now in chosen.items()
            for option in options[target]
            if 0 < cost.of(option) - cost.of(now) <= left and option.loss < now.loss
        ]
        if not gains:
            return chosen
        _, target, option = max(gains, key=lambda gain: gain[0])
        left -= cost.of(option) - cost.of(chosen[target])
        chosen[target] = option


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
            # Not the ratios: with losses of zero they are the same.
            gained = (first.loss - last.loss) * (cost.of(option) - cost.of(last))
            if gained > (last.loss - option.loss) * (cost.of(last) - cost.of(first)):
                break
            hull.pop()
        hull.append(option)
    return hull

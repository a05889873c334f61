r"""Choose a form for every layer within a limit of bytes or times, and compare choices by their held-out errors.

*Global*: each option of each weight has a predicted squared effect on the output. Starting from the cheapest options,
each step spends a part of the limit on the weight with the largest gain for its cost. Gains fall along the lower convex
hull of each weight's options, where this greedy choice is optimal except for the last step. The hull ends in the dense
weight, which has no loss.
*Uniform*: the same form, and the same kept fraction, everywhere.
"""

__all__ = [
    "BYTES", "CHOOSERS", "SUSPICIOUS_ERROR", "Allocation", "Cost", "allocate_fast_forms", "allocate_forms",
    "byte_limit", "choose_global", "choose_uniform", "fit_and_allocate", "model_bytes", "options_near_global",
    "seconds", "with_predicted_losses",
]  # fmt: skip

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._text import counted
from panther.compression.calibration.targets import Target
from panther.compression.forms import (
    DENSE,
    LOW_RANK,
    Choice,
    Fits,
    Option,
    Options,
    least_bytes,
    total_bytes,
    total_loss,
)
from panther.compression.forms.metric import RIDGE
from panther.compression.selection.timing import SLOWER, Times, Timing
from panther.compression.selection.trials import Trials
from panther.errors import CompressionError
from panther.nn.sketch_record import plain_state

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


def seconds(times: Mapping[Target, Times]) -> Cost:
    """Return the cost in seconds of one batch, for options that were timed."""
    return Cost(attrgetter("time_s"), lambda target: times[target].dense_s)


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


_ERROR_STEPS = 8  # halvings of the budget in the search for max_error
# Slower forms are used only if they divide the error, or the bytes, by this factor.
_WORTH = 2.0

CHOOSERS = {"global": choose_global, "uniform": choose_uniform}


@dataclass(frozen=True)
class Allocation:
    """The chosen options, and how they were found.

    ``error`` and ``uniform_error`` are relative errors of the output on the held-out batches, if more than one choice
    was tried. ``options`` have the losses that the choice is based on. ``of_predicted`` has the measured and the
    predicted error of the choice by predicted losses, even if another choice was better.
    """

    choice: Choice
    allocate: str
    uniform_error: float | None = None
    notes: tuple[str, ...] = ()
    options: Options = field(default_factory=dict)
    error: float | None = None
    of_predicted: tuple[float, float] | None = None


def byte_limit(
    model: nn.Module,
    options: Options,
    *,
    budget: float | None,
    bits: float | None = None,
    max_bytes: int | None = None,
    slower: bool = True,
) -> int | None:
    """Return the bytes for the targets, or None if no size is given; raise if the smallest forms take more.

    ``slower`` states whether slower forms are among the options; only the error message depends on it.
    """
    dense, least = sum(target.dense_bytes for target in options), least_bytes(options)
    numbers = sum(target.dense_numbers for target in options)
    if budget is not None:
        limit, setting = int(budget * dense * (1 + 1e-12)), f"budget={budget}"  # 0.29 * 100 is 28.99...
        feasible = f"budget is {math.ceil(least / dense * 1e4) / 1e4}"
    elif bits is not None:
        limit, setting = int(bits * numbers / 8 * (1 + 1e-12)), f"bits={bits}"
        feasible = f"bits is {math.ceil(8 * least / numbers * 1e3) / 1e3}"
        if bits > 8 * dense / numbers:
            raise CompressionError(f"bits={bits} is above the {8 * dense / numbers:g} of the dense weights: give less")
    elif max_bytes is not None:
        other = model_bytes(model) - dense
        limit, setting, feasible = int(max_bytes) - other, f"max_bytes={max_bytes:,}", f"max_bytes is {least + other:,}"
    else:
        return None
    if least > limit:
        which = "" if slower else " that were not measured slower than dense"
        fix = "exclude some layers" if slower else "allow_slower=True"
        raise CompressionError(
            f"{setting} leaves {max(limit, 0):,} bytes for layers that take {least:,} in their smallest forms{which}: "
            f"the smallest feasible {feasible}, or {fix}"
        )
    return min(limit, dense)


def allocate_forms(
    trials: Trials, fits: Fits, allocate: str, limit: float | None, max_error: float | None, cost: Cost = BYTES
) -> Allocation:
    """Choose a form of every weight within ``limit``, in units of ``cost``.

    Without a limit, it is the smallest number of bytes with which the error is at most ``max_error``. Global choices
    are made by predicted and by measured losses, and compared with the uniform choice on the held-out batches; the
    choice with the smallest error is returned.
    """
    choose, options = CHOOSERS[allocate], fits.options
    if limit is None:
        assert max_error is not None  # one of the two is given
        low, limit = least_bytes(options), sum(target.dense_bytes for target in options)
        if trials.errors([choose(options, low)])[0] <= max_error:
            limit = low
        else:
            for _ in range(_ERROR_STEPS):
                middle = (low + limit) // 2
                fine = trials.errors([choose(options, middle)])[0] <= max_error
                low, limit = (low, middle) if fine else (middle, limit)
    uniform = Allocation(choose_uniform(options, limit, cost), "uniform", options=options)
    if allocate != "global":
        return uniform
    candidates = [Allocation(choose_global(options, limit, cost), "global", options=options)]
    if fits.comparable:
        measured = trials.corrected(options, candidates[0].choice)
        candidates.append(Allocation(choose_global(measured, limit, cost), "global", options=measured))
    *errors, uniform_error = trials.errors([each.choice for each in (*candidates, uniform)])
    error, best = min(zip(errors, candidates, strict=True), key=lambda pair: pair[0])
    notes: tuple[str, ...] = ()
    if error > uniform_error:
        best, notes = (
            uniform,
            (
                f"uniform forms are used: forms chosen globally have an error of {error:.3g} on the held-out batches, "
                f"and uniform forms an error of {uniform_error:.3g}",
            ),
        )
    return replace(
        best,
        choice=with_predicted_losses(fits, best.options, best.choice),
        uniform_error=uniform_error,
        notes=notes,
        error=min(error, uniform_error),
        of_predicted=(errors[0], total_loss(candidates[0].choice) ** 0.5),
    )


def allocate_fast_forms(
    trials: Trials, fits: Fits, timing: Timing, allocate: str, limit: int | None, max_error: float | None
) -> Allocation:
    """Choose as ``allocate_forms`` does, but use forms slower than the dense layer only where they are worth it.

    They are used if the size cannot be reached without them, or if they at least halve the error (or, without a limit,
    the bytes). A note states the reason.
    """
    allocation = allocate_forms(trials, fits, allocate, limit, max_error)
    slow = sum(timing.is_slower(target, option) for target, option in allocation.choice.items())
    if not slow:
        return allocation
    fast_options = {target: timing.without_slower(target, options) for target, options in fits.options.items()}
    note = f"forms below {SLOWER} of the dense layer's speed are used, in {counted(slow, 'layer')}, because "
    if limit is not None and least_bytes(fast_options) > limit:
        return replace(allocation, notes=(*allocation.notes, note + "the size cannot be reached without them"))
    fast_allocation = allocate_forms(trials, replace(fits, options=fast_options), allocate, limit, max_error)
    before: float
    after: float
    if limit is None:
        before, after = total_bytes(allocation.choice), total_bytes(fast_allocation.choice)
        comparison = "the layers would take {:,} bytes without them, and take {:,}"
    else:
        before, after = trials.errors([allocation.choice, fast_allocation.choice], "error without slower forms")
        comparison = "the held-out error would be {:.3g} without them, and is {:.3g}"
    if after < _WORTH * before:
        return fast_allocation
    return replace(allocation, notes=(*allocation.notes, f"{note}{comparison.format(after, before)}"))


def with_predicted_losses(fits: Fits, options: Options, choice: Choice) -> Choice:
    """Return the same choice with predicted losses, from which the error of the output is predicted.

    ``choice`` is a choice among ``options``, whose losses were corrected by measurements.
    """
    return {target: fits.options[target][options[target].index(option)] for target, option in choice.items()}


def model_bytes(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of all tensors when saved, each storage once; with ``dtype``, of floating tensors in this dtype.

    Tensors whose dtype is narrower than ``dtype`` keep theirs.
    """
    storage_bytes: dict[Any, int] = {}
    for tensor in plain_state(model).values():
        if isinstance(tensor, Tensor) and not is_lazy(tensor):
            key = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else id(tensor)
            itemsize = tensor.element_size()
            if dtype is not None and tensor.is_floating_point():
                itemsize = min(itemsize, dtype.itemsize)
            storage_bytes[key] = max(storage_bytes.get(key, 0), tensor.numel() * itemsize)
    return sum(storage_bytes.values())


SUSPICIOUS_ERROR = 0.05
"""Above this held-out error, a large excess over the predicted error means that the held-out batches differ from the
rest."""

# If the held-out error exceeds the predicted one by the first number, weights are fitted again with the second number
# as the ridge. A convolutional network in 4.25 bits, fitted to 12 photographs, had a held-out error of 0.93 with the
# usual ridge, of 0.33 with a ridge of 0.03, and of 0.235 with 0.3.
_REFIT_RATIO, _CAUTIOUS_RIDGE = 3.0, 0.3


def fit_and_allocate(
    fit_with_ridge: Callable[[float], Fits], allocation_of: Callable[[Fits], Allocation]
) -> tuple[Fits, Allocation]:
    """Fit with the usual ridge, and again with a larger one if the predicted error is far below the held-out error."""
    fits = fit_with_ridge(RIDGE)
    allocation = allocation_of(fits)
    if _is_misleading(fits, allocation):
        cautious = fit_with_ridge(_CAUTIOUS_RIDGE)
        fits, allocation = _with_smaller_error(fits, allocation, cautious, allocation_of(cautious))
    return fits, allocation


def _is_misleading(fits: Fits, allocation: Allocation) -> bool:
    """Return whether the held-out error exceeds the predicted error so far that the moments cannot be trusted.

    Both are errors of the choice by predicted losses, even if uniform forms are used because their error is smaller.
    """
    if allocation.of_predicted is None or not fits.comparable:
        return False
    error, predicted = allocation.of_predicted
    return error > max(SUSPICIOUS_ERROR, _REFIT_RATIO * predicted)


def _with_smaller_error(fits: Fits, first: Allocation, cautious: Fits, second: Allocation) -> tuple[Fits, Allocation]:
    """Return the fits and the choice with the smaller held-out error, with a note if the larger ridge is better."""
    if first.error is None or second.error is None or not second.error < first.error:
        return fits, first
    note = (
        f"weights are fitted with a larger ridge, which lowers the error on the held-out batches from "
        f"{first.error:.3g} to {second.error:.3g}: more varied calibration batches would help"
    )
    return cautious, replace(second, notes=(*second.notes, note))

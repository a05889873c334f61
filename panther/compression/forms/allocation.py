"""A form for every layer within a budget, tried on the held-out batches."""

__all__ = ["CHOOSERS", "Allocation", "allocated", "allocated_fast", "as_predicted", "byte_limit", "model_bytes"]

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._text import counted
from panther.compression.conversion import convert_all
from panther.compression.forms.choice import BYTES, Cost, choose_global, choose_uniform
from panther.compression.forms.fitting import Fits
from panther.compression.forms.options import Choice, Forms, Options, least_bytes, total_bytes, total_loss
from panther.compression.runner import Runner
from panther.compression.targets import Survey, replace_modules
from panther.errors import CompressionError

_ERROR_STEPS = 8  # halvings of the budget in the search for max_error
_LARGEST_SCALE = 8.0  # of a prediction, up or down: one batch may not reach a layer at all, as in a mixture of experts
_SEED_BYTES = 32  # of a new layer's sketch_seed

_WORTH = 2.0  # times the error without slower forms, or the bytes, at which they are used

CHOOSERS = {"global": choose_global, "uniform": choose_uniform}


@dataclass(frozen=True)
class Allocation:
    """The chosen options, and how they were found.

    Attributes:
        choice: An option of each weight.
        allocate: ``"global"``, ``"uniform"`` or ``"fixed"``.
        uniform_error: Relative error of the output with uniform options, where both were tried.
        notes: Deviations from the arguments, with reasons.
        options: Those that were chosen from, with the losses by which they were.
        error: Relative error of the output on the held-out batches, where several choices were tried.
        of_predicted: The same of the choice by predicted losses, whether or not it is the one that was taken, and the
            error that was predicted for it.
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
    """Return the bytes for the targets, None if no size is given; CompressionError if the smallest forms take more.

    ``slower`` only tells the error whether slower forms are among the options.
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
        other = model_bytes(model) - dense + _SEED_BYTES * sum(len(target.modules) for target in options)
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


def allocated(
    runner: Runner,
    survey: Survey,
    fits: Fits,
    allocate: str,
    limit: float | None,
    max_error: float | None,
    seed: int,
    cost: Cost = BYTES,
) -> Allocation:
    """Choose within a limit, of bytes unless another cost is given, or the fewest whose error is within ``max_error``.

    There are two global choices, by the predicted losses and by measured ones, and the one that does better on the
    held-out batches is used; the uniform one is, where it does better than both.
    """
    choose, options = CHOOSERS[allocate], fits.options

    def errors(*several: Choice) -> list[float]:
        variants = [partial(replace_modules, runner.model, convert_all(survey, fits, one, seed)) for one in several]
        return runner.errors(variants, "error of forms")

    if limit is None:
        assert max_error is not None  # one of the two is given
        low, limit = least_bytes(options), sum(target.dense_bytes for target in survey.targets)
        if errors(choose(options, low))[0] <= max_error:
            limit = low
        else:
            for _ in range(_ERROR_STEPS):
                middle = (low + limit) // 2
                fine = errors(choose(options, middle))[0] <= max_error
                low, limit = (low, middle) if fine else (middle, limit)
    uniform = Allocation(choose_uniform(options, limit, cost), "uniform", options=options)
    if allocate != "global":
        return uniform
    candidates = [Allocation(choose_global(options, limit, cost), "global", options=options)]
    if fits.comparable:
        measured = _measured(runner, survey, fits, candidates[0].choice, seed)
        candidates.append(Allocation(choose_global(measured, limit, cost), "global", options=measured))
    *found, uniform_error = errors(*(candidate.choice for candidate in candidates), uniform.choice)
    error, chosen = min(zip(found, candidates, strict=True), key=lambda pair: pair[0])
    notes: tuple[str, ...] = ()
    if error > uniform_error:
        chosen, notes = (
            uniform,
            (
                f"uniform forms are used: those chosen globally have an error of {error:.3g} on the held-out batches, "
                f"uniform ones {uniform_error:.3g}",
            ),
        )
    return replace(
        chosen,
        choice=as_predicted(fits, chosen.options, chosen.choice),
        uniform_error=uniform_error,
        notes=notes,
        error=min(error, uniform_error),
        of_predicted=(found[0], total_loss(candidates[0].choice) ** 0.5),
    )


def allocated_fast(
    runner: Runner, survey: Survey, fits: Fits, forms: Forms, allocate: str, limit: int | None, max_error: float | None,
    seed: int,
) -> Allocation:  # fmt: skip
    """Choose as ``allocated`` does, but of forms slower than the dense layer only where that is worth it.

    It is where the size cannot be reached without them, and where they divide the error, or the bytes that a largest
    error takes, by two at least. A note says so.
    """
    found = allocated(runner, survey, fits, allocate, limit, max_error, seed)
    slow = sum(forms.is_slower(target, option) for target, option in found.choice.items())
    if not slow:
        return found
    fast = {target: forms.without_slower(target, several) for target, several in fits.options.items()}
    note = f"forms slower than the dense layers are used, in {counted(slow, 'layer')}, because "
    if limit is not None and least_bytes(fast) > limit:
        return replace(found, notes=(*found.notes, note + "the size cannot be reached without them"))
    other = allocated(runner, survey, replace(fits, options=fast), allocate, limit, max_error, seed)
    before: float
    after: float
    if limit is None:
        before, after = total_bytes(found.choice), total_bytes(other.choice)
        told = "the layers would take {:,} bytes without them, and take {:,}"
    else:
        new = [convert_all(survey, fits, one.choice, seed) for one in (found, other)]
        variants = [partial(replace_modules, runner.model, each) for each in new]
        before, after = runner.errors(variants, "error without slower forms")
        told = "the held-out error would be {:.3g} without them, and is {:.3g}"
    if after < _WORTH * before:
        return other
    return replace(found, notes=(*found.notes, f"{note}{told.format(after, before)}"))


def as_predicted(fits: Fits, options: Options, choice: Choice) -> Choice:
    """Return a choice from options with other losses as one with the predicted ones, which say what the error is."""
    return {target: fits.options[target][options[target].index(option)] for target, option in choice.items()}


def _measured(runner: Runner, survey: Survey, fits: Fits, choice: Choice, seed: int) -> Options:
    """Return the options with losses scaled by what a layer's chosen one alone costs on a batch, over the prediction.

    Predictions take a layer's inputs and gradients as independent, and positions too. In a sentence encoder, single
    layers lost 0.4 (values of attention) to 2.6 times as much (queries of the first block) as predicted.
    """
    new = convert_all(survey, fits, choice, seed)
    changed = [target for target, option in choice.items() if option.loss > 0]
    variants = [
        partial(replace_modules, runner.model, {module: new[module] for module in target.modules}) for target in changed
    ]
    found = runner.errors(variants, "error of single layers", runner.batches[:1])
    scales = {
        target: min(max(error**2 / choice[target].loss, 1 / _LARGEST_SCALE), _LARGEST_SCALE)
        for target, error in zip(changed, found, strict=True)
    }
    return {
        target: [replace(option, loss=option.loss * scales.get(target, 1.0)) for option in several]
        for target, several in fits.options.items()
    }


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all tensors, as saved: each storage once."""
    seen: dict[Any, int] = {}
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor) and not is_lazy(tensor):
            key = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else id(tensor)
            seen[key] = max(seen.get(key, 0), tensor.numel() * tensor.element_size())
    return sum(seen.values())

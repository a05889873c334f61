"""A form for every layer within a budget, tried on the held-out batches."""

__all__ = ["Allocation", "allocated", "byte_limit", "model_bytes"]

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther.compression.conversion import convert_all
from panther.compression.forms.fitting import Fits
from panther.compression.forms.options import Choice, Options, choose_global, choose_uniform, least_bytes
from panther.compression.runner import Runner
from panther.compression.targets import Survey, replace_modules
from panther.errors import CompressionError

_ERROR_STEPS = 8  # halvings of the budget in the search for max_error
_LARGEST_SCALE = 8.0  # of a prediction, up or down: one batch may not reach a layer at all, as in a mixture of experts
_SEED_BYTES = 32  # of a new layer's sketch_seed


@dataclass(frozen=True)
class Allocation:
    """The chosen options, and how they were found."""

    choice: Choice
    allocate: str
    uniform_error: float | None = None
    notes: tuple[str, ...] = ()


def byte_limit(
    model: nn.Module, options: Options, *, budget: float | None, bits: float | None = None, max_bytes: int | None = None
) -> int | None:
    """Return the bytes for the targets, None if no size is given; CompressionError if the smallest forms take more."""
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
        raise CompressionError(
            f"{setting} leaves {max(limit, 0):,} bytes for layers that take {least:,} in their smallest forms: the "
            f"smallest feasible {feasible}, or exclude some layers"
        )
    return min(limit, dense)


def allocated(
    runner: Runner, survey: Survey, fits: Fits, allocate: str, limit: int | None, max_error: float | None, seed: int
) -> Allocation:
    """Choose within ``limit`` bytes, or the fewest bytes whose error is within ``max_error``.

    There are two global choices, by the predicted losses and by measured ones, and the one that does better on the
    held-out batches is used; the uniform one is, where it does better than both.
    """
    choose = {"global": choose_global, "uniform": choose_uniform}

    def errors(*several: Choice) -> list[float]:
        variants = [partial(replace_modules, runner.model, convert_all(survey, fits, one, seed)) for one in several]
        return runner.errors(variants, "error of forms")

    if limit is None:
        assert max_error is not None  # one of the two is given
        low, limit = least_bytes(fits.options), sum(target.dense_bytes for target in survey.targets)
        if errors(choose[allocate](fits.options, low))[0] <= max_error:
            limit = low
        else:
            for _ in range(_ERROR_STEPS):
                middle = (low + limit) // 2
                fine = errors(choose[allocate](fits.options, middle))[0] <= max_error
                low, limit = (low, middle) if fine else (middle, limit)
    uniform = choose_uniform(fits.options, limit)
    if allocate != "global":
        return Allocation(uniform, "uniform")
    candidates = [choose_global(fits.options, limit)]
    if fits.comparable:
        measured = _measured(runner, survey, fits, candidates[0], seed)
        places = {target: measured[target].index(one) for target, one in choose_global(measured, limit).items()}
        candidates.append({target: fits.options[target][place] for target, place in places.items()})
    *found, uniform_error = errors(*candidates, uniform)
    error, chosen = min(zip(found, candidates, strict=True), key=lambda pair: pair[0])
    if error <= uniform_error:
        return Allocation(chosen, "global", uniform_error)
    note = (
        f"uniform forms are used: those chosen globally have an error of {error:.3g} on the held-out batches, uniform "
        f"ones {uniform_error:.3g}"
    )
    return Allocation(uniform, "uniform", uniform_error, (note,))


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

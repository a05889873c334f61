"""How the budget is shared out: its bytes, and the ranks that do best on the held-out batches."""

__all__ = ["Allocation", "allocate_ranks", "byte_limit", "model_bytes"]

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther.compression.conversion import convert_all
from panther.compression.fits import Fits
from panther.compression.ranks import Ranks, allocate_global, allocate_uniform, least_bytes
from panther.compression.runner import Runner
from panther.compression.targets import LEAST_RANK, Survey, replace_modules
from panther.errors import CompressionError

_ERROR_STEPS = 8  # halvings of the budget in the search for max_error
_SEED_BYTES = 32  # of a new layer's sketch_seed


@dataclass(frozen=True)
class Allocation:
    """Ranks, and how they were found."""

    ranks: Ranks
    allocate: str
    uniform_error: float | None = None
    notes: tuple[str, ...] = ()


def byte_limit(
    model: nn.Module, survey: Survey, *, budget: float | None, max_bytes: int | None, seeded: bool
) -> int | None:
    """Return the bytes for the targets; None if neither ``budget`` nor ``max_bytes`` is given.

    Raises:
        CompressionError: If their smallest ranks take more; the message names the smallest feasible setting.
    """
    if budget is None and max_bytes is None:
        return None
    dense = sum(target.dense_bytes for target in survey.targets)
    least = least_bytes(survey.targets, seeded=seeded)
    if max_bytes is None:
        limit, setting = int((budget or 0.0) * dense * (1 + 1e-12)), f"budget={budget}"  # 0.29 * 100 is 28.99...
        feasible = f"budget is {math.ceil(least / dense * 1e4) / 1e4}"
    else:
        seeds = _SEED_BYTES * sum(len(target.modules) for target in survey.targets)
        other = model_bytes(model) - dense + seeds
        limit, setting, feasible = int(max_bytes) - other, f"max_bytes={max_bytes:,}", f"max_bytes is {least + other:,}"
    if least > limit:
        raise CompressionError(
            f"{setting} leaves {max(limit, 0):,} bytes for layers that take {least:,} at rank {LEAST_RANK}: the "
            f"smallest feasible {feasible}, or exclude some layers"
        )
    return min(limit, dense)


def allocate_ranks(
    runner: Runner, survey: Survey, fits: Fits, allocate: str, limit: int | None, max_error: float | None, seed: int
) -> Allocation:
    """Choose the ranks within ``limit`` bytes, or the fewest bytes whose error is within ``max_error``.

    Global ranks are used only where uniform ones do no better on the held-out batches.
    """

    def ranks(allocate: str, limit: int) -> Ranks:
        if allocate == "global":
            return allocate_global({target: fits.tails[target] for target in survey.targets}, limit)
        return allocate_uniform(survey.targets, limit, seeded=not fits.fits)

    def errors(*several: Ranks) -> list[float]:
        variants = [partial(replace_modules, runner.model, convert_all(survey, fits, one, seed)) for one in several]
        return runner.errors(variants, "error of ranks")

    if limit is None:
        assert max_error is not None  # one of the two is given
        low = least_bytes(survey.targets, seeded=not fits.fits)
        limit = sum(target.dense_bytes for target in survey.targets)
        if errors(ranks(allocate, low))[0] <= max_error:
            limit = low
        else:
            for _ in range(_ERROR_STEPS):
                middle = (low + limit) // 2
                low, limit = (low, middle) if errors(ranks(allocate, middle))[0] <= max_error else (middle, limit)
    uniform = ranks("uniform", limit)
    if allocate != "global":
        return Allocation(uniform, "uniform")
    chosen = ranks("global", limit)
    error, uniform_error = errors(chosen, uniform)
    if error <= uniform_error:
        return Allocation(chosen, "global", uniform_error)
    note = (
        f"uniform ranks are used: global ones have an error of {error:.3g} on the held-out batches, uniform ones "
        f"{uniform_error:.3g}"
    )
    return Allocation(uniform, "uniform", uniform_error, (note,))


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all tensors, as saved: each storage once."""
    seen: dict[Any, int] = {}
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor) and not is_lazy(tensor):
            key = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else id(tensor)
            seen[key] = max(seen.get(key, 0), tensor.numel() * tensor.element_size())
    return sum(seen.values())

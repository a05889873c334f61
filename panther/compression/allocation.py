r"""Ranks for all layers under one budget.

*Uniform*: the same kept fraction everywhere. *Global*: the output's loss at rank r is :math:`\sum_{j > r}
\sigma_j^2` over a layer's components, so rank after rank goes to whichever layer gains most per byte. Gains fall along
each layer's lower convex hull, on which this greedy choice is optimal except for the last step; the hull ends in the
dense layer, which loses nothing.
"""

__all__ = [
    "Allocation", "allocate_global", "allocate_ranks", "allocate_uniform", "byte_limit", "least_bytes", "model_bytes",
    "predicted_loss", "total_bytes",
]  # fmt: skip

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther.compression.conversion import convert_all
from panther.compression.fits import Fits
from panther.compression.runner import Runner
from panther.compression.targets import LEAST_RANK, Ranks, Survey, Target, replace_modules
from panther.errors import CompressionError

_ERROR_STEPS = 8  # halvings of the budget in the search for max_error
_FRACTION_STEPS = 50  # halvings of the kept fraction, to the resolution of a float
_SEED_BYTES = 32  # of a new layer's sketch_seed

_Point = tuple[int, float, int | None]  # bytes, loss and rank


@dataclass(frozen=True)
class Allocation:
    """Ranks, and how they were found."""

    ranks: Ranks
    allocate: str
    uniform_error: float | None = None
    notes: tuple[str, ...] = ()


def byte_limit(model: nn.Module, survey: Survey, *, budget: float | None, max_bytes: int | None) -> int | None:
    """Return the bytes for the targets, None if neither is given; CompressionError if the smallest ranks take more."""
    dense, least = sum(target.dense_bytes for target in survey.targets), least_bytes(survey.targets)
    if budget is not None:
        limit, setting = int(budget * dense * (1 + 1e-12)), f"budget={budget}"  # 0.29 * 100 is 28.99...
        feasible = f"budget is {math.ceil(least / dense * 1e4) / 1e4}"
    elif max_bytes is not None:
        other = model_bytes(model) - dense + _SEED_BYTES * sum(len(target.modules) for target in survey.targets)
        limit, setting, feasible = int(max_bytes) - other, f"max_bytes={max_bytes:,}", f"max_bytes is {least + other:,}"
    else:
        return None
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
        return allocate_uniform(survey.targets, limit)

    def errors(*several: Ranks) -> list[float]:
        variants = [partial(replace_modules, runner.model, convert_all(survey, fits, one, seed)) for one in several]
        return runner.errors(variants, "error of ranks")

    if limit is None:
        assert max_error is not None  # one of the two is given
        low, limit = least_bytes(survey.targets), sum(target.dense_bytes for target in survey.targets)
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


def allocate_uniform(targets: Sequence[Target], limit: int) -> Ranks:
    """Give every target the same fraction, the largest with which all fit into ``limit`` bytes."""

    def at(fraction: float) -> Ranks:
        ranks: Ranks = {}
        for target in targets:
            rank = max(int(fraction * target.dense_numbers / target.numbers(2)) * 2, LEAST_RANK)
            ranks[target] = rank if rank <= target.largest_rank else None
        return ranks

    low, high = 0.0, 1.0
    if total_bytes(at(high)) <= limit:
        return at(high)
    for _ in range(_FRACTION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if total_bytes(at(middle)) <= limit else (low, middle)
    return at(low)


def allocate_global(tails: Mapping[Target, Tensor], limit: int) -> Ranks:
    """Return the ranks of the least total loss within ``limit`` bytes; ``tails[target][r]`` is the loss at rank r."""
    most = {target: min(target.largest_rank, (len(tail) - 1) // 2 * 2) for target, tail in tails.items()}
    steps = []  # gain per byte, bytes, target and rank
    for target, tail in tails.items():
        points: list[_Point] = [(target.bytes(r), tail[r].item(), r) for r in range(LEAST_RANK, most[target] + 1, 2)]
        for (size, loss, _), (next_size, next_loss, rank) in pairwise(
            _hull([*points, (target.dense_bytes, 0.0, None)])
        ):
            steps.append(((loss - next_loss) / (next_size - size), next_size - size, target, rank))
    ranks: Ranks = dict.fromkeys(tails, LEAST_RANK)
    left = limit - total_bytes(ranks)
    stopped = set()
    for _, cost, target, rank in sorted(steps, key=lambda step: -step[0]):
        if target in stopped:
            continue
        if cost <= left:
            ranks[target], left = rank, left - cost
        else:
            stopped.add(target)  # later steps of its hull begin where this one ends
    # Bytes remain where the hull's steps were too large: they are spent two ranks at a time.
    while True:
        gains = {
            target: ((tails[target][rank] - tails[target][rank + 2]) / target.bytes(2)).item()
            for target, rank in ranks.items()
            if rank is not None and rank + 2 <= most[target] and target.bytes(2) <= left
        }
        chosen = max(gains, key=gains.__getitem__, default=None)
        if chosen is None or gains[chosen] <= 0:
            return ranks
        ranks[chosen] += 2  # type: ignore[operator]
        left -= chosen.bytes(2)


def _hull(points: Sequence[_Point]) -> list[_Point]:
    """Return the lower convex hull of points sorted by size, along which the gain per byte falls."""
    hull: list[_Point] = []
    for point in points:
        if hull and point[0] <= hull[-1][0]:
            continue
        while len(hull) > 1:
            (x0, y0, _), (x1, y1, _) = hull[-2:]
            if (y0 - y1) * (point[0] - x1) > (y1 - point[1]) * (x1 - x0):
                break
            hull.pop()
        hull.append(point)
    return hull


def predicted_loss(tails: Mapping[Target, Tensor], ranks: Ranks) -> float:
    """Return the loss of all targets together."""
    lost = [tails[target][min(rank, len(tails[target]) - 1)] for target, rank in ranks.items() if rank is not None]
    return torch.stack(lost).sum().item() if lost else 0.0


def total_bytes(ranks: Ranks) -> int:
    """Return the bytes of all targets on disk."""
    return sum(target.bytes(rank) for target, rank in ranks.items())


def least_bytes(targets: Sequence[Target]) -> int:
    """Return the bytes of the targets at the smallest rank."""
    return total_bytes(dict.fromkeys(targets, LEAST_RANK))


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all tensors, as saved: each storage once."""
    seen: dict[Any, int] = {}
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor) and not is_lazy(tensor):
            key = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else id(tensor)
            seen[key] = max(seen.get(key, 0), tensor.numel() * tensor.element_size())
    return sum(seen.values())

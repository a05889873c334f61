r"""Ranks for all layers under one budget.

*Uniform*: the same kept fraction everywhere. *Global*: the output's loss at rank r is :math:`\sum_{j > r}
\sigma_j^2` over a layer's components, so rank after rank goes to whichever layer gains most per byte. Gains fall along
each layer's lower convex hull, on which this greedy choice is optimal except for the last step; the hull ends in the
dense layer, which loses nothing.
"""

__all__ = [
    "Ranks",
    "allocate_global",
    "allocate_uniform",
    "least_bytes",
    "predicted_loss",
    "rank_limit",
]

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from panther.compression.targets import LEAST_RANK, Target

Ranks = dict[Target, int | None]
"""A rank for every target; None leaves it dense."""


def least_bytes(targets: Sequence[Target], *, seeded: bool = False) -> int:
    """Return the bytes of the targets at the smallest rank."""
    return sum(target.bytes(LEAST_RANK, seeded=seeded) for target in targets)


def rank_limit(target: Target, *, seeded: bool = False) -> int:
    """Return the largest even rank that its weight can have and at which a target is smaller than dense."""
    per_rank = target.numbers(2, seeded=seeded) // 2 or 1
    most = min((target.dense_numbers - 1) // per_rank, min(target.inner, target.outer) if not seeded else 2**62)
    return max(most // 2 * 2, LEAST_RANK)


def allocate_uniform(targets: Sequence[Target], limit: int, *, seeded: bool = False) -> Ranks:
    """Give every target the same fraction, the largest with which all fit into ``limit`` bytes."""

    def at(fraction: float) -> Ranks:
        ranks: Ranks = {}
        for target in targets:
            per_two = target.numbers(2, seeded=seeded)
            rank = max(int(fraction * target.dense_numbers / per_two) * 2, LEAST_RANK)
            ranks[target] = rank if rank <= rank_limit(target, seeded=seeded) else None
        return ranks

    def size(ranks: Ranks) -> int:
        return sum(target.bytes(rank, seeded=seeded) for target, rank in ranks.items())

    low, high = 0.0, 1.0
    if size(at(high)) <= limit:
        return at(high)
    for _ in range(50):  # halvings, to the resolution of a float
        middle = (low + high) / 2
        low, high = (middle, high) if size(at(middle)) <= limit else (low, middle)
    return at(low)


def allocate_global(tails: Mapping[Target, Tensor], limit: int) -> Ranks:
    """Return the ranks of the least total loss within ``limit`` bytes; ``tails[target][r]`` is the loss at rank r."""
    steps = []
    for target, tail in tails.items():
        most = min(rank_limit(target), (len(tail) - 1) // 2 * 2)
        points = [(target.bytes(rank), tail[rank].item(), rank) for rank in range(LEAST_RANK, most + 1, 2)]
        for before, after in _hull([*points, (target.dense_bytes, 0.0, None)]):
            steps.append(((before[1] - after[1]) / (after[0] - before[0]), after[0] - before[0], target, after[2]))
    ranks: Ranks = dict.fromkeys(tails, LEAST_RANK)
    left = limit - least_bytes(list(tails))
    stopped = set()
    for _, cost, target, rank in sorted(steps, key=lambda step: -step[0]):
        if target in stopped:
            continue
        if cost <= left:
            ranks[target], left = rank, left - cost
        else:
            stopped.add(target)  # later steps of its hull begin where this one ends
    return _filled(ranks, tails, left)


def _hull(points: Sequence[tuple[int, float, int | None]]) -> list[tuple]:
    """Return the segments of the lower convex hull of points sorted by cost, with falling gain per byte."""
    hull: list[tuple[int, float, int | None]] = []
    for point in points:
        if hull and point[0] <= hull[-1][0]:
            continue
        while len(hull) > 1:
            (x0, y0, _), (x1, y1, _) = hull[-2:]
            if (y0 - y1) * (point[0] - x1) > (y1 - point[1]) * (x1 - x0):
                break
            hull.pop()
        hull.append(point)
    return list(pairwise(hull))


def _filled(ranks: Ranks, tails: Mapping[Target, Tensor], left: int) -> Ranks:
    """Spend the bytes that remain where the hull's steps were too large, two ranks at a time."""
    while True:
        best: tuple[float, Target | None] = (0.0, None)
        for target, rank in ranks.items():
            if rank is None or rank + 2 > min(rank_limit(target), (len(tails[target]) - 1) // 2 * 2):
                continue
            cost = target.bytes(2)
            if cost <= left:
                gain = ((tails[target][rank] - tails[target][rank + 2]) / cost).item()
                best = max(best, (gain, target), key=lambda found: found[0])
        chosen = best[1]
        if chosen is None:
            return ranks
        ranks[chosen] += 2  # type: ignore[operator]
        left -= chosen.bytes(2)


def predicted_loss(tails: Mapping[Target, Tensor], ranks: Ranks) -> float:
    """Return the loss of all targets together."""
    lost = [tails[target][min(rank, len(tails[target]) - 1)] for target, rank in ranks.items() if rank is not None]
    return torch.stack(lost).sum().item() if lost else 0.0

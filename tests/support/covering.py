"""Grids of test cases in far fewer rows than their product."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def all_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis, in which every pair of values of two axes occurs at least once.

    A fault that depends on two settings is found as by the whole product. Greedy, and the same rows at every call.
    """
    grid = [frozenset(combinations(enumerate(row), 2)) for row in product(*(range(len(axis)) for axis in axes))]
    uncovered = set().union(*grid)
    rows = []
    while uncovered:
        best = max(grid, key=lambda pairs: len(pairs & uncovered))
        uncovered -= best
        values = dict(place for pair in best for place in pair)
        rows.append(tuple(axis[values[i]] for i, axis in enumerate(axes)))
    return rows


def half_of(*axes: Sequence[Any]) -> list[Any]:
    """Return the product of the axes as parameters; cases in which the sum of the indices is odd are marked slow.

    With three axes or more, every pair of values of two axes is in a case without the mark, if the other axes have two
    values at least. With two axes, every value is in one.
    """
    indices = list(product(*(range(len(axis)) for axis in axes)))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, case, strict=True)), marks=pytest.mark.slow if sum(case) % 2 else ()
        )
        for case in indices
    ]

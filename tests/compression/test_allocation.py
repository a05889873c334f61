"""Ranks against all combinations tried one by one, and budgets that are never exceeded."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from panther.compression.allocation import (
    allocate_global,
    allocate_uniform,
    byte_limit,
    least_bytes,
    predicted_loss,
    total_bytes,
)
from panther.compression.targets import Survey, select_targets
from panther.errors import CompressionError


def targets_of(*shapes):
    with torch.device("cpu"):
        return list(select_targets(nn.Sequential(*(nn.Linear(n, m) for n, m in shapes))).targets)


def tails_of(targets, decay, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tails = {}
    for index, target in enumerate(targets):
        count = min(target.inner, target.outer)
        energy = torch.rand(count, generator=generator, dtype=torch.float64).sort(descending=True).values
        energy = energy * torch.arange(1, count + 1) ** -(decay * (1 + index))
        tails[target] = torch.cat((energy.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)))
    return tails


@pytest.mark.parametrize("budget", [0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_global_is_nearly_the_best_of_all(budget, seed):
    """The greedy choice misses the optimum by at most one step's gain."""
    targets = targets_of((16, 12), (20, 16), (12, 24))
    tails = tails_of(targets, 0.3, seed)
    limit = int(budget * sum(target.dense_bytes for target in targets))
    options = [[*range(2, target.largest_rank + 1, 2), None] for target in targets]
    every = (dict(zip(targets, ranks, strict=True)) for ranks in itertools.product(*options))
    best = min(predicted_loss(tails, ranks) for ranks in every if total_bytes(ranks) <= limit)
    ranks = allocate_global(tails, limit)
    assert total_bytes(ranks) <= limit
    step = max((tail[r] - tail[r + 2]).item() for tail in tails.values() for r in range(2, len(tail) - 2, 2))
    assert best <= predicted_loss(tails, ranks) <= best + step


@given(
    shapes=st.lists(st.tuples(st.integers(8, 300), st.integers(8, 300)), min_size=1, max_size=5),
    budget=st.floats(0.01, 1.0),
    decay=st.floats(0.0, 2.0),
)
def test_fuzz_budgets_are_kept(shapes, budget, decay):
    targets = targets_of(*shapes)
    dense = sum(target.dense_bytes for target in targets)
    limit = int(budget * dense)
    tails = tails_of(targets, decay)
    if least_bytes(targets) > limit:
        return
    uniform, best = allocate_uniform(targets, limit), allocate_global(tails, limit)
    for ranks in (uniform, best):
        assert total_bytes(ranks) <= limit
        for target, rank in ranks.items():
            assert rank is None or (rank % 2 == 0 and 2 <= rank <= target.largest_rank)
            assert target.bytes(rank) <= target.dense_bytes
    if limit == dense:
        assert set(best.values()) == {None}


def test_the_smallest_feasible_budget_is_feasible():
    survey = Survey(tuple(targets_of((100, 40), (64, 64))), ())

    def limit(budget):
        return byte_limit(nn.Identity(), survey, budget=budget, max_bytes=None)

    with pytest.raises(CompressionError) as caught:
        limit(0.01)
    assert str(caught.value).startswith("budget=0.01 leaves")
    named = float(str(caught.value).partition("feasible budget is ")[2].partition(",")[0])
    assert limit(named) >= least_bytes(survey.targets)
    with pytest.raises(CompressionError):
        limit(named - 2e-4)


def test_uniform_keeps_the_same_fraction():
    targets = targets_of((256, 256), (512, 128), (1024, 64))
    dense = sum(target.dense_bytes for target in targets)
    ranks = allocate_uniform(targets, dense // 2)
    fractions = [target.bytes(rank) / target.dense_bytes for target, rank in ranks.items()]
    assert max(fractions) <= 0.52
    assert min(fractions) >= 0.45


def test_an_easy_layer_gives_its_budget_to_a_hard_one():
    easy, hard = targets_of((64, 64), (64, 64))
    tails = tails_of([easy, hard], 0.0)
    tails[easy] = tails[easy] * 1e-6
    ranks = allocate_global(tails, (easy.dense_bytes + hard.dense_bytes) // 2 + easy.bytes(2))
    assert ranks[easy] <= 4
    assert ranks[hard] is None or ranks[hard] > 26

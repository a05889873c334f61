"""What a training run costs: its arithmetic, its place in a plan, and what it refuses."""

import math

import pytest
import torch
from torch import nn

from panther.distributed import ClusterSpec, ModelStats, TrainingRun, plan_parallelism

# No tensor parallelism, and sharding takes less memory than ddp and more time.
CLUSTER = ClusterSpec.preset("cpu", 4, memory_bytes=1e12, gpus_per_node=1, inter_latency=1e-2)


def stats():
    return ModelStats.of(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.ones(2, 64))


def text_stats():
    return ModelStats.transformer(hidden=8, layers=1, heads=2, vocab=11, sequence=7)


def plan(run, model=None, **changes):
    settings = {"batch": 12, "schedules": (), **changes}
    return plan_parallelism(model or stats(), CLUSTER, run=run, **settings)


def test_the_price_is_steps_times_devices_times_hours_times_the_price_of_one():
    cost = TrainingRun(steps=100, price_per_device_hour=3.0, budget=20).cost(36.0, devices=2, batch=5)
    assert (cost.steps, cost.seconds, cost.device_hours, cost.price) == (100, 3600.0, 2.0, 6.0)
    assert cost.within_budget is True
    assert TrainingRun(steps=100, price_per_device_hour=3.0, budget=5.9).cost(36.0, 2, 5).within_budget is False
    unpriced = TrainingRun(steps=100).cost(36.0, 2, 5)
    assert (unpriced.price, unpriced.within_budget) == (None, None)


@pytest.mark.parametrize(("run", "steps"), [({"samples": 24}, 2), ({"samples": 25}, 3), ({"tokens": 169}, 3)])
def test_a_last_step_may_be_partly_empty(run, steps):
    assert TrainingRun(**run).cost(1.0, devices=1, batch=12, tokens_per_sample=7).steps == steps


def test_a_budget_without_a_length_says_how_long_the_run_is():
    found = plan(TrainingRun(price_per_device_hour=2.0, budget=1.0))
    costs = [option.cost for option in found.options]
    for option, cost in zip(found.options, costs, strict=True):
        price_of_a_step = option.estimate.step_seconds * 4 / 3600 * 2.0
        assert cost.within_budget
        assert cost.price <= 1.0 < cost.price + 1.001 * price_of_a_step
    assert costs[0].steps == max(cost.steps for cost in costs)
    assert "steps" in found.table().splitlines()[0]
    assert "A budget of 1.00 pays for " in str(found)


def test_options_over_the_budget_come_last_and_say_so():
    by_memory = plan(TrainingRun(steps=1000, price_per_device_hour=1.0), objective="memory")
    prices = [option.cost.price for option in by_memory.options]
    assert prices[0] > min(prices)  # so that a budget changes the order
    budget = (min(prices) + prices[0]) / 2
    found = plan(TrainingRun(steps=1000, price_per_device_hour=1.0, budget=budget), objective="memory")
    possible = [option.possible for option in found.options]
    assert possible == sorted(possible, reverse=True)
    assert possible[0]
    assert not possible[-1]
    assert f", more than the budget of {budget:,.2f}." in found.options[-1].reason
    cheap = plan(TrainingRun(steps=1000, price_per_device_hour=1.0, budget=min(prices) / 2))
    assert not any(option.possible for option in cheap.options)
    assert f" over the budget of {min(prices) / 2:,.2f}, which pays for 500 steps." in str(cheap)


def test_tokens_are_counted_where_the_input_is_rows_of_integers():
    found = plan(TrainingRun(tokens=12 * 7 * 5), text_stats())
    assert found.best.cost.steps == 5
    assert "5 steps of 12 samples and 420 tokens take " in str(found)
    assert text_stats().shard(2).tokens_per_sample == 7
    assert stats().tokens_per_sample is None
    with pytest.raises(ValueError, match=r"tokens=1e\+09: the model's tokens per sample are not known"):
        plan(TrainingRun(tokens=1e9))


def test_figures_that_were_not_measured_are_called_uncalibrated():
    found = plan(None)
    assert "step (uncalibrated)" in found.table()
    assert "are uncalibrated: " in str(found)
    assert found.to_dict()["calibrated"] is False


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"steps": 1, "tokens": 2}, ValueError, "steps and tokens are both given"),
        ({"budget": 2}, ValueError, "budget=2 needs price_per_device_hour"),
        ({"price_per_device_hour": 2}, ValueError, "the run has no length: give one of steps, samples, tokens"),
        ({"steps": 0}, ValueError, "steps=0 must be above 0 and finite"),
        ({"tokens": math.inf}, ValueError, "tokens=inf must be above 0 and finite"),
        ({"samples": math.nan}, ValueError, "samples=nan must be above 0 and finite"),
        ({"steps": "many"}, TypeError, "steps must be a number, not str"),
    ],
)
def test_what_makes_no_run_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        TrainingRun(**settings)

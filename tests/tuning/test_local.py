"""Small steps from the best trial of a search."""

import math
import random

import pytest
import torch
from torch import nn

import panther as pr
from panther.tuning.study.study import step_from

optuna = pytest.importorskip("optuna")
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402

DISTRIBUTIONS = {
    "share": FloatDistribution(0.01, 1.0, log=True),
    "width": FloatDistribution(-2.0, 2.0),
    "rank": IntDistribution(8, 64, step=8),
    "terms": IntDistribution(1, 3),
    "form": CategoricalDistribution(["int8", "int4", "low_rank"]),
    "fixed": IntDistribution(5, 5),
}
START = {"share": 0.1, "width": 2.0, "rank": 8, "terms": 3, "form": "int4", "fixed": 5}


def test_steps_stay_in_the_ranges_and_change_something():
    draw = random.Random(0)
    steps = [step_from(START, DISTRIBUTIONS, draw, 1.0) for _ in range(500)]
    for step in steps:
        assert 0.01 <= step["share"] <= 1.0
        assert -2.0 <= step["width"] <= 2.0
        assert step["rank"] in range(8, 65, 8)
        assert step["terms"] in (1, 2, 3)
        assert isinstance(step["rank"], int)
        assert step["fixed"] == 5
    assert {step["form"] for step in steps} == {"int8", "int4", "low_rank"}
    assert {step["terms"] for step in steps} == {2, 3}  # one down, or none
    moved = [abs(math.log(step["share"] / 0.1)) for step in steps if step["share"] != 0.1]
    assert 0.3 < sum(moved) / len(moved) < 1.2  # 0.8 of a deviation of 0.17 of the range's 4.6
    changed = [sum(step[name] != START[name] for name in START) for step in steps]
    assert 1 < sum(changed) / len(changed) < 2.5


def test_what_has_one_value_stays():
    fixed = {"fixed": 5}
    assert step_from(fixed, DISTRIBUTIONS, random.Random(0), 1.0) == fixed


def test_trials_after_the_first_ones_lie_below_the_best():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.Tanh())]
    net = nn.Sequential(*layers).eval()
    x = torch.randn(256, 96)
    y = net(x).detach()

    def fit(model):
        with torch.no_grad():
            return 1 - ((model(x) - y).square().mean() / y.square().mean()).item()

    result = pr.tune(net, fit, list(x.split(64)), constraint=">= 0.98", trials=24, seed=0, progress=False)
    best, smaller = result.trials[0], 0
    for trial in result.trials:
        smaller += trial.number >= 8 and trial.size < best.size
        if trial.feasible and (not best.feasible or trial.size < best.size):
            best = trial
    assert smaller >= 8  # of the ten or eleven that are near the best

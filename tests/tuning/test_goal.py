"""What a search is for: constraints as text and functions, directions, and how models are ordered."""

import math

import pytest

from panther.errors import ConfigError, TuningError
from panther.tuning.goal import Figures, check_unchanged, make_goal

UNCHANGED = Figures(0.9, 1000, 0.01, 1000.0)


@pytest.mark.parametrize(
    ("bound", "met", "missed"),
    [
        (">= 0.91", {"metric": 0.91}, {"metric": 0.90}),
        ("<=2.5", {"metric": 2.5}, {"metric": 2.6}),
        ("metric >= 99 %", {"metric": 0.891}, {"metric": 0.89}),
        ("size <= 2 kB", {"size": 2000}, {"size": 2001}),
        ("size<=50%", {"size": 500}, {"size": 501}),
        ("latency <= 5 ms", {"latency": 0.005}, {"latency": 0.0051}),
        (" >= -1e-1 ", {"metric": -0.1}, {"metric": -0.2}),
    ],
)
def test_a_text_is_a_bound(bound, met, missed):
    goal = make_goal("metric" if "size" in bound or "lat" in bound else "size", bound, None)
    figures = {"metric": 0.5, "size": 100, "latency": 0.001, "objective": 1.0}
    assert goal.feasible(Figures(**figures | met), UNCHANGED)
    assert not goal.feasible(Figures(**figures | missed), UNCHANGED)
    assert goal.violations(Figures(**figures | missed), UNCHANGED)[0] > 0


def test_a_function_and_several_constraints():
    goal = make_goal("size", [lambda metric: metric > 0.5, "latency <= 5 ms"], "minimize")
    assert not goal.higher_is_better
    assert goal.timed
    assert goal.feasible(Figures(0.6, 10, 0.004, 10.0), UNCHANGED)
    assert not goal.feasible(Figures(0.5, 10, 0.004, 10.0), UNCHANGED)
    assert not goal.feasible(Figures(0.6, 10, 0.006, 10.0), UNCHANGED)


@pytest.mark.parametrize(
    ("objective", "constraint", "directions"),
    [
        ("size", ">= 0.9", ["minimize"]),
        ("size", None, ["minimize", "maximize"]),
        ("latency", "size <= 1 kB", ["minimize", "maximize"]),
        ("size", "<= 0.9", ["minimize"]),
        ("metric", None, ["maximize"]),
        ("metric", "size <= 1 kB", ["maximize"]),
        (lambda model: 1.0, None, ["minimize", "maximize"]),
    ],
)
def test_directions_follow_from_objective_and_constraint(objective, constraint, directions):
    assert make_goal(objective, constraint, None).directions == directions


def test_whatever_breaks_a_constraint_is_worse():
    goal = make_goal("size", ">= 0.8", None)
    fine = [Figures(0.8, size, None, float(size)) for size in (100, 900)]
    broken = [Figures(metric, 1, None, 1.0) for metric in (0.79, 0.1)]
    values = [goal.penalised(figures, UNCHANGED) for figures in (*fine, *broken)]
    assert values == sorted(values)
    goal = make_goal("metric", "size <= 500 B", None)
    figures = [Figures(0.1, 500, None, math.nan), Figures(0.99, 501, None, math.nan)]
    first, second = (goal.penalised(one, UNCHANGED) for one in figures)
    assert first > second


@pytest.mark.parametrize(
    ("objective", "constraint", "direction", "message"),
    [
        ("bytes", None, None, "objective='bytes' is unknown"),
        ("size", "0.9", None, "is not understood"),
        ("size", "speed <= 3 ms", None, "is not understood"),
        ("size", "latency <= 3", None, "is not understood"),
        ("size", ">= 1e", None, "is not understood"),
        ("size", 0.9, None, "is not understood"),
        ("size", ">= 0.9", "minimize", "say both"),
        ("size", [">= 0.9", "<= 0.95"], None, "say both"),
        ("size", None, "up", "must be 'maximize' or 'minimize'"),
    ],
)
def test_what_is_not_understood_is_said(objective, constraint, direction, message):
    with pytest.raises(ConfigError, match=message):
        make_goal(objective, constraint, direction)


def test_a_share_of_a_metric_below_zero_makes_no_sense():
    with pytest.raises(
        TuningError, match=r"is a share of the unchanged model's metric, which is -2 and must be above 0"
    ):
        check_unchanged(make_goal("size", ">= 99 %", None), Figures(-2.0, 1, None, 1.0))

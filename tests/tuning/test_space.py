"""Specifications of settings, and the selection of layers."""

import optuna
import pytest
from torch import nn

from panther.errors import ConfigError
from panther.tuning import Choice, Float, Group, Int
from panther.tuning.space.lines import as_group, selected
from panther.tuning.space.values import as_spec, grid, suggest


def net():
    block = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    other = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    return nn.ModuleDict({"stem": nn.Conv2d(1, 4, 3), "blocks": nn.ModuleList([block, other]), "head": nn.Linear(4, 2)})


LINEAR = ("blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head")


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("*", ("stem", *LINEAR)),
        ("head", ("head",)),
        (("head", "stem"), ("stem", "head")),
        (nn.Linear, LINEAR),
        (lambda module, name: name.endswith("2"), ("blocks.0.2", "blocks.1.2")),
        (Group(type="Conv2d"), ("stem",)),
        (Group("blocks.*", type=(nn.Linear, "Conv2d")), LINEAR[:4]),
        (Group(contains="1."), LINEAR[2:4]),
        (Group(type=nn.Linear, indices=1), LINEAR[1:2]),
        (Group(type=nn.Linear, indices=-1), LINEAR[4:]),
        (Group(type=nn.Linear, indices=[0, 4]), (LINEAR[0], LINEAR[4])),
        (Group(type=nn.Linear, indices=range(0, 5, 2)), LINEAR[::2]),
    ],
)
def test_layers_are_selected(key, names):
    assert selected(net(), as_group(key)) == names


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("tail", "'tail' of the space matches no layer"),
        (Group("blocks.*", indices=7), r"needs the layers at \[7\], and 4 match, from 0 to 3"),
        (3, "space has the key 3"),
    ],
)
def test_a_selection_of_nothing_is_an_error(key, message):
    with pytest.raises(ConfigError, match=message):
        selected(net(), as_group(key))


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ([1, 2, 2], Choice((1, 2))),
        ("dense", Choice(("dense",))),
        (range(8, 33, 8), Int(8, 32, 8)),
        ({"int": [8, 64], "step": 8}, Int(8, 64, 8)),
        ({"float": [1e-4, 1e-2], "log": True}, Float(1e-4, 1e-2, log=True)),
        (Int(1, 2), Int(1, 2)),
    ],
)
def test_specifications_have_short_forms(given, spec):
    assert as_spec("x", given) == spec


@pytest.mark.parametrize(
    "make",
    [
        lambda: Int(8, 4), lambda: Int(0, 4, log=True), lambda: Int(1, 8, step=2, log=True), lambda: Choice([]),
        lambda: Float(0.0, float("inf")), lambda: Float(0.0, 1.0, step=0.0), lambda: Float(0.0, 1.0, log=True),
        lambda: Choice("dense"),
        lambda: Choice([nn.Linear]), lambda: as_spec("x", {"int": 8}), lambda: as_spec("x", {"integer": [1, 2]}),
        lambda: as_spec("x", {"int": [1, 2], "low": 3}), lambda: as_spec("x", range(0)), lambda: Group(indices=1.5),
    ],
)  # fmt: skip
def test_impossible_specifications_are_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    "spec",
    [Int(3, 3), Int(8, 64, step=8), Int(1, 10_000), Int(1, 10_000, log=True), Int(8, 20, step=8), Float(0.5, 2.0),
     Float(0.1, 0.7, step=0.2), Float(1e-5, 1.0, log=True), Choice(["a", None, True])],
)  # fmt: skip
def test_every_value_of_the_grid_can_be_drawn(spec):
    values = grid(spec)
    assert 1 <= len(values) <= 32
    assert len(set(values)) == len(values)
    for value in values:
        drawn = suggest(optuna.trial.FixedTrial({"x": value}), "x", spec)
        assert drawn == value
    if not isinstance(spec, Choice):
        assert values[0] == spec.low
        assert values[-1] <= spec.high

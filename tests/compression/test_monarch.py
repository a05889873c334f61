"""Monarch layers that pr.sketch_layers_ makes: their layers and numbers, and files and trees of them."""

import copy

import pytest
import torch
from torch import nn

import panther as pr
from panther.errors import CompressionError, ConfigError
from panther.nn import MonarchLinear

transformers = pytest.importorskip("transformers")


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(60, 96, bias=False), nn.Linear(96, 53)
        self.conv1d = transformers.pytorch_utils.Conv1D(80, 53)
        self.tied = nn.Linear(80, 80), nn.Linear(80, 80)
        self.first, self.second = self.tied
        self.second.weight = self.first.weight
        self.conv, self.narrow = nn.Conv2d(8, 8, 3), nn.Linear(80, 1)

    def forward(self, x):
        x = self.conv1d(self.down(torch.relu(self.up(x))))
        return self.narrow(self.second(torch.relu(self.first(x))))


def monarch(fraction=0.5):
    return pr.SketchConfig(kind="monarch", fraction=fraction)


def test_linear_layers_become_their_nearest_monarch_layers(tmp_path):
    model = Odd()
    original = copy.deepcopy(model)
    report = pr.sketch_layers_(model, monarch(), seed=0)
    assert [layer.names for layer in report.layers] == [("up",), ("down",), ("conv1d",), ("first", "second")]
    for layer in report.layers:
        new = model.get_submodule(layer.names[0])
        assert type(new) is MonarchLinear
        assert (layer.form, layer.rank, layer.low_rank) == ("monarch", new.rank, new.rank)
        assert layer.bytes_after == 4 * (new.down.numel() + new.up.numel())
        assert "monarch" in str(report)
    assert {entry.name: entry.reason.partition(":")[0] for entry in report.skipped} == {
        "conv": "is a Conv2d, and kind='monarch' replaces linear layers only",
        "narrow": "would not shrink",
    }
    for name in ("up", "down", "first"):
        dense = original.get_submodule(name)
        expected = MonarchLinear.from_linear(dense, fraction=0.5)
        assert torch.equal(model.get_submodule(name).weight, expected.weight)
    transposed = nn.Linear(53, 80)
    transposed.weight, transposed.bias = nn.Parameter(original.conv1d.weight.mT), original.conv1d.bias
    x = torch.randn(3, 53)
    torch.testing.assert_close(model.conv1d(x), MonarchLinear.from_linear(transposed, fraction=0.5)(x))
    assert model.first.down is model.second.down
    assert model.first.up is model.second.up
    assert not torch.equal(model.first.bias, model.second.bias)
    x = torch.randn(2, 60)
    pr.save_compressed(model, tmp_path)
    assert torch.equal(pr.load_compressed(tmp_path, Odd())(x), model(x))
    assert "Monarch, 6 x 10 blocks of rank" not in str(pr.inspect.tree(original))
    assert str(pr.inspect.tree(model)).count("Monarch, ") >= 4


def test_a_layer_that_would_not_shrink_stays():
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(CompressionError, match=r"would not shrink: fraction=1\.0 takes 16,384 bytes, the layer 16,384"):
        pr.sketch_layers_(model, monarch(1.0))
    assert type(model[0]) is nn.Linear
    assert pr.sketch_layers_(model, monarch(0.75), include="0").layers[0].rank == 3


def test_settings_belong_to_one_kind():
    for settings, message in (
        ({"kind": "monarch"}, "kind='monarch' takes fraction and not low_rank: fraction=None, low_rank=None"),
        ({"kind": "monarch", "fraction": 0.5, "low_rank": 4}, "takes fraction and not low_rank: fraction=0.5"),
        ({}, "kind='sketched' takes low_rank and not fraction: low_rank=None, fraction=None"),
        ({"fraction": 0.5, "low_rank": 4}, "kind='sketched' takes low_rank and not fraction"),
        ({"kind": "monarch", "fraction": 0.0}, "fraction=0.0 must be above 0 and at most 1"),
        ({"kind": "monarch", "fraction": float("nan")}, "fraction=nan must be above 0 and at most 1"),
        ({"kind": "monarch", "fraction": 0.5, "init": "svd"}, "num_terms=1 and init='svd' are for sketched layers"),
        ({"kind": "butterfly", "low_rank": 4}, "kind='butterfly' is unknown"),
    ):
        with pytest.raises(ConfigError) as caught:
            pr.SketchConfig(**settings)
        assert message in str(caught.value)
    assert monarch().rank is None

"""Attention by features and healing in a search, the automatic space for some of the layers, terms of a layer."""

import copy

import pytest
import torch
from compressing import assert_untouched, state_of
from torch import nn
from tuning import Accuracy, batches, classifier

import panther as pr
from panther.errors import ConfigError, TuningError
from panther.nn.attention.random_features import RandomFeatureAttention
from panther.tuning import Group, Int

QUICK = {"trials": 5, "seed": 0, "progress": False}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        h = self.up(x)
        return self.head(h + self.attention(h, h, h, need_weights=False)[0])


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval()


def inputs(count=4):
    return list(torch.randn(4 * count, 24, 16, generator=torch.Generator().manual_seed(1)).split(4))


def likeness(model, x):
    """Minus the relative error of the output, as a measure of a model."""
    with torch.no_grad():
        wanted = model(x)
        norm = wanted.norm()

    def evaluate(model):
        with torch.no_grad():
            return -((model(x) - wanted).norm() / norm)

    return evaluate


@pytest.mark.slow
def test_attention_and_layers_in_one_search(block):
    original, x = state_of(block), inputs()
    space = {
        nn.MultiheadAttention: {"kernel_fn": ["exact", "hermite", "softmax"], "num_random_features": Int(8, 64)},
        "up": {"bits": [8, 4]},
    }
    measure = likeness(block, x[0])
    result = pr.tune(block, measure, x, space=space, objective="metric", **{**QUICK, "trials": 8})
    assert_untouched(block, original)
    plans = [trial.plan for trial in result.trials]
    assert not plans[0].attention  # the first are choices of pr.compress
    changed = [trial for trial in result.trials if trial.plan.attention]
    assert changed
    for trial in changed[:2]:
        model = result.build(trial)
        assert isinstance(model.attention, pr.nn.RandMultiHeadAttention)
        assert model.attention.kernel_fn == trial.plan.attention["attention"]["kernel_fn"]
        assert measure(model) == trial.metric
        assert model.attention.W0 is not block.attention.out_proj.weight
    assert max(trial.metric for trial in changed) > -0.3


def test_attention_of_transformers_and_nothing_else(block):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    model = transformers.BertModel(config).eval()
    ids = torch.randint(1, 60, (16, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[::3, 15:] = 0
    x = [{"input_ids": a, "attention_mask": b} for a, b in zip(ids.split(4), mask.split(4), strict=True)]

    def states(model):
        with torch.no_grad():
            return model(**x[0]).last_hidden_state[mask[:4] == 1]

    wanted = states(model)
    original = state_of(model)
    space = {Group("encoder.layer.*.attention.self", joint=True): {"num_random_features": [4, 16, 45, 64]}}
    result = pr.tune(
        model, lambda model: -((states(model) - wanted).norm() / wanted.norm()), x, space=space, objective="metric",
        **QUICK,
    )  # fmt: skip
    assert_untouched(model, original)
    assert torch.equal(states(model), wanted)
    found = result.model.encoder.layer[1].attention.self
    assert isinstance(found.linear_attention, RandomFeatureAttention)
    assert found.query is not model.encoder.layer[1].attention.self.query
    assert -((states(result.model) - wanted).norm() / wanted.norm()) == result.best.metric > -0.1
    assert result.best.params[next(iter(result.best.params))] >= 16


@pytest.mark.parametrize("how", ["forward", "module"])
def test_an_old_module_that_something_else_holds_is_found(block, how):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block
            attention = block.attention
            self.kept = [attention.forward if how == "forward" else attention]  # as libraries put forwards aside

        def forward(self, x):
            h = self.inner.up(x)
            return self.inner.head(h + self.kept[0](h, h, h, need_weights=False)[0])

        def __deepcopy__(self, memo):  # a copy that holds its own module, as one of a library would
            new = Wrapped.__new__(Wrapped)
            nn.Module.__init__(new)
            new.inner = copy.deepcopy(self.inner, memo)
            attention = new.inner.attention
            new.kept = [attention.forward if how == "forward" else attention]
            return new

    model, x = Wrapped().eval(), inputs()
    space = {"inner.attention": {"num_random_features": [16]}}
    with pytest.raises(TuningError, match=r"'inner.attention' was replaced, and the new module is not called in the"):
        pr.tune(model, likeness(model, x[0]), x, space=space, objective="metric", **QUICK)


@pytest.mark.slow
def test_trials_are_healed(block):
    trained = classifier()
    net, (x, labels) = trained[0], trained[1:]
    options = {"objective": "metric", "constraint": "size <= 20 %", "first": 3, **QUICK, "trials": 3}
    plain = pr.tune(net, Accuracy(x, labels), batches(x), **options)
    heal = {"max_steps": [40], "learning_rate": [1e-3, 3e-3]}
    original = state_of(net)
    healed = pr.tune(net, Accuracy(x, labels), batches(x), heal=heal, **options)
    assert_untouched(net, original)
    assert healed.best.plan.heal["max_steps"] == 40
    assert Accuracy(x, labels)(healed.model) == healed.best.metric
    # Healing lowers the error of the output, and the accuracy may fall by a few samples all the same.
    assert healed.best.metric >= plain.best.metric - 0.02
    assert 0 < healed.report.healed.steps <= 40
    options |= {"trials": 1, "constraint": None}
    fixed = pr.tune(net, Accuracy(x, labels), batches(x), heal=pr.HealConfig(max_steps=2), **options)
    assert fixed.trials[0].plan.heal == {"max_steps": 2}


@pytest.mark.slow
def test_the_automatic_space_of_some_layers_and_terms_of_another(block):
    net, x, labels = classifier()
    space = {Group(type=nn.Linear, indices=(0, 1)): "auto", "4": {"num_terms": [1, 2], "low_rank": [1, 2]}}
    result = pr.tune(net, Accuracy(x, labels), batches(x), space=space, constraint=">= 60 %", forms="int4", **QUICK)
    for trial in result.trials:
        rank = 2 * trial.params["4/num_terms"] * trial.params["4/low_rank"]
        assert trial.plan.layers.get("4", {"rank": 0})["rank"] <= rank
        assert {trial.plan.layers[name]["form"] for name in ("0", "2") if name in trial.plan.layers} <= {"int4"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": {"attention": {"num_random_features": [8], "rank": [2]}}}, "has the unknown setting 'rank': use"),
        ({"space": {"attention": {"kernel_fn": ["cosine"]}}}, "kernel_fn 'cosine' is unknown"),
        ({"space": {"attention": {"kernel_fn": "softmax"}}}, "has no number of features"),
        ({"space": {"up": {"num_random_features": [8]}}}, "'up' of the space matches no attention"),
        ({"space": {"up": {"num_terms": [2]}}}, "has 'num_terms' and no rank of a term"),
        ({"heal": {"steps": [2]}}, "'steps' is not a setting of HealConfig"),
        ({"heal": {"train": "all"}}, "heal only trains the new layers"),
        ({"heal": 3}, "heal=3 must be a HealConfig, or a dict"),
    ],
)
def test_what_is_not_understood(block, options, message):
    with pytest.raises(ConfigError, match=message):
        pr.tune(block, lambda model: 1.0, inputs(), **QUICK | options)


def test_attention_that_cannot_be_replaced(block):
    block.attention.add_zero_attn = True
    with pytest.raises(ConfigError, match=r"no attention that can be replaced: 'attention' adds a key of its own"):
        pr.tune(
            block, likeness(block, inputs()[0]), inputs(), space={"attention": {"num_random_features": [8]}}, **QUICK
        )

"""Which matrices are hidden: by layers, by names, and by the order, in the plain calls of both optimizers."""

import pytest
import torch
from torch import nn

import panther as pr
from panther.errors import CheckpointError, ConfigError
from panther.nn import MonarchLinear
from panther.optim import MuonAdamW, SketchedAdamW, param_groups, sketched_param_groups
from panther.train.optimization.optimizer import make_optimizer


class Language(nn.Module):
    """A language model whose parameters have the names of nanoGPT, and positions as a parameter of the model."""

    def __init__(self, width=12, tied=False):
        super().__init__()
        self.wte = nn.Embedding(30, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, 9, width))
        self.h = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(width, 20), "down": nn.Linear(20, width)}) for _ in "ab")
        self.lm_head = nn.Linear(width, 30, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(3, 6, 8))
        self.A_log = nn.Parameter(torch.zeros(6, 4))
        self.norm = nn.LayerNorm((5, 6))
        self.conv = nn.Conv1d(6, 6, 3)
        self.gate = nn.Linear(6, 1)
        self.head = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)


def sequential():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def tables():
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 50))


BLOCKS = {f"h.{i}.{side}.weight" for i in range(2) for side in ("up", "down")}
# A model, and its hidden matrices by layers, by names and by the order.
MODELS = {
    "language": (Language, BLOCKS, BLOCKS, BLOCKS),
    # The order alone takes the last matrix for the head. Blocks with equal names and shapes tell more.
    "tied": (lambda: Language(tied=True), BLOCKS, BLOCKS, BLOCKS - {"h.1.down.weight"}),
    "sequential": (sequential, {"0.weight", "2.weight"}, {"0.weight", "2.weight"}, {"0.weight", "2.weight"}),
    "numbered tables": (tables, {"1.weight"}, {"1.weight"}, {"1.weight"}),
    "one matrix": (lambda: nn.Linear(8, 4, bias=False), set(), {"weight"}, {"weight"}),
    # Without layers and names, stacks, states and norms with several dimensions look alike.
    "experts": (Experts, {"experts"}, {"experts", "last.weight"}, {"norm.weight", "norm.bias", "head.weight"}),
    "sketched": (
        lambda: nn.Sequential(pr.nn.SKLinear(32, 32, 2), nn.Linear(32, 4)),
        {"0.S1", "0.S2"},
        {"0.S1", "0.S2"},
        {"0.S2"},
    ),
}


def hidden(optimizer, model, state):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {name for name, p in model.named_parameters() if state in optimizer.state[p]}


@pytest.mark.parametrize("name", MODELS)
def test_hidden_matrices_are_orthogonalised_and_sketched(name):
    make, by_layers, by_names, by_order = MODELS[name]
    model = make()
    calls = {"layers": (param_groups, by_layers), "names": (lambda m: m.named_parameters(), by_names)}
    calls["order"] = (lambda m: m.parameters(), by_order)
    for arguments, expected in calls.values():
        if expected:
            assert hidden(MuonAdamW(arguments(model)), model, "momentum_buffer") == expected
            flat = {entry for entry in expected if dict(model.named_parameters())[entry].ndim == 2}
            groups = sketched_param_groups(model, rank=1) if arguments is param_groups else arguments(model)
            assert hidden(SketchedAdamW(groups, rank=1), model, "sketch_avg") == flat


def test_adamw_gets_the_rates_that_layers_state():
    layer = MonarchLinear(192, 96, rank=2)
    model = nn.Sequential(nn.Linear(8, 192), layer, nn.Linear(96, 3))
    blocks, inputs = layer.num_blocks[0], layer.down.shape[1]
    factors = {"1.down": blocks / 2, "1.up": inputs / 4}
    names = {name for name, _ in model.named_parameters()}
    muon = param_groups(model, lr=0.01, weight_decay=0.2, include=lambda name, _: name == "0")
    for groups in (
        sketched_param_groups(model, rank=None, lr=0.01, weight_decay=0.2),
        sketched_param_groups(model, rank=3, lr=0.01, weight_decay=0.2),
        [group for group in muon if not group["orthogonalize"]],
    ):
        found = {name: group for group in groups for name, _ in group["params"]}
        assert set(found) == (names if "rank" in groups[0] else names - {"0.weight"})
        for name, group in found.items():
            assert group["lr"] == pytest.approx(0.01 * factors.get(name, 1))
            assert group["lr"] * group["weight_decay"] == pytest.approx(0 if name.endswith("bias") else 0.002)
    parametrized = MonarchLinear(192, 96)
    nn.utils.parametrize.register_parametrization(parametrized, "down", nn.Identity())
    assert len(sketched_param_groups(nn.Sequential(parametrized), rank=None)) == 3
    layer.down.data.zero_()
    groups = sketched_param_groups(model, rank=None, lr=0.01, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups)
    before = layer.up.detach().clone()
    (layer.up.sum() + model[2].weight.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(before - layer.up, torch.full_like(before, 0.01 * inputs / 4))


def test_muon_gets_the_rates_that_layers_state():
    torch.manual_seed(0)
    layer = MonarchLinear(192, 96, rank=2, bias=False)
    model = nn.Sequential(nn.Linear(8, 192), layer, pr.nn.SKLinear(96, 96, 4), nn.Linear(96, 3))
    groups = [group for group in param_groups(model, lr=0.01, weight_decay=0.2) if group["orthogonalize"]]
    found = {name: group for group in groups for name, _ in group["params"]}
    assert {name: group["lr"] for name, group in found.items() if name[0] != "1"} == dict.fromkeys(
        ("2.S1", "2.S2", "0.weight"), 0.04
    )
    # Both products together move the outputs as far as an update of a dense weight does, whose norm is known.
    before, x = layer.weight.detach(), torch.randn(4096, 192)
    for p, name in ((layer.down, "1.down"), (layer.up, "1.up")):
        (m, n), longest = p.shape[1:], 192
        assert found[name]["lr"] == pytest.approx(0.04 * (longest / (2 * max(m, n))) ** 0.5)
        assert found[name]["lr"] * found[name]["weight_decay"] == pytest.approx(0.01 * 0.2)
    optimizer = MuonAdamW(param_groups(model, lr=1e-4, weight_decay=0.0))
    nn.functional.mse_loss(layer(x), torch.randn(4096, 96)).backward()
    optimizer.step()
    moved = torch.linalg.matrix_norm(layer.weight.detach() - before, ord=2)
    assert 0.25 < moved / (0.2 * 4e-4 * 192**0.5) < 4


def test_an_embedding_by_shape():
    shapes = [(16, 8), (16,), (20_000, 8), (8, 16), (8,), (3, 8)]
    optimizer = MuonAdamW([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    assert [tuple(p.shape) for p in optimizer.param_groups[0]["params"]] == [(16, 8), (8, 16)]


def test_groups_keep_their_settings_and_are_divided():
    """As transformers and others make them: matrices with weight decay, vectors without."""
    model = Language()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    for optimizer, key in ((MuonAdamW(groups), "orthogonalize"), (SketchedAdamW(groups, rank=4), "rank")):
        assert [bool(group[key]) for group in optimizer.param_groups] == [True, False, False]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2, 2)), key: None})
    chosen = MuonAdamW([{"params": model.wte.weight, "orthogonalize": True}, {"params": model.h.parameters()}])
    assert [group["orthogonalize"] for group in chosen.param_groups] == [True, False]


@pytest.mark.parametrize(
    "make",
    [
        lambda: MuonAdamW(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)).parameters()),
        lambda: MuonAdamW(nn.Conv1d(4, 4, 3).parameters(), momentum=0.9),
        lambda: MuonAdamW(sequential().parameters(), orthogonalize=False),
        lambda: MuonAdamW(param_groups(nn.Linear(3, 2))),
    ],
)
def test_a_call_that_would_orthogonalise_nothing_is_refused(make):
    with pytest.raises(ValueError, match=r"none of the \d+ parameters would be orthogonalised.*torch\.optim\.AdamW"):
        make()
    MuonAdamW([{"params": []}])  # a stage whose parameters are frozen


def test_a_state_of_one_group_is_refused_in_a_sentence():
    """Earlier versions gave AdamW to all parameters of the plain call."""
    model = sequential()
    other = torch.optim.AdamW(model.parameters())
    state = {"state": {}, "param_groups": [other.state_dict()["param_groups"][0] | {"orthogonalize": False}]}
    state["param_groups"][0] |= {"momentum": 0.95, "rank": None}
    with pytest.raises(CheckpointError, match=r"groups of \[6\] parameters, and the optimizer has \[2, 4\]"):
        MuonAdamW(model.parameters()).load_state_dict(state)


@pytest.mark.parametrize(("optimizer", "setting"), [(MuonAdamW, "orthogonalize"), (SketchedAdamW, "rank")])
def test_a_stage_takes_groups_and_selects_no_matrices(optimizer, setting):
    """A stage does not know which matrices of the model are the first and the last one."""
    by_name = dict(sequential().named_parameters())
    with pytest.raises(ConfigError, match=rf"{optimizer.__name__} selects hidden matrices by .* makes groups"):
        make_optimizer(optimizer, None, by_name, strategy="pp", stages=2)
    value = {"orthogonalize": True, "rank": 2}[setting]
    made = make_optimizer(
        lambda params: optimizer([{"params": [p for p in params if p.ndim > 1], setting: value}]),
        None,
        by_name,
        strategy="pp",
        stages=2,
    )
    assert [(len(group["params"]), group[setting]) for group in made.param_groups] == [(3, value)]

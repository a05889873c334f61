"""tensor_parallel on models against one process, and what it replicates and refuses."""

import re

import pytest
import torch
import torch.distributed as dist
from fake import fake_group
from ranks import on_ranks, take_steps, weights_of
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from panther.distributed import ColwiseSKParallel, RowwiseSKParallel, data_parallel, make_mesh, tensor_parallel
from panther.errors import DistributedError, ShapeError
from panther.nn import SKLinear

pytestmark = pytest.mark.distributed


class Gated(nn.Module):
    def __init__(self, make):
        super().__init__()
        self._tp_plan = {"*_proj": "colwise", "down_proj": "rowwise"}
        self.gate_proj, self.up_proj, self.down_proj = make(40, 50), make(40, 50), make(50, 40)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    """An embedding, a torch encoder layer, a gated block, a Sequential of sketched and dense layers, and a head."""

    def __init__(self, make):
        super().__init__()
        self.embed = nn.Embedding(20, 40)
        self.encoder = nn.TransformerEncoderLayer(40, 4, 60, dropout=0.0, batch_first=True)
        self.gated, self.norm = Gated(make), nn.LayerNorm(40)
        self.stack = nn.Sequential(make(40, 30), nn.GELU(), nn.Linear(30, 40), nn.LayerNorm(40), nn.Linear(40, 40))
        self.head = nn.Linear(40, 5)

    def forward(self, tokens):
        x = self.encoder(self.embed(tokens))
        x = x + self.gated(self.norm(x))
        return self.head(self.stack(x).mean(1))


def build(seed, sketched=True):
    torch.manual_seed(seed)
    return Model((lambda n, m: SKLinear(n, m, 3)) if sketched else nn.Linear).double()


def data():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, (8, 6), generator=generator)
    return tokens, torch.randint(5, (8,), generator=generator)


def train(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses, _ = take_steps(optimizer, lambda: nn.functional.cross_entropy(model(x), y))
    return losses, weights_of(model)


@pytest.mark.parametrize(
    ("n", "sketched"),
    [
        (1, True),
        (2, False),
        (3, True),
        (3, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_ten_steps_are_those_of_one_process(n, sketched):
    x, y = data()

    def rank():
        model = build(100 + dist.get_rank(), sketched)  # other weights and seeds on every rank
        report = tensor_parallel(model, make_mesh(tp=n)["tp"])
        return *train(model, x, y), {entry.name: entry for entry in report.placements}

    losses, weights = train(build(100, sketched), x, y)
    for their_losses, theirs, report in on_ranks(rank, n):
        assert their_losses == pytest.approx(losses, rel=1e-10)
        assert set(theirs) == set(weights)
        for name in weights:
            torch.testing.assert_close(theirs[name], weights[name], rtol=1e-8, atol=1e-10)
        actions = {name: entry.action for name, entry in report.items()}
        cut = {"stack.0", "encoder.linear1", "gated.gate_proj", "gated.up_proj"}
        assert {name for name, action in actions.items() if action == "outputs sharded"} == cut
        rows = {"stack.2", "encoder.linear2", "gated.down_proj"}  # of 50 features between, uneven over 3 ranks
        assert {name for name, action in actions.items() if action == "inputs sharded"} == rows
        assert report["gated.down_proj"].reason == "the model's plan"
        assert report["head"].action == "replicated"
        assert (
            report["stack.4"].reason
            == "no linear layer is known to follow or precede it with only elementwise functions between"
        )
        owners = {name.rpartition(".")[0] for name in weights}
        assert set(report) == owners  # every module that has parameters


def test_with_fsdp_and_clipping():
    """dp = 2 by tp = 2: every parameter is on the tp axis, so that one norm covers all."""
    x, y = data()

    def build_small(seed):
        torch.manual_seed(seed)
        layers = [SKLinear(40, 48, 2), nn.ReLU(), SKLinear(48, 40, 2), nn.LayerNorm(40), nn.Linear(40, 5)]
        return nn.Sequential(nn.Embedding(20, 40), *layers).double()

    def run(model, x, y):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        _, norms = take_steps(optimizer, lambda: nn.functional.cross_entropy(model(x).mean(1), y), 5, clip=0.1)
        return norms, list(weights_of(model).values())

    def rank():
        mesh = make_mesh(dp=2, tp=2)
        model = build_small(100 + dist.get_rank())
        tensor_parallel(model, mesh["tp"])
        model = data_parallel(model, mesh["dp"], "fsdp")
        own = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
        return run(model, x[own], y[own])

    norms, weights = run(build_small(100), x, y)
    for their_norms, theirs in on_ranks(rank, 4):
        assert their_norms == pytest.approx(norms, rel=1e-9)
        for a, b in zip(weights, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_a_plan_by_names():
    def rank():
        model = build(0)
        plan = {
            "gated.*_proj": ColwiseSKParallel(),
            "gated.down_proj": RowwiseSKParallel(),
            "encoder.linear1": ColwiseParallel(),
            "encoder.linear2": RowwiseParallel(),
        }
        report = tensor_parallel(model, make_mesh(tp=2)["tp"], plan)
        out = model(data()[0]).detach()
        return {entry.name: entry.reason for entry in report.placements}, out, str(report)

    reasons, out, printed = on_ranks(rank)[0]
    assert reasons["gated.up_proj"] == "by the plan's 'gated.*_proj'"
    assert reasons["gated.down_proj"] == "by the plan's 'gated.down_proj'"
    torch.testing.assert_close(out, build(0)(data()[0]).detach())
    assert printed.splitlines()[0].split() == ["module", "kind", "action", "reason"]


def test_what_is_replicated_and_what_is_refused():
    """Without processes: none of it sends anything."""
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict(
        {
            "narrow": nn.Sequential(nn.Linear(8, 1), nn.ReLU(), nn.Linear(1, 8)),
            "twice": nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 8)),
            "again": nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 8)),
            "softmax": nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)),
        }
    )
    with fake_group(2):
        mesh = make_mesh(dp=1, tp=2)
        reasons = {entry.name: entry.reason for entry in tensor_parallel(model, mesh["tp"]).placements}
        for arguments, message in (
            ((mesh,), "tensor_parallel takes one mesh axis, and the mesh has ('dp', 'tp')"),
            ((mesh["tp"], "megatron"), "plan='megatron' must be 'auto', or a mapping of names to styles"),
            (
                (mesh["tp"], {"mlp": ColwiseParallel()}),
                "plan names 'mlp', and no module matches it: the modules are embed, encoder",
            ),
        ):
            with pytest.raises((ValueError, ShapeError), match=re.escape(message)):
                tensor_parallel(build(0), *arguments)
        for arguments, message in (
            ((model, None), "tensor_parallel takes a DeviceMesh, such as make_mesh(tp=2)['tp'], not None"),
            ((model, 2), "tensor_parallel takes a DeviceMesh, such as make_mesh(tp=2)['tp'], not 2"),
            (("model", mesh["tp"]), "tensor_parallel takes an nn.Module, not 'model'"),
            ((model, mesh["tp"], {"narrow": "colwise"}), "style of 'narrow' must be a ParallelStyle, such as"),
        ):
            with pytest.raises(TypeError, match=re.escape(message)):
                tensor_parallel(*arguments)
    no_partner = "no linear layer is known to follow or precede it with only elementwise functions between"
    assert reasons["narrow.0"] == "has only 1 features, too few for 2 ranks"
    assert reasons["twice.0"] == reasons["twice.2"] == reasons["again.2"] == "is used in several places of the model"
    assert reasons["softmax.0"] == reasons["softmax.2"] == no_partner


def test_models_that_are_sharded_or_wrapped_are_refused_and_not_changed():
    def build_pair():
        return nn.Sequential(SKLinear(8, 12, 2), nn.ReLU(), SKLinear(12, 8, 2))

    with fake_group(2):
        mesh = make_mesh(dp=1, tp=2)
        for prepare, message in (
            (
                lambda model: tensor_parallel(model, mesh["tp"]) and model,
                "6 of the model's tensors are on a mesh already",
            ),
            (
                lambda model: data_parallel(model, mesh["dp"], "fsdp"),
                "on a mesh already, .* once and before data_parallel",
            ),
            (lambda model: data_parallel(model, mesh["dp"]), "the model is in DistributedDataParallel"),
            (
                lambda model: nn.ModuleDict({"inner": data_parallel(model, mesh["dp"])}),
                "the model is in DistributedDataParallel",
            ),
        ):
            model = prepare(build_pair())
            identities = {name: id(p) for name, p in model.named_parameters()}
            with pytest.raises(DistributedError, match=message):
                tensor_parallel(model, mesh["tp"])
            assert {name: id(p) for name, p in model.named_parameters()} == identities

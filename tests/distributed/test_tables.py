"""Tables and output layers cut over their rows, shared weights, and the report of a model of many kinds."""

import pytest
import torch
import torch.distributed as dist
from covering import half_of
from ranks import gradients_of, on_ranks, take_steps, weights_of, whole
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from panther.distributed import (
    ColwiseSKParallel,
    RowwiseSKParallel,
    data_parallel,
    make_mesh,
    tensor_parallel,
    unshard_module,
)
from panther.errors import ShapeError
from panther.nn import RandMultiHeadAttention, SKConv2d, SKLinear

pytestmark = pytest.mark.distributed


class Language(nn.Module):
    """A table of 4099 rows, uneven over any ranks, and the output layer, which may share its weight."""

    def __init__(self, seed, tied):
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(4099, 12, padding_idx=2)
        self.up, self.down = SKLinear(12, 30, 2), nn.Linear(30, 12)
        self.ff = nn.Sequential(self.up, nn.Tanh(), self.down)
        self.head = nn.Linear(12, 4099)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.ff(x))


def train(model, tokens, steps=10):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    losses, norms, first = [], [], None
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        first = first or gradients_of(model)
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, first, weights_of(model)


def batch():
    tokens = torch.randint(4099, (4, 6), generator=torch.Generator().manual_seed(0))
    tokens[:, 3], tokens[0, 0], tokens[1, 1] = 2, 4098, 0
    return tokens


@pytest.mark.parametrize(("sizes", "tied"), half_of([(1, 2), (1, 3), (2, 2), (1, 4)], [True, False]))
def test_tables_and_output_layers(sizes, tied):
    """Copies of a half batch on dp = 2 have the whole batch's mean and gradient."""
    dp, tp = sizes
    tokens = batch()

    def rank():
        mesh = make_mesh(dp=dp, tp=tp)
        model = Language(dist.get_rank(), tied)
        report = tensor_parallel(model, mesh["tp"])
        rows = model.embed.weight.to_local().shape[0]
        if dp > 1:
            model = data_parallel(model, mesh["dp"], "fsdp")
        result = train(model, tokens)
        plain = unshard_module(model)
        shared = plain.head.weight is plain.embed.weight, model.head.weight is model.embed.weight
        return *result, {entry.name: entry for entry in report.placements}, shared, rows

    losses, norms, first, weights = train(Language(0, tied), tokens)
    found = on_ranks(rank, dp * tp)
    for their_losses, their_norms, gradients, theirs, report, shared, _ in found:
        assert their_losses == pytest.approx(losses, rel=1e-10)
        assert their_norms == pytest.approx(norms, rel=1e-9)
        assert set(theirs) == set(weights)
        for name, weight in weights.items():
            assert (gradients[name] - first[name]).norm() <= 1e-12 * first[name].norm()
            torch.testing.assert_close(theirs[name], weight, rtol=1e-8, atol=1e-10)
        assert shared == (tied, tied)
        assert report["embed"].action == "rows sharded"
        assert report["head"].action == "outputs sharded"
        assert report["head"].reason.endswith(", with 'embed'" if tied else "gathered")
    assert [rows for *_, rows in found[:tp]] == [len(part) for part in torch.arange(4099).chunk(tp)]


def test_an_index_that_is_none_fails_on_every_rank():
    def rank():
        table = parallelize_module(nn.Embedding(10, 4), make_mesh(tp=2)["tp"], RowwiseSKParallel())
        messages = []
        for index in (-1, 10):
            with pytest.raises(IndexError) as caught:
                table(torch.tensor([0, index]))
            messages.append(str(caught.value))
        return messages

    assert on_ranks(rank) == [["index out of range in self"] * 2] * 2


class Shared(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.second.weight = self.first.weight


def test_what_shares_a_weight():
    """What is copied stays shared; what a plan would part is refused."""

    def rank():
        mesh = make_mesh(tp=2)["tp"]
        small = Shared(nn.Embedding(20, 8), nn.Linear(8, 20))
        reports = [tensor_parallel(small, mesh)]
        kept = small.first.weight is small.second.weight
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        block[2].weight = block[0].weight
        scaled = Shared(nn.Embedding(5000, 8, scale_grad_by_freq=True), nn.Linear(8, 5000))
        reports += [tensor_parallel(block, mesh), tensor_parallel(scaled, mesh)]
        messages = []
        for plan in (
            {"first": RowwiseSKParallel()},
            {"first": ColwiseParallel(), "second": ColwiseSKParallel(output_layouts=Replicate())},
        ):
            with pytest.raises(ShapeError) as caught:
                tensor_parallel(Shared(nn.Embedding(20, 8), nn.Linear(8, 20)), mesh, plan)
            messages.append(str(caught.value))
        return [[entry.reason for entry in report.placements] for report in reports], kept, messages

    (small, block, scaled), kept, messages = on_ranks(rank)[0]
    assert kept
    assert small == [
        "its 20 rows are fewer than 4096",
        "no linear layer is known to follow or precede it with only elementwise functions between",
    ]
    assert block == ["shares a parameter with another layer"] * 2
    assert scaled[0] == "has max_norm, scale_grad_by_freq or sparse gradients"
    assert scaled[1] == "shares a parameter, with 'first', which is not sharded"
    for message in messages:
        assert message.startswith("'first', 'second' share a parameter, and the plan does not shard it in one way")


class Own(nn.Module):
    """A parameter of its own, a container of them, and modules of many kinds."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.token = nn.Parameter(torch.randn(24))
        self.scales = nn.ParameterList([torch.ones(24)])
        self.conv, self.sketched_conv = nn.Conv2d(3, 4, 3, padding=1), SKConv2d(4, 24, 3, 1, 1, num_terms=1, low_rank=1)
        self.norm = nn.BatchNorm2d(24)
        self.encoder = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.random = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)
        self.random.self_attn = RandMultiHeadAttention(24, 4, 6)
        self.recurrent = nn.GRU(24, 24, batch_first=True)
        self.single, self.head = SKLinear(24, 24, 1), nn.Linear(24, 3)
        self.double()

    def forward(self, x):
        x = self.norm(self.sketched_conv(self.conv(x))).flatten(2).mT
        x = self.random(self.encoder(x * self.scales[0] + self.token))
        return self.head(self.single(self.recurrent(x)[0])).mean(1)


@pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_module_with_parameters_is_in_the_report(n):
    x = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        losses, _ = take_steps(optimizer, lambda: nn.functional.cross_entropy(model(x), torch.arange(4) % 3))
        model.eval()
        with torch.no_grad():
            return losses, model(x), weights_of(model)

    def rank():
        model = Own(dist.get_rank())
        owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        report = tensor_parallel(model, make_mesh(tp=n)["tp"])
        return *run(model), {entry.name: entry for entry in report.placements}, owners

    losses, out, weights = run(Own(0))
    for their_losses, theirs, parameters, report, owners in on_ranks(rank, n):
        assert their_losses == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(theirs, out, rtol=1e-9, atol=1e-11)
        for name, weight in weights.items():
            torch.testing.assert_close(parameters[name], weight, rtol=1e-8, atol=1e-10)
        assert set(report) == owners
        actions = {name: entry.action for name, entry in report.items() if entry.action != "replicated"}
        assert actions == {
            "encoder.linear1": "outputs sharded",
            "encoder.linear2": "inputs sharded",
            "random.linear1": "outputs sharded",
            "random.linear2": "inputs sharded",
            "random.self_attn": "heads sharded",
        }
        reasons = {name: entry.reason for name, entry in report.items()}
        assert reasons["conv"] == reasons["sketched_conv"] == "channels of convolutions are not sharded"
        assert (
            reasons["single"]
            == "no linear layer is known to follow or precede it with only elementwise functions between"
        )
        assert reasons["encoder.self_attn.out_proj"] == "with 'encoder.self_attn'"
        assert reasons["recurrent"].endswith("plain tensors, because it keeps tensors in other attributes too")
        assert reasons["scales"].endswith("plain tensors, because other modules read them")
        assert reasons["norm"] == reasons[""] == "replicated on every rank"

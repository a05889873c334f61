"""MonarchLinear over ranks against one process: blocks of tensor parallelism, sequences, shards of FSDP, messages."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import assert_near, gradients_of, on_ranks, results, take_steps, weights_of
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from panther.distributed import (
    ColwiseSKParallel,
    CommunicationCounter,
    RowwiseSKParallel,
    data_parallel,
    make_mesh,
    materialize_,
    tensor_parallel,
    unshard_module,
)
from panther.distributed.comm.collectives import all_gather
from panther.nn import MonarchLinear
from panther.optim import MuonAdamW, param_groups

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::panther.errors.PerformanceWarning")]
PLAN = {"0": ColwiseSKParallel(), "2": RowwiseSKParallel()}


def pair(seed, dtype=torch.float64, rank=2, bias=True):
    """Return 40 to 48 features, 4 blocks of 12 outputs, and 12 blocks of 4 inputs back to 31, which are padded."""
    torch.manual_seed(seed)
    return nn.Sequential(
        MonarchLinear(40, 48, rank, num_blocks=(5, 4), bias=bias, dtype=dtype),
        nn.GELU(),
        MonarchLinear(48, 31, rank, num_blocks=(12, 6), bias=bias, dtype=dtype),
    )


def data(dtype=torch.float64, length=7):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(3, length, 40, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "rank", "bias"), [(torch.float64, 2, True), (torch.float32, 1, False)])
def test_a_pair_is_the_layers_unsharded(n, dtype, rank, bias):
    x = data(dtype)

    def run():
        model = parallelize_module(pair(dist.get_rank(), dtype, rank, bias), make_mesh(tp=n)["tp"], PLAN)
        shapes = {name: tuple(parameter.to_local().shape) for name, parameter in model.named_parameters()}
        plain = unshard_module(model)
        weights = [torch.equal(model[i].weight, plain[i].weight) for i in (0, 2)]
        state = copy.deepcopy(model.state_dict())
        other = parallelize_module(pair(9, dtype, rank, bias), make_mesh(tp=n)["tp"], PLAN)
        other.load_state_dict(state)
        return results(model, x), shapes, all(weights), torch.equal(other(x), model(x)), plain(x)

    single = pair(0, dtype, rank, bias)
    expected = results(single, x)
    for ours, shapes, same_weights, same_state, out in on_ranks(run, n):
        assert_near(ours, expected, dtype)
        assert same_weights
        assert same_state
        assert torch.equal(out, single(x))
        assert shapes["0.down"] == (5, 8, rank * 4)
        assert shapes["0.up"] == (4, 5 * rank, 12 // n)
        assert shapes["2.down"] == (12 // n, 4, rank * 6)
        assert shapes["2.up"] == (6, 12 // n * rank, 6)


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_ten_steps_of_training(optimizer):
    x, y = data(), torch.randn(3, 7, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def train(model):
        groups = MuonAdamW(param_groups(model)) if optimizer == "muon" else torch.optim.SGD(model.parameters(), 0.3)
        losses, norms = take_steps(groups, lambda: nn.functional.mse_loss(model(x), y), clip=0.2)
        return losses, norms, weights_of(model)

    def run():
        return train(parallelize_module(pair(dist.get_rank()), make_mesh(tp=2)["tp"], PLAN))

    losses, norms, weights = train(pair(0))
    for their_losses, their_norms, theirs in on_ranks(run):
        assert their_losses == pytest.approx(losses, rel=1e-9)
        assert their_norms == pytest.approx(norms, rel=1e-9)
        assert all(torch.allclose(theirs[name], weights[name], rtol=1e-8, atol=1e-10) for name in weights)


def test_layouts_between_sequences_and_whole_tensors():
    """7 positions are uneven over the ranks. A layer alone gathers its outputs, or takes whole inputs."""
    x = data()

    def run():
        mesh = make_mesh(tp=2)["tp"]
        plan = {"0": ColwiseSKParallel(input_layouts=Shard(1)), "2": RowwiseSKParallel(output_layouts=Shard(1))}
        model = parallelize_module(pair(dist.get_rank()), mesh, plan)
        leaf = x.chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
        out = model(leaf)
        (out.square().sum() / (21 * 31)).backward()
        sequence = *(all_gather(part, 1) for part in (out.detach(), leaf.grad)), gradients_of(model)
        plan = {
            "0": ColwiseSKParallel(output_layouts=Replicate()),
            "2": RowwiseSKParallel(input_layouts=Replicate()),
        }
        return sequence, results(parallelize_module(pair(dist.get_rank()), mesh, plan), x)

    expected = results(pair(0), x)
    for sequence, alone in on_ranks(run):
        assert_near(sequence, expected)
        assert_near(alone, expected)


def test_messages():
    x, rows = data().float(), 21

    def run():
        model = parallelize_module(pair(0, torch.float32), make_mesh(tp=2)["tp"], PLAN)
        counts = []
        leaf = x.clone().requires_grad_()
        with CommunicationCounter() as forward:
            y = model(leaf)
        with CommunicationCounter() as backward:
            y.sum().backward()
        counts += [(counter.bytes, counter.calls) for counter in (forward, backward)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(x)
        return counts, half

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = pair(0, torch.float32)(x)
    for (forward, backward), half in on_ranks(run):
        assert forward == (rows * 31 * 4, 1)
        assert backward == (rows * 40 * 4 + 40 * 8 * 4, 2)  # the input's gradient, and that of down: 2 * 4 * 40 numbers
        assert half.dtype is expected.dtype is torch.bfloat16
        assert (half - expected).norm() <= 2**-6 * expected.norm()


class Attention(nn.Module):
    """Three layers that read one tensor, as q, k and v do."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (MonarchLinear(40, 48, num_blocks=(5, 4)) for _ in range(3))
        self.o = MonarchLinear(48, 40, num_blocks=(12, 4))

    def forward(self, x):
        return self.o(self.q(x) * torch.sigmoid(self.k(x)) + self.v(x))


def test_layers_of_one_input_share_its_message():
    x = data()

    def build(seed):
        torch.manual_seed(seed)
        return Attention().double()

    def run():
        model = build(dist.get_rank())
        colwise = ColwiseSKParallel()
        tensor_parallel(model, make_mesh(tp=2)["tp"], {"[qkv]": colwise, "o": RowwiseSKParallel()})
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        with CommunicationCounter() as backward:
            out.square().mean().backward()
        return (out.detach(), leaf.grad, gradients_of(model)), backward.bytes

    expected = results(build(0), x)
    for ours, sent in on_ranks(run):
        assert_near(ours, expected)
        assert sent == 8 * (21 * 40 + 3 * 40 * 4)


def test_what_blocks_cannot_do_is_replicated_with_the_reason():
    def run():
        mesh = make_mesh(tp=2)["tp"]
        torch.manual_seed(0)
        layers = [(40, 48, (5, 4)), (48, 40, (3, 5)), (40, 47, (5, 4)), (47, 40, (12, 4)), (40, 48, (5, 16))]
        layers += [(48, 40, (12, 4)), (40, 48, (5, 4)), (48, 40, (12, 4))]
        made = [MonarchLinear(n, m, num_blocks=blocks) for n, m, blocks in layers]
        model = nn.Sequential(*(nn.Sequential(a, nn.ReLU(), b) for a, b in zip(made[::2], made[1::2], strict=True)))
        reasons = {entry.name: entry.reason for entry in tensor_parallel(model, mesh).placements}
        errors = []
        for style in (ColwiseSKParallel(), RowwiseSKParallel()):
            with pytest.raises(Exception, match="a MonarchLinear cannot have its") as caught:
                parallelize_module(MonarchLinear(45, 45, num_blocks=5), mesh, style)
            errors.append(f"{type(caught.value).__name__}: {caught.value}")
        return reasons, errors, model(torch.randn(2, 40)).shape

    for reasons, errors, shape in on_ranks(run):
        assert (
            reasons["0.0"]
            == reasons["0.2"]
            == ("'0.2' cannot have its inputs sharded: its 3 blocks of inputs are not a multiple of 2 ranks")
        )
        assert reasons["1.0"] == "'1.0' cannot have its outputs sharded: its outputs are padded to blocks of equal size"
        assert reasons["2.0"].endswith("its 3 outputs of a block are not a multiple of 2 ranks")
        assert reasons["3.0"] == "paired with '3.2'"
        assert errors == [
            "ShapeError: a MonarchLinear cannot have its outputs sharded: its 9 outputs of a block are not a multiple "
            "of 2 ranks; choose another num_blocks",
            "ShapeError: a MonarchLinear cannot have its inputs sharded: its 5 blocks of inputs are not a multiple of "
            "2 ranks; choose another num_blocks",
        ]
        assert shape == (2, 40)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_shards_of_fsdp_take_the_steps_of_one_process(tp):
    """5 blocks of down, 4 of up and 31 biases are uneven over 2 ranks."""
    x, y = data(), torch.randn(3, 7, 31, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def train(model):
        losses, _ = take_steps(MuonAdamW(param_groups(model)), lambda: nn.functional.mse_loss(model(x), y))
        return losses, weights_of(model)

    def run():
        mesh = make_mesh(dp=2, tp=tp)
        model = pair(dist.get_rank())
        if tp > 1:
            tensor_parallel(model, mesh["tp"])
        return train(data_parallel(model, mesh["dp"], strategy="fsdp"))

    losses, weights = train(pair(0))
    for their_losses, theirs in on_ranks(run, 2 * tp):
        assert their_losses == pytest.approx(losses, rel=1e-9)
        assert all(torch.allclose(theirs[name], weights[name], rtol=1e-8, atol=1e-10) for name in weights)


def test_a_model_without_values_is_sharded_first():
    def empty():
        with torch.device("meta"):
            return pair(0)

    def run():
        model = empty()
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        materialize_(model, seed=3)
        return weights_of(model), model(data())

    single = materialize_(empty(), seed=3)
    for weights, out in on_ranks(run):
        assert all(torch.equal(weights[name], parameter) for name, parameter in single.named_parameters())
        torch.testing.assert_close(out, single(data()))

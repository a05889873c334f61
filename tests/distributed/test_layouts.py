"""Layers whose inputs and outputs are cut along the sequence, gathered or whole, against one process."""

import re

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from ranks import assert_near, gradients_of, on_ranks, results, take_steps, weights_of, whole
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from panther.distributed import (
    ColwiseSKParallel,
    CommunicationCounter,
    RowwiseSKParallel,
    make_mesh,
    tensor_parallel,
    unshard_module,
)
from panther.distributed.comm.collectives import all_gather
from panther.errors import ShapeError
from panther.nn import LowRankLinear, SKLinear

pytestmark = pytest.mark.distributed


def sketched(n, m):
    return SKLinear(n, m, 3)


def sparse(n, m):
    return SKLinear(n, m, 7, sketch="sparse")


def fitted(n, m):
    return with_stored_sketches(SKLinear(n, m, 3))


def low_rank(n, m):
    return LowRankLinear(n, m, 6)


MAKERS = {
    "sketched": (sketched, sketched),
    "sparse": (sparse, sparse),
    "low rank": (low_rank, low_rank),
    "fitted": (fitted, fitted),
    "dense": (nn.Linear, nn.Linear),
    "sketched, dense": (sketched, nn.Linear),
    "dense, sketched": (nn.Linear, sketched),
}


def pair(kind, seed, dtype=torch.float64, width=50):
    torch.manual_seed(seed)
    first, second = MAKERS[kind]
    return nn.Sequential(first(40, width), nn.GELU(), second(width, 30)).to(dtype)


def data(dtype=torch.float64, length=7):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(3, length, 40, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["dense", "sketched, dense", "dense, sketched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_and_mixed_pairs_of_any_width(n, kind, dtype):
    x = data(dtype)

    def rank():
        plan = {"0": ColwiseSKParallel(), "2": RowwiseSKParallel()}
        return results(parallelize_module(pair(kind, dist.get_rank(), dtype, 256), make_mesh(tp=n)["tp"], plan), x)

    expected = results(pair(kind, 0, dtype, 256), x)
    for found in on_ranks(rank, n):
        assert_near(found, expected, dtype)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [*list(MAKERS)[:5], *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(MAKERS)[5:])]
)
@pytest.mark.parametrize(
    ("dim", "dtensors"),
    [(1, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, False), (0, True), (1, True)])],
)
def test_the_sequence_sharded_before_and_after(n, kind, dim, dtensors):
    """7 positions, or 3 samples, are uneven over the ranks."""
    x = data()
    layout = Shard(dim)

    def rank():
        mesh = make_mesh(tp=n)["tp"]
        plan = {
            "0": ColwiseSKParallel(input_layouts=layout),
            "2": RowwiseSKParallel(output_layouts=layout),
        }
        model = parallelize_module(pair(kind, dist.get_rank()), mesh, plan)
        leaf = x.chunk(n, dim)[dist.get_rank()].clone().requires_grad_()
        given = DTensor.from_local(leaf, mesh, [layout], shape=x.shape, stride=x.stride()) if dtensors else leaf
        out = model(given)
        (out.square().sum() / (21 * 30)).backward()
        return *(all_gather(part, dim) for part in (out.detach(), leaf.grad)), gradients_of(model)

    expected = results(pair(kind, 0), x)
    for found in on_ranks(rank, n):
        assert_near(found, expected)


def test_fitted_sketches_that_are_loaded_get_the_gradient_of_the_full_sequence():
    x = data()

    def rank():
        plan = {"0": ColwiseSKParallel(input_layouts=Shard(1)), "2": RowwiseSKParallel(output_layouts=Shard(1))}
        model = parallelize_module(pair("sketched", 1), make_mesh(tp=2)["tp"], plan)
        model.load_state_dict(pair("fitted", 0).state_dict())
        out = model(x.chunk(2, 1)[dist.get_rank()])
        (out.square().sum() / (21 * 30)).backward()
        return gradients_of(model)

    expected = results(pair("fitted", 0), x)[2]
    for gradients in on_ranks(rank):
        assert set(gradients) == set(expected)
        assert_near((gradients,), (expected,))


@pytest.mark.parametrize("kind", ["sketched", "dense", pytest.param("low rank", marks=pytest.mark.slow)])
def test_each_layer_alone_between_whole_tensors(kind):
    x = data()

    def rank():
        mesh = make_mesh(tp=2)["tp"]
        plan = {
            "0": ColwiseSKParallel(output_layouts=Replicate()),
            "2": RowwiseSKParallel(input_layouts=Replicate()),
        }
        return results(parallelize_module(pair(kind, dist.get_rank()), mesh, plan), x)

    expected = results(pair(kind, 0), x)
    for found in on_ranks(rank):
        assert_near(found, expected)


class Transformer(nn.Module):
    """A table, a block with separate projections, a feed-forward block, norms, and an output layer."""

    def __init__(self, make):
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Embedding(30, 24), nn.LayerNorm(24), nn.RMSNorm(24)
        self.q, self.k, self.v, self.o = (make(24, 24) for _ in range(4))
        self.up, self.down = make(24, 50), make(50, 24)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 31)

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 6)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.silu(self.up(self.norm2(x))))
        return self.head(self.norm(x))


def sequence_plan():
    colwise = ColwiseSKParallel(input_layouts=Shard(1))
    rowwise = RowwiseSKParallel(output_layouts=Shard(1))
    norm = SequenceParallel(use_local_output=True)
    return {
        "embed": rowwise, "norm*": norm, "[qkv]": colwise, "o": rowwise, "up": colwise, "down": rowwise,
        "head": ColwiseSKParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }  # fmt: skip


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sketched", "sparse", "dense", "low rank"])
def test_a_transformer_by_a_plan(n, kind):
    """Everything but attention and feed-forward sees a part of the sequence; torch's style for the norms."""
    tokens = torch.randint(30, (3, 10), generator=torch.Generator().manual_seed(1))

    def build(seed):
        torch.manual_seed(seed)
        return Transformer(MAKERS[kind][0]).double()

    def train(model):
        def loss():
            return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())

        # torch 2.11 clips gradients that are still to be summed, those of SequenceParallel, by another factor.
        clip = None if torch.__version__ < "2.13" else 0.5
        losses, _ = take_steps(torch.optim.SGD(model.parameters(), 0.1), loss, clip=clip)
        return losses, weights_of(model)

    def rank():
        model = build(dist.get_rank())
        report = tensor_parallel(model, make_mesh(tp=n)["tp"], sequence_plan())
        return *train(model), {entry.name: entry.action for entry in report.placements}, unshard_module(model)(tokens)

    single = build(0)
    losses, weights = train(single)
    for their_losses, theirs, actions, out in on_ranks(rank, n):
        assert their_losses == pytest.approx(losses, rel=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-8, atol=1e-10)
        assert actions["embed"] == "rows sharded"
        assert actions["norm1"] == "SequenceParallel"
        torch.testing.assert_close(out, single(tokens))


def chain(kind, seed):
    torch.manual_seed(seed)
    make = MAKERS[kind][0]
    return nn.Sequential(
        make(40, 50), nn.GELU(), make(50, 40), nn.LayerNorm(40), nn.Dropout(0.0),
        make(40, 50), nn.GELU(), make(50, 40), nn.RMSNorm(40), nn.Linear(40, 8),
    ).double()  # fmt: skip


@pytest.mark.parametrize("kind", ["sketched", "sparse", "dense"])
def test_sequences_are_sharded_between_pairs(kind):
    x = data()

    def rank():
        model = chain(kind, dist.get_rank())
        plan = {
            "0": ColwiseSKParallel(), "2": RowwiseSKParallel(output_layouts=Shard(1)),
            "3": SequenceParallel(use_local_output=True),
            "5": ColwiseSKParallel(input_layouts=Shard(1)), "7": RowwiseSKParallel(),
        }  # fmt: skip
        tensor_parallel(model, make_mesh(tp=2)["tp"], plan)
        shapes = []
        model[3].register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
        found = results(model, x)
        with pytest.raises(ShapeError) as caught:
            model(x[0])
        return *found, shapes[0], str(caught.value)

    expected = results(chain(kind, 0), x)
    for i, (out, dx, gradients, shape, message) in enumerate(on_ranks(rank)):
        assert shape == (3, 4 - i, 40)
        assert_near((out, dx, gradients), expected)
        assert message.startswith("a layout of Shard(1) shards a dimension before the features")


def test_layouts_that_are_refused():
    for call, message in {
        lambda: ColwiseSKParallel(input_layouts=Shard(-1)): "input_layouts=S(-1) must be Replicate() or Shard(dim)",
        lambda: ColwiseSKParallel(output_layouts=Shard(1)): "output_layouts=S(1) must be Replicate() or Shard(-1)",
        lambda: RowwiseSKParallel(input_layouts=Shard(1)): "input_layouts=S(1) must be Replicate() or Shard(-1)",
        lambda: RowwiseSKParallel(output_layouts=Shard(-1)): "output_layouts=S(-1) must be Replicate() or Shard(dim)",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("kind", ["sketched", "dense", pytest.param("low rank", marks=pytest.mark.slow)])
def test_bytes_sent(kind):
    """Gathering or scattering hands over a part of what a sum does, and sketched factors that see parts are summed."""
    x, rows, R = data(length=8).float(), 24, 3

    def rank():
        sent = []
        for layout in (None, Shard(1)):
            model = pair(kind, 0).float()
            plan = {
                "0": ColwiseSKParallel(input_layouts=layout),
                "2": RowwiseSKParallel(output_layouts=layout),
            }
            model = parallelize_module(model, make_mesh(tp=2)["tp"], plan)
            leaf = (x if layout is None else x.chunk(2, 1)[dist.get_rank()]).clone().requires_grad_()
            with CommunicationCounter() as forward:
                y = model(leaf)
            with CommunicationCounter() as backward:
                y.sum().backward()
            sent.append((forward.bytes, backward.bytes))
        return sent

    for whole_, part in on_ranks(rank):
        shape = 9 * 8  # what all_gather asks first
        if kind == "sketched":
            h = rows * 2 * R * 4
            assert whole_ == (h, h)
            assert part == (h // 2 + shape + h, h // 2 + h + (40 * R + R * 30 + 30) * 4)
        elif kind == "low rank":
            h = rows * 6 * 4
            assert whole_ == (h, h)
            assert part == (h // 2 + shape + h, h // 2 + h + (40 * 6 + 6 * 30 + 30) * 4)
        else:
            assert whole_ == (rows * 30 * 4, rows * 40 * 4)
            assert part[0] == rows * 40 * 4 // 2 + shape + rows * 30 * 4
            assert part[1] == rows * 30 * 4 // 2 + rows * 40 * 4  # the bias takes its gradient from what is gathered


@pytest.mark.parametrize("kind", ["sketched", "dense", pytest.param("low rank", marks=pytest.mark.slow)])
def test_autocast(kind):
    """Outputs have the dtype of one piece, and its values to the precision of bfloat16; gradients that of weights."""
    x = data().float()

    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
        return out.detach(), [whole(p.grad) for p in model.parameters()]

    def rank():
        plan = {"0": ColwiseSKParallel(), "2": RowwiseSKParallel()}
        return run(parallelize_module(pair(kind, dist.get_rank()).float(), make_mesh(tp=2)["tp"], plan))

    expected, theirs = run(pair(kind, 0).float())
    for out, gradients in on_ranks(rank):
        assert out.dtype is expected.dtype is torch.bfloat16
        assert (out - expected).norm() <= 2**-6 * expected.norm()
        for ours, gradient in zip(gradients, theirs, strict=True):
            assert ours.dtype is gradient.dtype is torch.float32
            assert (ours - gradient).norm() <= 2**-5 * gradient.norm()

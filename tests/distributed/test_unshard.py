"""From cut models back to plain ones."""

import pytest
import torch
import torch.distributed as dist
from compressed_layers import with_stored_sketches
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

import panther
from panther.distributed import data_parallel, make_mesh, tensor_parallel, unshard_module
from panther.distributed.checkpoint import export
from panther.nn import RandMultiHeadAttention, SKConv1d, SKLinear

pytestmark = pytest.mark.distributed


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(20, 40), SKLinear(40, 50, 2), nn.GELU(), SKLinear(50, 40, 2), nn.LayerNorm(40),
        nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 40)), SKLinear(40, 50, 2), nn.BatchNorm1d(50),
        nn.Linear(50, 20),
    )  # fmt: skip
    model[8].bias.requires_grad_(False)
    return model.double()


@pytest.mark.parametrize("sharded", [False, True])
def test_the_plain_model_comes_back(sharded):
    tokens = torch.arange(20)

    def rank():
        mesh = make_mesh(dp=2, tp=2) if sharded else make_mesh(tp=2)
        model = build(100 + dist.get_rank())
        tensor_parallel(model, mesh["tp"])
        if sharded:
            model = data_parallel(model, mesh["dp"], "fsdp")
        model.eval()
        out = model(tokens).detach()
        plain = unshard_module(model)
        cut = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
        return plain, out, unshard_module(model[1]).weight, torch.equal(model(tokens), out), cut

    single = build(100).eval()
    for plain, out, weight, same, cut in on_ranks(rank, 4 if sharded else 2):
        assert same  # the model is as it was
        assert cut == [name for name, _ in single.named_parameters()]
        assert [type(module) for module in plain.modules()] == [type(module) for module in single.modules()]
        state, theirs = single.state_dict(), plain.state_dict()
        assert list(theirs) == list(state)
        assert all(torch.equal(theirs[name], value) for name, value in state.items())
        assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in single.parameters()]
        assert torch.equal(plain(tokens), single(tokens))
        torch.testing.assert_close(out, single(tokens))
        assert torch.equal(weight, single[1].weight)


class Kinds(nn.Module):
    """Attention by heads, a sketched convolution and layers that are copied, a pair, and a wide output layer."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.attention, self.single = RandMultiHeadAttention(24, 4, 5), SKLinear(24, 24, 2)
        self.conv = SKConv1d(24, 24, 3, padding=1, num_terms=1, low_rank=2)
        self.ff = nn.Sequential(SKLinear(24, 50, 2), nn.ReLU(), SKLinear(50, 24, 2))
        self.head = nn.Linear(24, 5000)

    def forward(self, x):
        return self.head(self.ff(self.single(self.conv(self.attention(x, x, x)[0].mT).mT)))


def test_what_is_exported_is_the_plain_model(tmp_path):
    x = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(0))

    def rank():
        model = Kinds(dist.get_rank())
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        export(model, tmp_path / "model")
        return model(x).detach()

    outputs = on_ranks(rank)
    loaded = panther.load_compressed(tmp_path / "model", Kinds(7))
    for out in outputs:
        torch.testing.assert_close(out, loaded(x).detach())


def test_replicated_sketched_layers_take_fitted_ones():
    """Their sketches become DTensors as their factors are, and their dense weight is that of the plain layer."""

    def build(seed, fitted):
        torch.manual_seed(seed)
        if fitted:
            layers = SKConv1d(24, 24, 3, num_terms=1, low_rank=2), SKLinear(24, 24, 2)
            return nn.Sequential(*map(with_stored_sketches, layers))
        return nn.Sequential(SKConv1d(24, 24, 3, num_terms=1, low_rank=2), SKLinear(24, 24, 2).pack_())

    x = torch.randn(2, 24, 26, generator=torch.Generator().manual_seed(0))

    def rank():
        model = build(dist.get_rank(), fitted=False)
        tensor_parallel(model, make_mesh(tp=2)["tp"])
        seeded = model(x).detach(), [layer.weight.detach() for layer in model]
        model.load_state_dict(build(7, fitted=True).state_dict())
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return seeded, (model(x).detach(), [model[0].to_conv().weight.detach(), model[1].to_linear().weight.detach()])

    plain = [build(0, fitted=False), build(7, fitted=True)]
    for found in on_ranks(rank):
        for (out, weights), model in zip(found, plain, strict=True):
            torch.testing.assert_close(out, model(x).detach())
            for weight, layer in zip(weights, model, strict=True):
                torch.testing.assert_close(weight, layer.weight.detach())

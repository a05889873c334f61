"""From cut models back to plain ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from panther.distributed import data_parallel, launch, make_mesh, tensor_parallel, unshard_module
from panther.nn import SKLinear

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
    for plain, out, weight, same, cut in launch(rank, nproc=4 if sharded else 2, start_method="fork"):
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

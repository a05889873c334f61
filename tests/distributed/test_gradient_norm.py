"""The norm of gradients that torch's own tensor parallelism shards, leaves to be summed, or replicates."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from panther.distributed import make_mesh
from panther.distributed.comm.gradient_clipping import clip_gradients, gradient_norm

PLAN = {
    "0": SequenceParallel(),
    "1": ColwiseParallel(input_layouts=Shard(1)),
    "3": RowwiseParallel(output_layouts=Shard(1)),
    "4": SequenceParallel(use_local_output=True),
}


def test_a_sharded_sequence():
    def rank():
        torch.manual_seed(0)
        plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8)).double()
        mesh = make_mesh(tp=2)["tp"]
        model = parallelize_module(copy.deepcopy(plain), mesh, PLAN)
        x = torch.randn(3, 4, 8, dtype=torch.float64)
        y = model(DTensor.from_local(x.chunk(2, 1)[dist.get_rank()], mesh, [Shard(1)]))
        DTensor.from_local(y, mesh, [Shard(1)]).full_tensor().pow(3).sum().backward()
        plain(x).pow(3).sum().backward()
        assert any(p.grad.placements[0].is_partial() for p in model.parameters() if isinstance(p.grad, DTensor))

        norm, expected = (
            gradient_norm(model.parameters()),
            nn.utils.get_total_norm([p.grad for p in plain.parameters()]),
        )
        torch.testing.assert_close(norm, expected)
        clip_gradients(model.parameters(), 1.0, norm)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)
        return True

    assert all(on_ranks(rank))


LARGEST = [(torch.float32, 1e20), (torch.float32, 3e38), (torch.bfloat16, 1e30), (torch.float16, 6e4)]


@pytest.mark.parametrize(("dtype", "value"), LARGEST)
def test_squares_of_large_gradients_do_not_overflow(dtype, value):
    parameters = [nn.Parameter(torch.zeros(3, 5, dtype=dtype)), nn.Parameter(torch.zeros(7, dtype=dtype))]
    for p in parameters:
        p.grad = torch.full_like(p, value)
    norm = gradient_norm(parameters)
    expected = torch.cat([p.grad.double().flatten() for p in parameters]).norm()
    torch.testing.assert_close(norm.double(), expected, rtol=1e-2, atol=0)
    clip_gradients(parameters, 1.0, norm)
    assert all(torch.allclose(p.grad.double(), torch.tensor(22**-0.5).double(), rtol=2e-2) for p in parameters)
    parameters[0].grad[0, 0] = torch.inf
    assert gradient_norm(parameters).isinf()


def test_squares_of_large_shards_do_not_overflow():
    def rank():
        p = nn.Parameter(distribute_tensor(torch.zeros(6, 4), make_mesh(tp=2)["tp"], [Shard(0)]))
        p.grad = distribute_tensor(torch.full((6, 4), 1e20), p.device_mesh, [Shard(0)])
        norm = gradient_norm([p])
        clip_gradients([p], 1.0, norm)
        return norm.item(), p.grad.full_tensor().norm().item()

    for norm, clipped in on_ranks(rank):
        assert norm == pytest.approx(1e20 * 24**0.5, rel=1e-6)
        assert clipped == pytest.approx(1.0, rel=1e-5)

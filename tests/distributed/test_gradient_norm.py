"""The norm of gradients that torch's own tensor parallelism shards, leaves to be summed, or replicates."""

import copy

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard
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

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.tensor import Shard, distribute_tensor

from panther.distributed import CommunicationCounter, make_mesh

pytestmark = pytest.mark.distributed


def test_bytes_are_those_a_rank_hands_over():
    def rank():
        x = torch.ones(10)  # 40 bytes
        with CommunicationCounter() as traffic:
            dist.all_reduce(x)
            dist.broadcast(x.double(), 0)
            dist.all_gather([torch.empty(10) for _ in range(2)], x)
            dist.reduce_scatter(torch.empty(10), [x, x])
            dist.all_reduce(x)
        with CommunicationCounter() as silence:
            x.sum().item()
            dist.barrier()
        dist.all_reduce(x)  # after the block
        return dict(traffic.bytes_by_operation), traffic.calls, traffic.bytes, silence.calls

    for by_operation, calls, total, silence in on_ranks(rank):
        assert by_operation == {"allreduce_": 80, "broadcast_": 80, "allgather_": 40, "reduce_scatter_": 80}
        assert calls == 5
        assert total == 280
        assert silence == 0


def test_what_counts_is_given_not_received():
    def rank():
        x = torch.ones(4)  # 16 bytes
        first = dist.get_rank() == 0
        with CommunicationCounter() as traffic:
            dist.gather(x, [torch.empty(4), torch.empty(4)] if first else None)
            dist.scatter(torch.empty(4), [x, x] if first else None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames them; 2.11 has only these names
                dist.all_gather_into_tensor(torch.empty(8), x)
                dist.reduce_scatter_tensor(torch.empty(2), x)
            dist.all_to_all_single(torch.empty(4), x)
            functional_collectives.all_reduce(x, "sum", dist.group.WORLD).sum().item()
            if first:
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
        return dict(traffic.bytes_by_operation)

    both = {"gather_": 16, "_allgather_base_": 16, "_reduce_scatter_base_": 16, "alltoall_base_": 16, "all_reduce": 16}
    first, second = on_ranks(rank)
    assert first == both | {"scatter_": 32, "send": 16}
    assert second == both | {"scatter_": 0}


def test_messages_of_operations_on_sharded_tensors_count():
    """DTensors send inside of their operations, for example partial sums of a product."""

    def rank():
        mesh = make_mesh(dp=2)
        A = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        with CommunicationCounter() as traffic:
            (A.mT @ A).relu()  # products over the shards of 4 rows are added up first
        return dict(traffic.bytes_by_operation)

    assert on_ranks(rank) == [{"all_reduce": 4 * 6 * 6}] * 2


def test_the_block_leaves_autograd_as_it_was():
    for enabled in (True, False):
        with torch.autograd.set_multithreading_enabled(enabled):
            with CommunicationCounter():
                assert not torch._C._is_multithreading_enabled()
            assert torch._C._is_multithreading_enabled() == enabled

import pytest
import torch
import torch.distributed as dist

from panther.distributed import CommunicationCounter, launch

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
        dist.all_reduce(x)  # after the block
        return dict(traffic.bytes_by_operation), traffic.calls, traffic.bytes, silence.calls

    for by_operation, calls, total, silence in launch(rank, nproc=2, start_method="fork"):
        assert by_operation == {"allreduce_": 80, "broadcast_": 80, "allgather_": 40, "reduce_scatter_": 80}
        assert calls == 5
        assert total == 280
        assert silence == 0

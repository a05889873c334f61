"""Which ranks share a node, and what is said of tensor parallelism between nodes."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from panther.distributed import (
    ClusterSpec,
    HybridParallelTrainer,
    ModelStats,
    make_mesh,
    plan_parallelism,
    tensor_parallel,
)
from panther.distributed.comm.handshake import RankInfo, decide
from panther.distributed.comm.mesh import nodes_of, note_nodes, physical_memory

pytestmark = pytest.mark.distributed


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def warned(fn):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fn()
    return [str(one.message) for one in caught if "crosses" in str(one.message)]


@pytest.mark.parametrize(
    ("nodes", "count", "size"),
    [([0, 0, 0, 0], 1, ""), ([0, 0, 1, 1], 2, "2, the ranks of a node,"), ([0, 1, 2, 3], 4, "1")],
    ids=str,
)
def test_tensor_parallelism_across_nodes(nodes, count, size):
    def rank():
        note_nodes(nodes)
        return [
            warned(lambda: tensor_parallel(model(), make_mesh(tp=4)["tp"])),
            warned(lambda: HybridParallelTrainer(model(), {"tensor_parallel_size": 4})),
        ]

    first, *others = on_ranks(rank, 4)
    warning = (
        f"tensor parallelism over ranks 0, 1, 2, 3 crosses {count} nodes, and every layer sends its activations "
        f"between them, forward and backward: use a size of {size} and data or pipeline parallelism between nodes"
    )
    assert first == ([[warning], [warning]] if count > 1 else [[], []])
    assert others == [[[], []]] * 3


def test_tensor_parallelism_within_nodes_is_silent():
    def rank():
        note_nodes([0, 0, 1, 1])
        return warned(lambda: HybridParallelTrainer(model(), {"tensor_parallel_size": 2}))

    assert on_ranks(rank, 4) == [[]] * 4


def test_ranks_tell_each_other_their_node():
    infos = [RankInfo(host, 4, None, None) for host in ("b", "a", "b", "c")]
    agreement = decide("token", infos)
    assert agreement.nodes == (0, 1, 0, 2)
    assert not agreement.one_host
    assert decide("token", infos[::2][:1]).one_host
    assert on_ranks(lambda: nodes_of(range(2))) == [[0, 0]] * 2


@pytest.mark.parametrize(("local", "expected"), [("2", [0, 0, 1, 1]), ("3", [0] * 4), ("", [0] * 4), ("x", [0] * 4)])
def test_a_group_that_torch_made(local, expected, monkeypatch):
    def rank():
        note_nodes(())
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert dist.get_world_size() == 4
        return nodes_of(range(4))

    assert on_ranks(rank, 4, fresh=True) == [expected] * 4


def test_plans_where_the_system_does_not_tell_its_memory(monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(os, "sysconf")
    assert physical_memory() == float("inf")
    cluster = ClusterSpec.preset("cpu", 2, memory_bytes=physical_memory())
    plan = plan_parallelism(ModelStats.of(model(), torch.ones(4, 16)), cluster, batch=8)
    assert plan.options[0].fits

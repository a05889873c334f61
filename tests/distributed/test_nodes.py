"""What ranks learn of their node."""

import os

import pytest
import torch
from torch import nn

from panther.distributed import (
    ClusterSpec,
    ModelStats,
    plan_parallelism,
)
from panther.distributed.comm.handshake import RankInfo, decide
from panther.distributed.comm.mesh import physical_memory

pytestmark = pytest.mark.distributed


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def test_ranks_tell_each_other_whether_they_share_a_node():
    infos = [RankInfo(host, 4, None, None) for host in ("b", "a", "b", "c")]
    assert not decide("token", infos).one_host
    assert decide("token", infos[::2]).one_host


def test_plans_where_the_system_does_not_tell_its_memory(monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(os, "sysconf")
    assert physical_memory() == float("inf")
    cluster = ClusterSpec.preset("cpu", 2, memory_bytes=physical_memory())
    plan = plan_parallelism(ModelStats.of(model(), torch.ones(4, 16)), cluster, batch=8)
    assert plan.options[0].fits

"""Create process groups and meshes whose operations have the timeout of the default group.

A new group of torch has a timeout of 30 minutes (10 for NCCL), without regard to the timeout of ``init``. Every group
of the library is created here: ``tests/distributed/test_timeouts.py`` refuses calls elsewhere.
"""

__all__ = [
    "apply_timeout",
    "default_timeout",
    "flatten_mesh",
    "mesh_of_group",
    "new_group",
    "new_mesh",
    "new_subgroup",
    "split_axis",
]

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from panther._torch import default_timeout_set, flat_mesh, group_timeout, set_group_timeout, with_inner_axis
from panther.distributed.comm.ranks import in_process_group, is_fake, transport


def default_timeout() -> timedelta | None:
    """Return how long operations of the default group wait; None without one, or if it sends nothing."""
    if not in_process_group() or is_fake(None):
        return None
    assert dist.group.WORLD is not None
    return group_timeout(dist.group.WORLD, transport(None))


def apply_timeout(timeout_s: float) -> None:
    """Let operations of the default group, and of groups that are made later, wait no longer than ``timeout_s``."""
    if default_timeout() is not None:
        assert dist.group.WORLD is not None
        set_group_timeout(dist.group.WORLD, timedelta(seconds=timeout_s))


def new_group(ranks: Sequence[int], backend: str) -> dist.ProcessGroup:
    """Return a group of these ranks, which alone must call this."""
    return dist.new_group(list(ranks), backend=backend, timeout=default_timeout(), use_local_synchronization=True)


def new_subgroup(size: int) -> dist.ProcessGroup:
    """Return this rank's group of ``size`` consecutive ranks. Every rank must call it."""
    return dist.new_subgroups(size, timeout=default_timeout())[0]


def new_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return a mesh of all ranks with named axes. Every rank must call it."""
    with default_timeout_set(default_timeout()):
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def mesh_of_group(group: dist.ProcessGroup, device_type: str, name: str | None = None) -> DeviceMesh:
    """Return a mesh of one axis, whose group is ``group``."""
    names: dict[str, Any] = {} if name is None else {"mesh_dim_names": (name,)}
    return DeviceMesh.from_group(group, device_type, **names)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh of several axes as one of a single axis. Every rank must call it."""
    with default_timeout_set(default_timeout()):
        return flat_mesh(mesh, name)


def split_axis(mesh: DeviceMesh, names: tuple[str, str]) -> DeviceMesh:
    """Return a mesh of one axis with a second axis of size 1 within it. Every rank must call it."""
    with default_timeout_set(default_timeout()):
        return with_inner_axis(mesh, names)

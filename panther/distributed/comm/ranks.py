"""The process group of this process, its ranks, and new groups and meshes with the timeout of the default group.

A new group of torch has a timeout of 30 minutes (10 for NCCL), without regard to the timeout of ``init``. Every group
of the library is created here: ``tests/distributed/test_timeouts.py`` refuses calls elsewhere.
"""

__all__ = [
    "Group", "apply_timeout", "default_timeout", "flatten_mesh", "in_process_group", "is_fake", "mesh_of_group",
    "name_ranks", "new_group", "new_mesh", "new_subgroup", "ranks_of", "require_process_group", "split_axis",
    "transport",
]  # fmt: skip

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from panther._text import list_names
from panther._torch import default_timeout_set, flat_mesh, group_timeout, set_group_timeout, with_inner_axis
from panther.errors import DistributedError

Group = dist.ProcessGroup | None
"""None stands for all ranks."""


def in_process_group() -> bool:
    """Return whether this process has a process group. No other function asks torch for it."""
    return dist.is_initialized()


def require_process_group(group: Group = None) -> None:
    """Raise DistributedError unless a process group exists and this rank is in ``group``."""
    # torch's new_group returns NON_GROUP_MEMBER, a number, on ranks that are not in the group.
    if not isinstance(group, dist.ProcessGroup) and group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
        raise TypeError(
            f"a group must be a process group, such as mesh['dp'].get_group(), or None, not {type(group).__name__}"
        )
    if not in_process_group():
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    if dist.get_rank(group) < 0:
        raise DistributedError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may call this")


def name_ranks(ranks: list[int]) -> str:
    """Return the name of ranks in messages, such as "rank 1" and "ranks 0, 2"; at most 16 ranks are listed."""
    return f"rank{'s' * (len(ranks) != 1)} {list_names([*map(str, ranks)], 16)}"


def ranks_of(group: Group) -> list[int]:
    """Return the global ranks of the group, in its order, if this rank is in it."""
    require_process_group(group)
    return dist.get_process_group_ranks(group)


def transport(group: Group) -> torch.device:
    """Return the device on which the group exchanges small tensors: the current GPU with NCCL, else the CPU."""
    if in_process_group() and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_fake(group: Group) -> bool:
    """Return whether the group is torch's fake group, which has no other rank: the advisor measures models over it."""
    return in_process_group() and dist.get_rank(group) >= 0 and dist.get_backend(group) == "fake"


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

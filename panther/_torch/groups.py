"""Process groups, device meshes and collectives."""

__all__ = [
    "COLLECTIVE_NAMESPACES", "default_store", "default_timeout_set", "fake_group", "flat_mesh",
    "functional_collectives", "group_timeout", "local_offsets", "set_group_timeout", "with_inner_axis",
]  # fmt: skip

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of torch's collectives, in place and functional. A mode sees an operator only under its full name."""

functional_collectives = torch.ops._c10d_functional
"""Collectives that return their result, which activation checkpointing can save. The collectives of torch.distributed
are the public fallback. They write in place, so that the recomputation in the backward pass sends them again."""


def default_store() -> "dist.Store":
    """Return the store of the default process group. The public fallback is a second store on another port."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def group_timeout(group: "dist.ProcessGroup", device: torch.device) -> timedelta:
    """Return the timeout of a group's operations on a device. The public fallback is to keep it from init."""
    return group._get_backend(device).options._timeout


def set_group_timeout(group: "dist.ProcessGroup", timeout: timedelta) -> None:
    """Set the timeout of a group's operations. Torch 2.14 has a public function; before it, make another group."""
    from torch.distributed import distributed_c10d

    if hasattr(distributed_c10d, "set_timeout"):
        distributed_c10d.set_timeout(timeout, group)
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def default_timeout_set(timeout: timedelta | None) -> Iterator[None]:
    """Give this timeout to groups that are made without one, also while their ranks connect; None changes nothing.

    Neither ``init_device_mesh`` nor the methods of a mesh take a timeout. The public fallback is to make each group by
    ``new_group`` and the mesh by ``DeviceMesh.from_group``, which names groups differently on each rank.
    """
    from torch.distributed import distributed_c10d

    if timeout is None:
        yield
        return
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    for name in names:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


def flat_mesh(mesh: "DeviceMesh", name: str) -> "DeviceMesh":
    """Flatten a mesh of several axes to one axis.

    The public fallback is ``torch.distributed.new_group``, which all ranks of the world have to call.
    """
    return mesh._flatten(name)


def with_inner_axis(mesh: "DeviceMesh", names: tuple[str, str]) -> "DeviceMesh":
    """Append an inner axis of size 1 to a mesh of one axis. The public fallback is ``torch.distributed.new_group``."""
    return mesh._unflatten(0, (mesh.size(), 1), names)


def local_offsets(x: Any) -> tuple[int, ...]:
    """Return the position of this rank's shard in a DTensor, as torch.distributed.checkpoint places it.

    The public fallback is ``Shard.local_shard_size_and_offset``, which knows one mesh axis at a time.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1])


def fake_group(ranks: int, name: str) -> "dist.ProcessGroup":
    """Return a process group of ``ranks`` ranks that sends nothing, with this process as its first rank.

    Without a default group, a fake default group of one rank is made. The public ``new_group`` needs a process for
    every rank, and torch has no public fake backend.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    # Its import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    members = list(range(dist.get_rank(), dist.get_rank() + ranks))
    group, _ = distributed_c10d._new_process_group_helper(
        ranks, 0, members, "fake", FakeStore(), distributed_c10d.GroupName(name), timeout=timedelta(minutes=1)
    )
    # DeviceMesh reads the global rank of each rank of the group.
    distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(members)}
    return group

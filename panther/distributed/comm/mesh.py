"""Device meshes with named axes, chunks of a dimension along one, and the rank, node and device of this process."""

__all__ = [
    "DistributedInfo", "chunk_ranges", "chunk_sizes", "get_distributed_info", "get_rank", "get_world_size", "make_mesh",
    "physical_memory",
]  # fmt: skip

import itertools
import math
import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from panther.distributed.comm.ranks import in_process_group, new_mesh, require_process_group, transport
from panther.errors import DistributedError, ShapeError, check_size

AXES = ("replicate", "dp", "pp", "tp")
"""Axes of a mesh, the outermost first: neighbouring ranks, which share a node, are along tp."""


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process in a group, -1 outside of the group, and 0 without a process group.

    Args:
        group: Process group; None is all ranks.

    Example:
        >>> get_rank()
        0
    """
    return dist.get_rank(group) if in_process_group() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes of a group, -1 outside of the group, and 1 without a process group.

    Args:
        group: Process group; None is all ranks.

    Example:
        >>> get_world_size()
        1
    """
    return dist.get_world_size(group) if in_process_group() else 1


@dataclass(frozen=True)
class DistributedInfo:
    """Rank, world size, backend and device of a process: ``info.rank``, or ``info["rank"]``."""

    rank: int
    """Number of this process in the run."""
    world_size: int
    """Number of processes of the run."""
    local_rank: int
    """Rank among the processes of this node, which the launcher sets; 0 if it does not."""
    backend: str | None
    """None without a process group."""
    device: torch.device
    """The device of this rank: its current GPU with nccl, else the CPU."""
    host: str
    """Host name of this node."""
    available: bool
    """Whether this process is in a process group, so that it can send something."""

    def __getitem__(self, name: str) -> Any:
        """Return a field by its name; raise KeyError if no field has the name."""
        return vars(self)[name]


def get_distributed_info() -> DistributedInfo:
    """Return rank, world size, backend and device of this process, with or without a process group.

    Example:
        >>> get_distributed_info().world_size
        1
    """
    return DistributedInfo(
        rank=get_rank(),
        world_size=get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        backend=dist.get_backend() if in_process_group() else None,
        device=transport(None),
        host=socket.gethostname(),
        available=in_process_group(),
    )


def make_mesh(
    dp: int | None = None, pp: int | None = None, tp: int | None = None, replicate: int | None = None
) -> DeviceMesh:
    """Arrange all ranks on named axes. Every rank must call it.

    The mesh has the axes whose size is passed, in the order replicate, dp, pp, tp; ``mesh["tp"]`` and
    ``mesh["dp", "tp"]``, in this order, are submeshes. Uneven shards along an axis follow :func:`torch.chunk`.

    Args:
        dp: Ranks along data parallelism; all ranks if none of the four sizes is passed.
        pp: Stages of a pipeline.
        tp: Ranks that share layers.
        replicate: Replicas of the shards along dp (hybrid sharding).

    Returns:
        The mesh, on GPUs with nccl, else on CPUs.

    Raises:
        ShapeError: If the product of the axes is not the world size, or an axis is not positive. It is raised before
            anything is sent.
        DistributedError: If no process group exists.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> make_mesh(dp=1, tp=1).mesh_dim_names
        ('dp', 'tp')
        >>> pr.distributed.shutdown()
    """
    require_process_group()
    world = dist.get_world_size()
    sizes_by_axis = {"replicate": replicate, "dp": dp, "pp": pp, "tp": tp}
    sizes = {name: check_size(name, sizes_by_axis[name], least=1) for name in AXES if sizes_by_axis[name] is not None}  # type: ignore[arg-type]
    sizes = sizes or {"dp": world}
    product = math.prod(sizes.values())
    if product != world:  # torch accepts a smaller mesh; the other ranks would do nothing
        raise ShapeError(
            f"{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))}{f' = {product}' if len(sizes) > 1 else ''} "
            f"must equal the world size ({world}): {_advice(sizes, world, product)}"
        )
    return new_mesh(transport(None).type, sizes)


def chunk_sizes(size: int, n: int) -> list[int]:
    """Return the sizes of the n chunks of :func:`torch.chunk`: 3, 3, 3, 1 for 10 and 4. None may be empty."""
    step = -(-size // n) if size else 0
    sizes = [max(0, min(step, size - i * step)) for i in range(n)]
    if not all(sizes):
        raise ShapeError(f"a dimension of {size} cannot be split into {n} chunks as torch.chunk does: use fewer ranks")
    return sizes


def chunk_ranges(size: int, n: int) -> list[range]:
    """Return the ranges of the chunks of :func:`chunk_sizes`."""
    ends = list(itertools.accumulate(chunk_sizes(size, n)))
    return [range(start, end) for start, end in itertools.pairwise([0, *ends])]


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the process group of this rank along each axis of a mesh."""
    require_process_group()
    try:
        return [mesh.get_group(axis) for axis in range(mesh.ndim)]
    except RuntimeError as error:
        raise DistributedError(
            f"the mesh with the axes {mesh.mesh_dim_names} of sizes {tuple(mesh.shape)} belongs to process groups "
            "that no longer exist: make a new mesh after init"
        ) from error


def _advice(sizes: dict[str, int], world: int, product: int) -> str:
    """Return advice: a size of one axis that fits to the world size, or a world size that fits to the axes."""
    for name in sizes:
        product_of_other_axes = product // sizes[name]
        if world % product_of_other_axes == 0:
            return f"use {name}={world // product_of_other_axes}, or start {product} processes"
    return f"start {product} processes"


def physical_memory() -> float:
    """Return the bytes of memory of this node, or infinity if the system does not report it, as Windows."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")

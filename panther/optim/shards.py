"""How a sharded parameter lies: which rectangle of its matrices each rank of a group has."""

__all__ = ["Rectangle", "ShardLayout", "layout_of", "sending_device"]

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from panther._torch import local_offsets
from panther.distributed.comm.ranks import new_group, transport


@dataclass(frozen=True)
class Rectangle:
    """Rows and columns of a matrix."""

    rows: range
    columns: range

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return len(self.rows) * len(self.columns)

    @property
    def transposed(self) -> "Rectangle":
        """Return the rectangle of the transposed matrix."""
        return Rectangle(self.columns, self.rows)


@dataclass(frozen=True)
class ShardLayout:
    """The shards of matrices of one shape over the ranks of a group; the matrices are tall (m >= n)."""

    group: Any
    """The process group."""
    rank: int
    """The rank of this process in the group."""
    shape: tuple[int, int]
    """(m, n) of each matrix, after the transposition."""
    is_transposed: bool
    """Whether the parameter has the transposed matrices."""
    rectangles: tuple[Rectangle, ...]
    """The shard of each rank of the group."""
    error: str | None = None
    """The reason if this rank's shard is not its rectangle; the step raises it on every rank."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks of the group."""
        return len(self.rectangles)

    @property
    def rectangle(self) -> Rectangle:
        """Return the shard of this rank."""
        return self.rectangles[self.rank]

    @cached_property
    def has_full_rows(self) -> bool:
        """Whether every shard consists of full rows of the tall matrices."""
        return all(len(rectangle.columns) == self.shape[1] for rectangle in self.rectangles if rectangle.size)

    @cached_property
    def holder(self) -> int | None:
        """The rank that has the complete matrices, while all other ranks have nothing; None if there is none."""
        size = math.prod(self.shape)
        return next((rank for rank, rectangle in enumerate(self.rectangles) if rectangle.size == size), None)


_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups over several axes of a mesh: by the group of the first axis, and by their ranks."""


_layouts: Any = WeakTensorKeyDictionary()
"""The layouts of parameters; finding one takes a tenth of a millisecond."""


def layout_of(parameter: Tensor) -> ShardLayout | None:
    """Return how the matrices of a parameter ``(*, m, n)`` are sharded; None if this rank has complete matrices.

    The group has the ranks along those axes of the mesh that shard rows or columns. Experts, along the first of three
    dimensions, are separate matrices. If several axes shard the matrices, a process group is made in the first call,
    which all ranks of this group have to make. The layout has an error if this rank's shard is not the one of
    ``torch.chunk``, axis by axis, as FSDP2 and tensor parallelism make it.
    """
    if not isinstance(parameter, DTensor) or parameter.numel() == 0:
        return None
    if parameter not in _layouts:
        _layouts[parameter] = _find_layout(parameter)
    layout: ShardLayout | None = _layouts[parameter]
    return layout


def _find_layout(parameter: DTensor) -> ShardLayout | None:
    mesh = parameter.device_mesh
    matrix_dims = (parameter.dim() - 2, parameter.dim() - 1)
    sharded_dims = {
        axis: int(placement.dim)
        for axis, placement in enumerate(parameter.placements)
        if hasattr(placement, "dim") and mesh.size(axis) > 1
    }
    axes = [axis for axis, dim in sharded_dims.items() if dim in matrix_dims]
    if not axes:
        return None
    group = _group_of(mesh, axes)
    parts = [
        tuple(_range(parameter, dim, sharded_dims, dict(zip(axes, place, strict=True))) for dim in matrix_dims)
        for place in itertools.product(*(range(mesh.size(axis)) for axis in axes))
    ]
    rank = dist.get_rank(group)
    m, n = (parameter.shape[dim] for dim in matrix_dims)
    rectangles = tuple(Rectangle(rows, columns) for rows, columns in parts)
    if is_transposed := m < n:
        m, n, rectangles = n, m, tuple(rectangle.transposed for rectangle in rectangles)
    error = _shard_error(parameter, dict(zip(matrix_dims, parts[rank], strict=True)))
    return ShardLayout(group, rank, (m, n), is_transposed, rectangles, error)


def sending_device(group: dist.ProcessGroup, tensor: Tensor) -> torch.device:
    """Return the device from which a group sends: the GPU with NCCL, also if the tensor is offloaded to the CPU."""
    device = transport(group)
    return device if device.type == "cuda" else tensor.device


def _shard_error(parameter: DTensor, expected: dict[int, range]) -> str | None:
    """Return why this rank's shard is not at the expected indices of some dimensions; None if it is."""
    shard, offsets = parameter.to_local(), local_offsets(parameter)
    for dim, indices in expected.items():
        if shard.shape[dim] != len(indices) or (shard.numel() and offsets[dim] != indices.start):
            return (
                f"a parameter of shape {tuple(parameter.shape)} is sharded as {parameter.placements} over a mesh of "
                f"sizes {tuple(parameter.device_mesh.shape)}, and the shard of shape {tuple(shard.shape)} is not the "
                "chunk of torch.chunk: shard it by fully_shard or by tensor parallelism, or leave it to AdamW"
            )
    return None


def _range(parameter: DTensor, dim: int, sharded_dims: dict[int, int], place: dict[int, int]) -> range:
    """Return the indices along a dimension that the rank at this place of the mesh has."""
    axes = [axis for axis, sharded_dim in sharded_dims.items() if sharded_dim == dim]
    # FSDP2 shards what tensor parallelism has sharded already, although its axis comes first. The placement of this
    # axis has a split factor, the number of shards that exist before.
    axes.sort(key=lambda axis: getattr(parameter.placements[axis], "split_factor", 1) > 1)
    indices = range(parameter.shape[dim])
    for axis in axes:
        step = -(-len(indices) // parameter.device_mesh.size(axis))
        indices = indices[place[axis] * step : (place[axis] + 1) * step]
    return indices


def _group_of(mesh: DeviceMesh, axes: list[int]) -> dist.ProcessGroup:
    """Return the group of this rank along one or several axes of a mesh, in the order of the mesh."""
    first = mesh.get_group(axes[0])
    if len(axes) == 1:
        return first
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    places = tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(mesh.ndim))
    ranks = tuple(mesh.mesh[places].flatten().tolist())
    groups = _groups.setdefault(first, {})
    if ranks not in groups:
        groups[ranks] = new_group(ranks, dist.get_backend(first))
    return groups[ranks]

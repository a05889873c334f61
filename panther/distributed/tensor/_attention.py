"""Panther's attention by random features, cut by heads over the ranks of one mesh axis.

Every rank projects, attends and projects back with some of the heads, whole ones, and the outputs are summed.
"""

__all__ = ["HeadwiseRandAttention", "cannot_cut_heads", "shard_heads_"]

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from panther.distributed.comm._chunks import chunk_ranges
from panther.distributed.comm.collectives import all_reduce, sum_in_backward
from panther.distributed.sync.sketches import sync_sketches
from panther.distributed.tensor._module import ShardedModule, check_mesh, local_parameters, shard_parameter_
from panther.distributed.tensor._packed_attention import cannot_cut_packed_heads, shard_packed_heads_
from panther.distributed.tensor._record import remember_
from panther.errors import ShapeError
from panther.nn import RandMultiHeadAttention
from panther.nn._features import orthogonal_gaussian


class HeadwiseRandAttention(ShardedModule, RandMultiHeadAttention):
    """Random directions are those of the whole layer; each rank draws its heads'."""

    heads: range
    """The heads of this rank."""

    placements: ClassVar[dict[str, Placement]] = {
        **dict.fromkeys(("Wq", "Wk", "Wv", "bq", "bk", "bv"), Shard(0)), "W0": Shard(1), "b0": Replicate(),
    }  # fmt: skip

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Attend with this rank's heads, and sum."""
        bias = self.local("b0")
        # Each rank has a part of their gradients; summed once where one tensor comes several times.
        entered: dict[int, Tensor] = {}
        for x in (query, key, value):
            if id(x) not in entered:
                entered[id(x)] = sum_in_backward(x, self.tp_group)
        query, key, value = (entered[id(x)] for x in (query, key, value))
        buffers = self._buffers
        with local_parameters(self):
            self._parameters["b0"] = None
            self.__dict__["_buffers"] = buffers | {"directions": self.local("directions")}
            try:
                output, _ = super().forward(query, key, value, *args, **kwargs)
            finally:
                self.__dict__["_buffers"] = buffers
        output = all_reduce(output, group=self.tp_group)
        return (output if bias is None else output + bias.to(output.dtype)), None

    def _heads(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # (N, n, in) -> (N, H here, n, d)
        return nn.functional.linear(x, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _draw_directions(self) -> None:
        if self.directions is None:
            return
        _, rows, d = self.directions.shape
        drawn = orthogonal_gaussian(
            rows, d, heads=self.num_heads, seed=self.seed, stream=2 * self._draws, only=self.heads
        )
        with torch.no_grad():
            self.local("directions").copy_(drawn)


def shard_heads_(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut an attention by heads over the ranks of a one-dimensional mesh, in place; every rank must call it.

    Weights, and random directions, are those of the mesh's first rank.

    Raises:
        TypeError: If it is none that can be cut.
        ShapeError: If the ranks do not divide the heads, or the mesh has several dimensions.
    """
    check_mesh(mesh)
    if reason := cannot_cut_heads(module, mesh.size()):
        raise (ShapeError if "ranks" in reason else TypeError)(f"{type(module).__name__} {reason}")
    if isinstance(module, nn.MultiheadAttention):
        return shard_packed_heads_(module, mesh)
    heads = chunk_ranges(module.num_heads, mesh.size())[mesh.get_local_rank()]  # type: ignore[arg-type]
    sync_sketches(module, dist.get_process_group_ranks(mesh.get_group())[0], mesh.get_group())
    remember_(module, ("tp_mesh", "heads", "summed"))
    module.__class__ = HeadwiseRandAttention
    assert isinstance(module, HeadwiseRandAttention)
    module.tp_mesh, module.heads = mesh, heads
    for name, placement in module.placements.items():
        shard_parameter_(module, name, mesh, placement)
    if module.directions is not None:
        module.directions = distribute_tensor(module.directions, mesh, [Shard(0)])
    return module


def cannot_cut_heads(module: nn.Module, ranks: int) -> str | None:
    """Why such an attention cannot be cut over so many ranks, None if it can."""
    if type(module) not in (RandMultiHeadAttention, nn.MultiheadAttention):
        return "is no attention whose heads can be cut: name its projections"
    if module.num_heads % ranks:  # type: ignore[operator]
        return f"has {module.num_heads} heads, which {ranks} ranks do not divide"
    if isinstance(module, nn.MultiheadAttention):
        return cannot_cut_packed_heads(module)
    return "has relative positions of all heads" if module.SRPE is not None else None

r"""SKLinear cut over the ranks of one mesh axis.

Column-wise, outputs are cut: S1 and U2 are whole on every rank, S2, U1 and the bias hold this rank's outputs. Row-wise,
inputs are cut: S1 and U2 hold this rank's inputs, S2, U1 and the bias are whole. Either way what ranks exchange is
:math:`h = x [S_1 | U_2]`, 2R numbers a row: its sum forward if inputs are cut, the sum of its gradient backward if
outputs are. Factors are DTensors, so that checkpoints and gradient norms know what they are parts of; products are of
local tensors. Each rank draws its own part of the sketches.
"""

__all__ = ["ColwiseSKLinear", "RowwiseSKLinear", "ShardedSKLinear", "shard_", "unshard"]

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from panther.distributed.collectives import all_reduce, chunk_sizes, sum_in_backward
from panther.distributed.sync import sync_sketches
from panther.errors import ShapeError
from panther.nn import SKLinear
from panther.sketch import signs


class ShardedSKLinear(SKLinear):
    """What both ways of cutting share; made by :func:`shard_` from a plain layer, never constructed."""

    placements: dict[str, Placement]
    """Of every factor and sketch, and of the bias."""

    tp_mesh: DeviceMesh
    part: range
    """The outputs or inputs of this rank."""

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks that share the layer."""
        return self.tp_mesh.get_group()

    def local(self, name: str) -> Tensor:
        """This rank's part of a factor or sketch, for autograd too."""
        whole = getattr(self, name)
        return whole.to_local() if isinstance(whole, DTensor) else whole

    def set_fitted_(self, sketches: dict[str, Tensor]) -> None:
        """Make the layer fitted, with the given whole sketches, which are cut."""
        mesh = self.tp_mesh
        cut = {
            name: value if isinstance(value, DTensor) else distribute_tensor(value, mesh, [self.placements[name]])
            for name, value in sketches.items()
        }
        super().set_fitted_({name: value.redistribute(mesh, [self.placements[name]]) for name, value in cut.items()})

    def _draw_signs(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        rows, cols = (range(size) for size in self.sketch_shapes()[name])
        if isinstance(placement := self.placements[name], Shard):
            rows, cols = (self.part, cols) if placement.dim == 0 else (rows, self.part)
        stream = self.sketch_names.index(name)
        return signs(self.seed, stream, rows, cols, dtype=dtype, device=device)  # type: ignore[arg-type]

    def sketched_input(self, x: Tensor) -> Tensor:  # (*, in or this rank's part of it) -> (*, 2 R)
        """:math:`x [S_1 | s U_2]`."""
        return torch.cat((x @ self.local("S1"), x @ (self.local("U2").to(x.dtype) * self.scale)), -1)

    def expanded(self, h: Tensor) -> Tensor:  # (*, 2 R) -> (*, out or this rank's part of it)
        """:math:`h [s U_1 ; S_2] + b`."""
        h1, h2 = h.tensor_split(2, -1)
        y = h1 @ (self.local("U1").to(h1.dtype) * self.scale) + h2 @ self.local("S2")
        return y if self.bias is None else y + self.local("bias")

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense weight that follows, whole; every rank must ask."""
        return unshard(self).weight


class ColwiseSKLinear(ShardedSKLinear):
    """Outputs are cut: ``(*, in)`` to this rank's part of ``(*, out)``."""

    def forward(self, input: Tensor) -> Tensor:
        """Map the whole input to this rank's outputs."""
        return self.expanded(sum_in_backward(self.sketched_input(input), self.tp_group))


class RowwiseSKLinear(ShardedSKLinear):
    """Inputs are cut: this rank's part of ``(*, in)`` to ``(*, out)``."""

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the whole output."""
        return self.expanded(all_reduce(self.sketched_input(input), group=self.tp_group))


_REPLICATE = Replicate()
_PLACEMENTS: dict[type[ShardedSKLinear], dict[str, Placement]] = {
    ColwiseSKLinear: {"S1": _REPLICATE, "U2": _REPLICATE, "S2": Shard(1), "U1": Shard(1), "bias": Shard(0)},
    RowwiseSKLinear: {"S1": Shard(0), "U2": Shard(0), "S2": _REPLICATE, "U1": _REPLICATE, "bias": _REPLICATE},
}


def shard_(layer: SKLinear, mesh: DeviceMesh, kind: type[ShardedSKLinear]) -> ShardedSKLinear:
    """Cut a layer over the ranks of a one-dimensional mesh, in place; every rank must call it.

    Weights and sketches are those of the mesh's first rank.

    Raises:
        ShapeError: If there are fewer outputs, or inputs, than ranks, or the mesh has several dimensions.
        TypeError: If the layer is no plain SKLinear, or is cut already.
    """
    if type(layer) is not SKLinear:
        raise TypeError(f"only a plain SKLinear can be cut over ranks, not a {type(layer).__name__}")
    if mesh.ndim != 1:
        raise ShapeError(f"a layer is cut over one mesh axis, and the mesh has {mesh.mesh_dim_names}: use mesh['tp']")
    if layer.packed:
        layer.unpack_()
    group = mesh.get_group()
    size = layer.out_features if kind is ColwiseSKLinear else layer.in_features
    starts = [0, *itertools.accumulate(chunk_sizes(size, mesh.size()))]
    sync_sketches(layer, src=dist.get_process_group_ranks(group)[0], group=group)
    rank = mesh.get_local_rank()
    layer.__class__ = kind
    assert isinstance(layer, ShardedSKLinear)
    layer.tp_mesh, layer.placements = mesh, _PLACEMENTS[kind]
    layer.part = range(starts[rank], starts[rank + 1])
    for name in ("S1", "S2", "bias"):
        if (whole := layer._parameters.get(name)) is not None:
            cut = distribute_tensor(whole.detach(), mesh, [layer.placements[name]])
            layer.register_parameter(name, nn.Parameter(cut, requires_grad=whole.requires_grad))
    if layer.seed is None:
        layer.set_fitted_({name: getattr(layer, name).detach() for name in layer.sketch_names})
    else:
        layer.set_seeded_(layer.seed)
    return layer


def unshard(layer: ShardedSKLinear) -> SKLinear:
    """A plain layer with the whole factors, on every rank; every rank must call it."""

    def whole(name: str) -> Any:
        value = getattr(layer, name)
        return value.full_tensor().detach() if isinstance(value, DTensor) else value

    plain = SKLinear(
        layer.in_features, layer.out_features, layer.num_terms, layer.low_rank, bias=layer.bias is not None,
        dtype=layer.S1.dtype, device=layer.S1.device, seed=layer.seed,
    )  # fmt: skip
    if layer.seed is None:
        plain.set_fitted_({name: copy.deepcopy(whole(name)) for name in layer.sketch_names})
    with torch.no_grad():
        for name in ("S1", "S2", "bias"):
            if (parameter := plain._parameters.get(name)) is not None:
                parameter.copy_(whole(name))
    return plain.train(layer.training)

r"""SKLinear cut over the ranks of one mesh axis.

Column-wise, outputs are cut: S1 and U2 are whole on every rank, S2, U1 and the bias hold this rank's outputs. Row-wise,
inputs are cut: S1 and U2 hold this rank's inputs, S2, U1 and the bias are whole. Either way what ranks exchange is
:math:`h = x [S_1 | U_2]`, 2R numbers a row: its sum forward if inputs are cut, the sum of its gradient backward if
outputs are. Where the sequence is cut outside of the layer, h is gathered or scattered along it, and ranks sum the
gradients of the factors that see a part of the sequence. Factors are DTensors, so that checkpoints and gradient norms
know what they are parts of; products are of local tensors. Each rank draws its own part of the sketches.
"""

__all__ = ["ColwiseSKLinear", "ReplicatedSKLinear", "RowwiseSKLinear", "ShardedSKLinear", "copy_", "shard_"]

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from panther.distributed.comm._chunks import chunk_ranges
from panther.distributed.sync.sketches import sync_sketches
from panther.distributed.tensor._layouts import Layouts
from panther.distributed.tensor._module import ShardedModule, check_mesh, shard_parameter_
from panther.distributed.tensor._record import remember_
from panther.distributed.tensor._replicated import replicate_
from panther.distributed.tensor.unshard import unshard_module
from panther.nn import SKLinear
from panther.nn.functional import sketched_linear
from panther.sketch import signs


class ShardedSKLinear(ShardedModule, SKLinear):
    """What all ways of cutting share; made by :func:`shard_` from a plain layer, never constructed."""

    placements: ClassVar[Mapping[str, Placement]]
    """Of every factor and sketch, and of the bias."""

    part: range
    """The outputs or inputs of this rank."""

    layouts: Layouts

    @classmethod
    def cut_size(cls, layer: SKLinear) -> int:
        """The size that is cut."""
        raise NotImplementedError

    def set_fitted_(self, sketches: dict[str, Tensor]) -> None:
        """Make the layer fitted, with the given whole sketches, which are cut."""
        mesh = self.tp_mesh
        cut = {
            name: value if isinstance(value, DTensor) else distribute_tensor(value, mesh, [self.placements[name]])
            for name, value in sketches.items()
        }
        super().set_fitted_({name: value.redistribute(mesh, [self.placements[name]]) for name, value in cut.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the whole sketches of a fitted layer too, where this one is seeded."""
        for name, shape in self.sketch_shapes().items():
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(own, DTensor) or not isinstance(given, Tensor) or isinstance(given, DTensor):
                continue
            if given.shape == torch.Size(shape):
                cut = distribute_tensor(given.detach(), self.tp_mesh, [self.placements[name]], src_data_rank=None)
                state_dict[prefix + name] = cut
        super()._load_from_state_dict(state_dict, prefix, *args)

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
        return y if self.bias is None else y + self.local("bias").to(y.dtype)  # narrower under autocast

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense weight that follows, whole; every rank must ask."""
        return unshard_module(self).weight  # type: ignore[return-value]

    def to_linear(self) -> nn.Linear:
        """The dense layer that follows, whole; every rank must ask."""
        return unshard_module(self).to_linear()  # type: ignore[operator]


_REPLICATE = Replicate()


class ColwiseSKLinear(ShardedSKLinear):
    """Outputs are cut: ``(*, in)`` to this rank's part of ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = {
        "S1": _REPLICATE,
        "U2": _REPLICATE,
        "S2": Shard(1),
        "U1": Shard(1),
        "bias": Shard(0),
    }

    @classmethod
    def cut_size(cls, layer: SKLinear) -> int:
        """Outputs."""
        return layer.out_features

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        h = self.layouts.gather_or_sum_in_backward(self.sketched_input(self.layouts.take(input)))
        return self.layouts.give_columns(self.expanded(h), self.out_features)


class RowwiseSKLinear(ShardedSKLinear):
    """Inputs are cut: this rank's part of ``(*, in)`` to ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = {
        "S1": Shard(0),
        "U2": Shard(0),
        "S2": _REPLICATE,
        "U1": _REPLICATE,
        "bias": _REPLICATE,
    }

    @classmethod
    def cut_size(cls, layer: SKLinear) -> int:
        """Inputs."""
        return layer.in_features

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        h = self.sketched_input(self.layouts.take_columns(input, self.part))
        return self.layouts.give(self.expanded(self.layouts.scatter_or_sum(h)), h.shape)


class ReplicatedSKLinear(ShardedSKLinear):
    """Nothing is cut."""

    placements: ClassVar[Mapping[str, Placement]] = dict.fromkeys(("S1", "U2", "S2", "U1", "bias"), _REPLICATE)

    @classmethod
    def cut_size(cls, layer: SKLinear) -> int:
        """Nothing, whatever the number of ranks."""
        return 0

    def forward(self, input: Tensor) -> Tensor:
        """Map the whole input to the whole output."""
        S1, S2, U1, U2, bias = (self.local(name) for name in ("S1", "S2", "U1", "U2", "bias"))
        return sketched_linear(input, S1, U1.to(S1.dtype), S2, U2.to(S1.dtype), bias, scale=self.scale)


def shard_(
    layer: SKLinear, mesh: DeviceMesh, kind: type[ShardedSKLinear], layouts: Layouts | None = None
) -> ShardedSKLinear:
    """Cut a layer over the ranks of a one-dimensional mesh, in place; every rank must call it.

    Weights and sketches are those of the mesh's first rank.

    Raises:
        ShapeError: If there are fewer outputs, or inputs, than ranks, or the mesh has several dimensions.
        TypeError: If the layer is no plain SKLinear, or is cut already.
    """
    if type(layer) is not SKLinear:
        raise TypeError(f"only a plain SKLinear can be cut over ranks, not a {type(layer).__name__}")
    check_mesh(mesh)
    group, size = mesh.get_group(), kind.cut_size(layer)
    part = chunk_ranges(size, mesh.size())[mesh.get_local_rank()] if size else range(0)
    if layer.packed:
        layer.unpack_()
    sync_sketches(layer, src=dist.get_process_group_ranks(group)[0], group=group)
    remember_(layer, ("tp_mesh", "part", "layouts", "summed"))
    layer.__class__ = kind
    assert isinstance(layer, ShardedSKLinear)
    layer.tp_mesh, layer.part = mesh, part
    layer.layouts = layouts or Layouts(mesh)
    if kind is ColwiseSKLinear and layer.layouts.input_dim is not None:
        layer.summed = ("S1", "U2") if layer.is_fitted else ("S1",)
    elif kind is RowwiseSKLinear and layer.layouts.output_dim is not None:
        layer.summed = ("S2", "bias", "U1") if layer.is_fitted else ("S2", "bias")
    for name in ("S1", "S2", "bias"):
        shard_parameter_(layer, name, mesh, layer.placements[name])
    if layer.seed is None:
        layer.set_fitted_({name: getattr(layer, name).detach() for name in layer.sketch_names})
    else:
        layer.set_seeded_(layer.seed)
    return layer


def copy_(module: nn.Module, mesh: DeviceMesh, summed: bool = False) -> str:
    """Put a module's own parameters on the mesh, whole on every rank; see :func:`replicate_`."""
    if type(module) is SKLinear:
        shard_(module, mesh, ReplicatedSKLinear)
        return "computed whole by every rank"
    return replicate_(module, mesh, summed)

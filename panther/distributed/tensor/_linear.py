r"""Linear layers and embeddings sharded over the ranks of one mesh axis, unevenly too, as :func:`torch.chunk` splits.

Column-wise, outputs are sharded; row-wise, inputs. Of an SKLinear, S1 and U2 are replicated and S2, U1 and the bias
hold this rank's outputs; row-wise, S1 and U2 hold this rank's inputs and the others are replicated. Either way ranks
exchange :math:`h = x [S_1 | U_2]` only, 2R numbers a row: its sum in the forward of a row-wise layer, the sum of its
gradient in the backward of a column-wise one (M. Shoeybi et al., 2019, arXiv:1909.08053, do so with dense layers).
Where the sequence is sharded outside of the layer, h is gathered or scattered along it, and ranks sum the gradients of
the factors that see only a part of the sequence.

Parameters are DTensors, so that checkpoints and gradient norms know the full tensors; products use local tensors.
"""

__all__ = [
    "ColwiseLinear",
    "ColwiseSKLinear",
    "ReplicatedSKLinear",
    "RowwiseLinear",
    "RowwiseSKLinear",
    "ShardedLayer",
    "VocabularyEmbedding",
    "shard_layer_",
]

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from panther.distributed.comm.mesh import chunk_ranges
from panther.distributed.tensor._layouts import Layouts
from panther.distributed.tensor._module import ShardedModule, check_mesh, distribute, no_view, shard_parameter_
from panther.distributed.tensor.unshard import remember_, unshard_module
from panther.nn import SKLinear
from panther.nn._sketched import keep_own_forward
from panther.nn.functional import sketched_linear
from panther.sketch import signs

_REPLICATE = Replicate()


class ShardedLayer(ShardedModule):
    """Base of all layers here. :func:`shard_layer_` makes them from plain layers; they are never constructed."""

    placements: ClassVar[Mapping[str, Placement]]
    """Of every parameter and sketch."""
    size_name: ClassVar[str | None]
    """The attribute with the size that is sharded; None if none is."""
    local_range: range
    """This rank's outputs, inputs or rows."""
    layouts: Layouts

    def parameters_to_sum(self) -> tuple[str, ...]:
        """Return the parameters whose gradient each rank computes a part of, because the sequence is sharded."""
        return ()


class ColwiseLinear(ShardedLayer, nn.Linear):
    """A dense layer whose outputs are sharded."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}
    action = "outputs sharded"
    size_name = "out_features"

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        x = self.layouts.gather_or_sum_in_backward(self.layouts.take(input))
        y = no_view(F.linear(x, self.local("weight"), self.local("bias")))
        return self.layouts.give_columns(y, self.out_features)


class RowwiseLinear(ShardedLayer, nn.Linear):
    """A dense layer whose inputs are sharded."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1), "bias": _REPLICATE}
    action = "inputs sharded"
    size_name = "in_features"

    def parameters_to_sum(self) -> tuple[str, ...]:
        """Return the bias if the output's sequence is sharded: it is then added on a part of the rows."""
        return () if self.layouts.output_dim is None else ("bias",)

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        partial = F.linear(self.layouts.take_columns(input, self.local_range), self.local("weight"))
        y = self.layouts.scatter_or_sum(partial)
        return self.layouts.give(y if self.bias is None else y + self.local("bias").to(y.dtype), partial.shape)


class VocabularyEmbedding(ShardedLayer, nn.Embedding):
    """An embedding whose rows are sharded: a rank's output is zero for the indices of others, before the sum."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0)}
    action = "rows sharded"
    size_name = "num_embeddings"

    def forward(self, input: Tensor) -> Tensor:
        """Map indices to vectors."""
        input = self.layouts.take_indices(input)
        # An index that no rank has stays as it is, so that the lookup fails on every rank.
        elsewhere = (input >= 0) & (input < self.local_range.start)
        # Computed without branches on values, which would synchronise with the device.
        elsewhere |= (input >= self.local_range.stop) & (input < self.num_embeddings)
        rows = (input - self.local_range.start).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        partial = F.embedding(rows, self.local("weight")).masked_fill(elsewhere[..., None], 0)
        if padding is not None and padding in self.local_range:  # its row gets no gradient
            partial = partial.where((input != padding)[..., None], partial.detach())
        return self.layouts.give(self.layouts.scatter_or_sum(partial), partial.shape)


class ShardedSKLinear(ShardedLayer, SKLinear):
    """Base of the sketched layers. A rank draws only its shard of the sketches."""

    def set_fitted_(self, sketches: dict[str, Tensor]) -> None:
        """Make the layer fitted, with the given full sketches, equal on every rank, which are sharded."""
        mesh, sharded = self.tp_mesh, dict[str, Tensor]()
        for name, value in sketches.items():
            if isinstance(value, DTensor):
                sharded[name] = value.redistribute(mesh, [self.placements[name]])
            else:
                sharded[name] = distribute(value, mesh, self.placements[name])
        super().set_fitted_(sharded)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, also the full sketches of a fitted layer into a seeded one, whose own are not DTensors."""
        for name, shape in self.sketch_shapes().items():
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(own, DTensor) or not isinstance(given, Tensor) or isinstance(given, DTensor):
                continue
            if given.shape == torch.Size(shape):
                state_dict[prefix + name] = distribute(given, self.tp_mesh, self.placements[name])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _draw_signs(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        rows, cols = (range(size) for size in self.sketch_shapes()[name])
        if isinstance(placement := self.placements[name], Shard):
            rows, cols = (self.local_range, cols) if placement.dim == 0 else (rows, self.local_range)
        stream = self.sketch_names.index(name)
        return signs(self.seed, stream, rows, cols, dtype=dtype, device=device)  # type: ignore[arg-type]

    # Four products of local tensors, not the kernels of panther.kernels: those fuse both halves of the layer, and the
    # collective has to run between them.
    def sketched_input(self, x: Tensor) -> Tensor:  # (*, in or this rank's inputs) -> (*, 2 R)
        """Return :math:`x [S_1 | s U_2]`."""
        return torch.cat((x @ self.local("S1"), x @ (self.local("U2").to(x.dtype) * self.scale)), -1)

    def expanded(self, h: Tensor) -> Tensor:  # (*, 2 R) -> (*, out or this rank's outputs)
        """Return :math:`h [s U_1 ; S_2] + b`."""
        h1, h2 = h.tensor_split(2, -1)
        y = h1 @ (self.local("U1").to(h1.dtype) * self.scale) + h2 @ self.local("S2")
        return y if self.bias is None else y + self.local("bias").to(y.dtype)  # narrower under autocast

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The dense weight, full; every rank must ask for it."""
        return unshard_module(self).weight  # type: ignore[return-value]

    def to_linear(self) -> nn.Linear:
        """Return the dense layer, full; every rank must call it."""
        return unshard_module(self).to_linear()  # type: ignore[operator]


class ColwiseSKLinear(ShardedSKLinear):
    """A sketched layer whose outputs are sharded: ``(*, in)`` to this rank's part of ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = {
        "S1": _REPLICATE, "U2": _REPLICATE, "S2": Shard(1), "U1": Shard(1), "bias": Shard(0),
    }  # fmt: skip
    action = "outputs sharded"
    size_name = "out_features"

    def parameters_to_sum(self) -> tuple[str, ...]:
        """Return the factors that see a part of the sequence."""
        if self.layouts.input_dim is None:
            return ()
        return ("S1", "U2") if self.is_fitted else ("S1",)

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        h = self.layouts.gather_or_sum_in_backward(self.sketched_input(self.layouts.take(input)))
        return self.layouts.give_columns(self.expanded(h), self.out_features)


class RowwiseSKLinear(ShardedSKLinear):
    """A sketched layer whose inputs are sharded: this rank's part of ``(*, in)`` to ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = {
        "S1": Shard(0), "U2": Shard(0), "S2": _REPLICATE, "U1": _REPLICATE, "bias": _REPLICATE,
    }  # fmt: skip
    action = "inputs sharded"
    size_name = "in_features"

    def parameters_to_sum(self) -> tuple[str, ...]:
        """Return the factors that see a part of the sequence."""
        if self.layouts.output_dim is None:
            return ()
        return ("S2", "bias", "U1") if self.is_fitted else ("S2", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        h = self.sketched_input(self.layouts.take_columns(input, self.local_range))
        return self.layouts.give(self.expanded(self.layouts.scatter_or_sum(h)), h.shape)


class ReplicatedSKLinear(ShardedSKLinear):
    """A sketched layer whose factors are all replicated."""

    placements: ClassVar[Mapping[str, Placement]] = dict.fromkeys(("S1", "U2", "S2", "U1", "bias"), _REPLICATE)
    size_name = None

    def forward(self, input: Tensor) -> Tensor:
        """Map the full input to the full output."""
        S1, S2, U1, U2, bias = (self.local(name) for name in ("S1", "S2", "U1", "U2", "bias"))
        return no_view(sketched_linear(input, S1, U1.to(S1.dtype), S2, U2.to(S1.dtype), bias, scale=self.scale))


def shard_layer_(
    layer: nn.Module, mesh: DeviceMesh, kind: type[ShardedLayer], layouts: Layouts | None = None
) -> ShardedLayer:
    """Shard a layer that is equal on all ranks of a one-dimensional mesh, in place; nothing is sent.

    Raises:
        ShapeError: If there are fewer outputs, inputs or rows than ranks, or the mesh has several dimensions.
        TypeError: If the layer is not a plain SKLinear, nn.Linear or nn.Embedding, for example sharded already.
    """
    if type(layer) not in (SKLinear, nn.Linear, nn.Embedding):
        raise TypeError(f"only a plain SKLinear, Linear or Embedding can be sharded, not a {type(layer).__name__}")
    check_mesh(mesh)
    size = None if kind.size_name is None else getattr(layer, kind.size_name)
    local_range = range(0) if size is None else chunk_ranges(size, mesh.size())[mesh.get_local_rank()]
    if isinstance(layer, SKLinear) and layer.packed:
        layer.unpack_()  # packed signs cannot be sharded at every column
    seed = layer.seed if isinstance(layer, SKLinear) else None
    remember_(layer, ("tp_mesh", "local_range", "layouts", "summed"))
    # In place: the layer stays the same object for its parents, its hooks and whoever else holds it.
    layer.__class__ = kind
    assert isinstance(layer, ShardedLayer)
    layer.tp_mesh, layer.local_range, layer.layouts = mesh, local_range, layouts or Layouts(mesh)
    layer.summed = layer.parameters_to_sum()
    for name in tuple(layer._parameters):
        if not (isinstance(layer, SKLinear) and name in layer.sketch_names):
            shard_parameter_(layer, name, mesh, layer.placements[name])
    if not isinstance(layer, SKLinear):
        layer.register_forward_pre_hook(keep_own_forward)  # an SKLinear has one already
    elif seed is None:
        layer.set_fitted_({name: getattr(layer, name).detach() for name in layer.sketch_names})
    else:
        layer.set_seeded_(seed)
    return layer

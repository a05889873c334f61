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
    "RowwiseLinear",
    "RowwiseSKLinear",
    "ShardedLayer",
    "VocabularyEmbedding",
    "shard_layer_",
]

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from panther.distributed.comm.mesh import chunk_ranges
from panther.distributed.tensor._layouts import Layouts
from panther.distributed.tensor._module import (
    ShardedModule,
    ShardedSketchedModule,
    become_,
    no_view,
    shard_parameter_,
)
from panther.nn import SKLinear
from panther.sketch import signs


class ShardedLayer(ShardedModule):
    """Base of all layers here. :func:`shard_layer_` makes them from plain layers; they are never constructed."""

    size_name: ClassVar[str]
    """The attribute with the size that is sharded."""
    local_range: range
    """This rank's outputs, inputs or rows."""
    layouts: Layouts
    seen_in_parts: ClassVar[tuple[str, ...]] = ()
    """Replicated parameters whose gradients are summed if a dimension before the features is sharded outside of the
    layer: each rank uses them for a part of the sequence."""


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

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1)}
    action = "inputs sharded"
    size_name = "in_features"
    seen_in_parts = ("bias",)

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
        input = self.layouts.take(input)
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


class ShardedSKLinear(ShardedLayer, ShardedSketchedModule, SKLinear):
    """Base of the sketched layers. A rank draws only its shard of the sketches."""

    def _draw_signs(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        rows, cols = (range(size) for size in self.sketch_shapes()[name])
        if isinstance(placement := self.placement(name), Shard):
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


class ColwiseSKLinear(ShardedSKLinear):
    """A sketched layer whose outputs are sharded: ``(*, in)`` to this rank's part of ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = {"S2": Shard(1), "U1": Shard(1), "bias": Shard(0)}
    action = "outputs sharded"
    size_name = "out_features"
    seen_in_parts = ("S1", "U2")

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        h = self.layouts.gather_or_sum_in_backward(self.sketched_input(self.layouts.take(input)))
        return self.layouts.give_columns(self.expanded(h), self.out_features)


class RowwiseSKLinear(ShardedSKLinear):
    """A sketched layer whose inputs are sharded: this rank's part of ``(*, in)`` to ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = {"S1": Shard(0), "U2": Shard(0)}
    action = "inputs sharded"
    size_name = "in_features"
    seen_in_parts = ("S2", "U1", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        h = self.sketched_input(self.layouts.take_columns(input, self.local_range))
        return self.layouts.give(self.expanded(self.layouts.scatter_or_sum(h)), h.shape)


def shard_layer_(
    layer: nn.Module, mesh: DeviceMesh, kind: type[ShardedLayer], layouts: Layouts | None = None
) -> ShardedLayer:
    """Shard a plain SKLinear, nn.Linear or nn.Embedding that is equal on all ranks, in place; nothing is sent."""
    local_range = chunk_ranges(getattr(layer, kind.size_name), mesh.size())[mesh.get_local_rank()]
    if isinstance(layer, SKLinear) and layer.packed:
        layer.unpack_()  # packed signs cannot be sharded at every column
    layouts = layouts or Layouts(mesh)
    summed = kind.seen_in_parts if (layouts.input_dim, layouts.output_dim) != (None, None) else ()
    become_(layer, kind, mesh, local_range=local_range, layouts=layouts, summed=summed)
    sketches = layer.sketch_names if isinstance(layer, SKLinear) else ()
    for name in tuple(layer._parameters):
        if name not in sketches:
            shard_parameter_(layer, name, mesh, kind.placement(name))
    if isinstance(layer, SKLinear):
        if layer.seed is None:
            layer.set_fitted_({name: getattr(layer, name).detach() for name in sketches})
        else:
            layer.set_seeded_(layer.seed)
    return layer  # type: ignore[return-value]

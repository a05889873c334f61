"""Dense layers cut over the ranks of one mesh axis, as :func:`torch.chunk` cuts: unevenly too, unlike torch's styles.

Parameters are DTensors, products are of local tensors, as in :mod:`panther.distributed.tensor._sk_linear`.
"""

__all__ = ["ColwiseLinear", "RowwiseLinear", "VocabularyEmbedding", "shard_dense_"]

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from panther.distributed.comm._chunks import chunk_ranges
from panther.distributed.tensor._layouts import Layouts
from panther.distributed.tensor._module import ShardedModule, check_mesh, no_view, shard_parameter_
from panther.distributed.tensor._record import remember_
from panther.nn._sketched import keep_own_forward


class _ShardedLayer(ShardedModule):
    placements: ClassVar[Mapping[str, Placement]]
    part: range
    """The outputs, inputs or rows of this rank."""

    layouts: Layouts
    size_name: str


class ColwiseLinear(_ShardedLayer, nn.Linear):
    """Outputs are cut."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}
    size_name = "out_features"

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        x = self.layouts.gather_or_sum_in_backward(self.layouts.take(input))
        y = no_view(F.linear(x, self.local("weight"), self.local("bias")))
        return self.layouts.give_columns(y, self.out_features)


class RowwiseLinear(_ShardedLayer, nn.Linear):
    """Inputs are cut."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1), "bias": Replicate()}
    size_name = "in_features"

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        partial = F.linear(self.layouts.take_columns(input, self.part), self.local("weight"))
        y = self.layouts.scatter_or_sum(partial)
        return self.layouts.give(y if self.bias is None else y + self.local("bias").to(y.dtype), partial.shape)


class VocabularyEmbedding(_ShardedLayer, nn.Embedding):
    """Rows of the table are cut: each rank looks up those it has, and the rest of its output is zero before the sum."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0)}
    size_name = "num_embeddings"

    def forward(self, input: Tensor) -> Tensor:
        """Map indices to vectors."""
        input = self.layouts.take_indices(input)
        # What is in no rank's part is left to fail on every rank.
        elsewhere = (input >= 0) & (input < self.part.start)
        elsewhere |= (input >= self.part.stop) & (input < self.num_embeddings)
        rows = (input - self.part.start).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        partial = F.embedding(rows, self.local("weight")).masked_fill(elsewhere[..., None], 0)
        if padding is not None and padding in self.part:  # no gradient for its row
            partial = partial.where((input != padding)[..., None], partial.detach())
        return self.layouts.give(self.layouts.scatter_or_sum(partial), partial.shape)


def shard_dense_(
    layer: nn.Module, mesh: DeviceMesh, kind: type[_ShardedLayer], layouts: Layouts | None = None
) -> nn.Module:
    """Cut a layer over the ranks of a one-dimensional mesh, in place; every rank must call it.

    Weights are those of the mesh's first rank.

    Raises:
        ShapeError: If there are fewer outputs, inputs or rows than ranks, or the mesh has several dimensions.
    """
    check_mesh(mesh)
    part = chunk_ranges(getattr(layer, kind.size_name), mesh.size())[mesh.get_local_rank()]
    remember_(layer, ("tp_mesh", "part", "layouts", "summed"))
    layer.__class__ = kind
    assert isinstance(layer, _ShardedLayer)
    layer.tp_mesh, layer.part, layer.layouts = mesh, part, layouts or Layouts(mesh)
    if kind is RowwiseLinear and layer.layouts.output_dim is not None:
        layer.summed = ("bias",)
    for name, placement in kind.placements.items():
        shard_parameter_(layer, name, mesh, placement)
    layer.register_forward_pre_hook(keep_own_forward)
    return layer

r"""Linear layers and embeddings sharded over the ranks of one mesh axis, unevenly too, as :func:`torch.chunk` splits.

A column-wise layer shards its outputs, and a row-wise layer its inputs. A column-wise SKLinear replicates S1 and U2,
and shards S2, U1 and the bias along the outputs. A row-wise SKLinear shards S1 and U2 along the inputs, and replicates
the remaining tensors. In both cases ranks exchange only :math:`h = x [S_1 | U_2]`, which has 2R numbers per row: a
row-wise layer sums h in its forward, and a column-wise layer sums the gradient of h in its backward (M. Shoeybi et al.,
2019, arXiv:1909.08053, use the same scheme with dense layers). A LowRankLinear is sharded alike, with
:math:`h = x A`. If the sequence is sharded outside of the layer, h is
gathered or scattered along it, and ranks sum the gradients of the factors that are applied to a part of the sequence
only.

Parameters are DTensors, so that checkpoints and gradient norms see the full tensors; products use local tensors.
"""

__all__ = [
    "ColwiseLinear",
    "ColwiseLowRankLinear",
    "ColwiseSKLinear",
    "RowwiseLinear",
    "RowwiseLowRankLinear",
    "RowwiseSKLinear",
    "ShardedLayer",
    "VocabularyEmbedding",
    "shard_layer_",
]

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from panther._torch import parameters_of
from panther.distributed.comm.collectives import on_first_rank
from panther.distributed.comm.mesh import chunk_ranges
from panther.distributed.tensor._layouts import Layouts
from panther.distributed.tensor._module import (
    ShardedModule,
    ShardedSketchedModule,
    become_,
    flattened,
    local_shards,
    shard_parameter_,
    unflattened,
)
from panther.distributed.tensor._shared_input import SharedInput
from panther.kernels import sketched_inner, sketched_outer
from panther.kernels.ops.library import autocast
from panther.nn import LowRankLinear, SKLinear
from panther.nn.protocol import CompressedModule
from panther.sketch import signs


def shards(kind: type[CompressedModule], dim: int) -> dict[str, Placement]:
    """Return the placements of a layer's tensors if its weight is sharded along a dimension."""
    return {name: Shard(tensor_dim) for name, tensor_dim in kind.sharded_dims[dim].items()}


class ShardedLayer(ShardedModule):
    """Base of all sharded layers. :func:`shard_layer_` makes them from plain layers; they are never constructed."""

    size_name: ClassVar[str]
    """The attribute with the size that is sharded."""
    local_range: range
    """This rank's outputs, inputs or rows."""
    layouts: Layouts
    seen_in_parts: ClassVar[tuple[str, ...]] = ()
    """Replicated parameters whose gradients are summed if a dimension before the features is sharded outside of the
    layer, because each rank then uses them for a part of the sequence."""


class ColwiseLayer(ShardedLayer):
    """Base of the layers whose outputs are sharded; layers with the same input can share its collective."""

    shared_input: SharedInput | None = None

    def first_product(self, input: Tensor) -> Tensor:
        """Return the result of the first product and the collective, which layers with the same input share."""
        shared = self.shared_input
        return self.shared_forward([self], input)[0] if shared is None else shared.enter(self, input)

    def can_share_with(self, other: Any) -> bool:
        """Return whether :meth:`shared_forward` can compute the first product of another layer too."""
        return type(other) is type(self) and self.layouts.takes_same_input(other.layouts)

    def shared_forward(self, layers: Sequence[Self], input: Tensor) -> list[Tensor]:
        """Compute the first product of all ``layers`` (self included) in one call and one collective."""
        raise NotImplementedError


class ColwiseLinear(ColwiseLayer, nn.Linear):
    """A dense layer whose outputs are sharded."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}
    action = "outputs sharded"
    size_name = "out_features"

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        x = self.first_product(input)
        y = unflattened(F.linear(flattened(x), *self.locals("weight", "bias")), x)
        return self.layouts.give_columns(y, self.out_features)

    def shared_forward(self, layers: Sequence[Self], input: Tensor) -> list[Tensor]:
        """Return the input for each layer; its gradient is summed over the ranks once for all layers."""
        return [self.layouts.gather_or_sum_in_backward(self.layouts.take(input))] * len(layers)


class RowwiseLinear(ShardedLayer, nn.Linear):
    """A dense layer whose inputs are sharded."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1)}
    action = "inputs sharded"
    size_name = "in_features"

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        x, weight, bias = self.layouts.take_columns(input, self.local_range), *self.locals("weight", "bias")
        if bias is not None and self.layouts.output_dim is not None:
            # The bias is added on the first rank, before the sum. Backward gathers the gradient of the entire sequence
            # there, which the bias needs. If each rank added it to its part of the sequence, its gradient would need
            # another sum.
            partial, bias = F.linear(x, weight, on_first_rank(bias, self.layouts.group)), None
        else:
            partial = F.linear(x, weight)
        y = self.layouts.scatter_or_sum(partial)
        return self.layouts.give(y if bias is None else y + bias.to(y.dtype), partial.shape)


class VocabularyEmbedding(ShardedLayer, nn.Embedding):
    """An embedding whose rows are sharded: before the sum, a rank's output is zero for indices of other ranks."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0)}
    action = "rows sharded"
    size_name = "num_embeddings"

    def forward(self, input: Tensor) -> Tensor:
        """Map indices to vectors."""
        input = self.layouts.take(input)
        # An index that no rank has is not changed, so that the lookup fails on every rank.
        elsewhere = (input >= 0) & (input < self.local_range.start)
        # There are no branches on values, because they would synchronise with the device.
        elsewhere |= (input >= self.local_range.stop) & (input < self.num_embeddings)
        rows = (input - self.local_range.start).masked_fill(elsewhere, 0)
        padding = self.padding_idx
        partial = F.embedding(rows, self.local("weight")).masked_fill(elsewhere[..., None], 0)
        if padding is not None and padding in self.local_range:  # the row of the padding index gets no gradient
            partial = partial.where((input != padding)[..., None], partial.detach())
        return self.layouts.give(self.layouts.scatter_or_sum(partial), partial.shape)


class ShardedSKLinear(ShardedLayer, ShardedSketchedModule, SKLinear):
    """Base of the sharded sketched layers. A rank draws only its shard of the sketches."""

    def _draw_signs(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        rows, cols = (range(size) for size in self.sketch_shapes()[name])
        if isinstance(placement := self.placement(name), Shard):
            rows, cols = (self.local_range, cols) if placement.dim == 0 else (rows, self.local_range)
        stream = self.sketch_names.index(name)
        return signs(self.seed, stream, rows, cols, dtype=dtype, device=device)  # type: ignore[arg-type]

    def expanded(self, h: Tensor) -> Tensor:  # (*, 2 R) -> (*, out or this rank's outputs)
        """Return :math:`h [U_1 ; S_2] + b`, by the kernels of the unsharded layer."""
        S2, U1, bias = self.locals("S2", "U1", "bias")
        h, S2, U1, bias = autocast(h.device, h, S2, U1.to(S2.dtype), bias)
        bias = bias if bias is None else bias.to(h.dtype)
        return unflattened(sketched_outer(flattened(h), U1, S2, bias), h)


def sketched_inputs(
    layers: Sequence[ShardedSKLinear], x: Tensor
) -> Tensor:  # (*, inputs of this rank) -> (*, sum of 2R)
    r"""Return :math:`s x [S_1 | S_1' | \dots | U_2 | U_2' | \dots]` of layers with one input, as one product."""
    S1s, U2s = zip(*local_shards(layers, "S1", "U2"), strict=True)
    x, *factors = autocast(x.device, x, *S1s, *(U2.to(S1.dtype) for S1, U2 in zip(S1s, U2s, strict=True)))
    h = sketched_inner(flattened(x), factors[: len(layers)], factors[len(layers) :], layers[0].scale)
    return unflattened(h, x)


class ColwiseSKLinear(ColwiseLayer, ShardedSKLinear):
    """A sketched layer whose outputs are sharded: ``(*, in)`` to this rank's part of ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(SKLinear, 0)
    action = "outputs sharded"
    size_name = "out_features"
    seen_in_parts = ("S1", "U2")

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        return self.layouts.give_columns(self.expanded(self.first_product(input)), self.out_features)

    def can_share_with(self, other: Any) -> bool:
        """Return whether :meth:`shared_forward` can compute the first product of another layer too."""
        if not super().can_share_with(other) or other.scale != self.scale or other.summed != self.summed:
            return False
        # FSDP may have sharded the factors of one layer further, and gathers them only when this layer is called.
        factors, other_factors = ((layer.S1, layer.U2) for layer in (self, other))
        return all(_placed_alike(a, b) for a, b in zip(factors, other_factors, strict=True))

    def shared_forward(self, layers: Sequence[Self], input: Tensor) -> list[Tensor]:
        """Return the 2R numbers per row of each layer, from one product and one collective."""
        h = self.layouts.gather_or_sum_in_backward(sketched_inputs(layers, self.layouts.take(input)))
        if len(layers) == 1:
            return [h]
        ranks = [layer.S1.shape[1] for layer in layers]
        parts = h.split(ranks * 2, -1)
        return [torch.cat(pair, -1) for pair in zip(parts[: len(ranks)], parts[len(ranks) :], strict=True)]


class RowwiseSKLinear(ShardedSKLinear):
    """A sketched layer whose inputs are sharded: this rank's part of ``(*, in)`` to ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(SKLinear, 1)
    action = "inputs sharded"
    size_name = "in_features"
    seen_in_parts = ("S2", "U1", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        h = sketched_inputs([self], self.layouts.take_columns(input, self.local_range))
        return self.layouts.give(self.expanded(self.layouts.scatter_or_sum(h)), h.shape)


class ColwiseLowRankLinear(ColwiseLayer, LowRankLinear):
    """A low-rank layer whose outputs are sharded: ``(*, in)`` to this rank's part of ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(LowRankLinear, 0)
    action = "outputs sharded"
    size_name = "out_features"
    seen_in_parts = ("down",)

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        h, (up, bias) = self.first_product(input), self.locals("up", "bias")
        return self.layouts.give_columns(unflattened(F.linear(flattened(h), up.mT, bias), h), self.out_features)

    def can_share_with(self, other: Any) -> bool:
        """Return whether :meth:`shared_forward` can compute the first product of another layer too."""
        return super().can_share_with(other) and other.summed == self.summed and _placed_alike(self.down, other.down)

    def shared_forward(self, layers: Sequence[Self], input: Tensor) -> list[Tensor]:
        """Return the inner numbers of each layer, from one product and one collective."""
        x, downs = self.layouts.take(input), [down for (down,) in local_shards(layers, "down")]
        h = F.linear(flattened(x), (downs[0] if len(downs) == 1 else torch.cat(downs, 1)).mT)
        h = self.layouts.gather_or_sum_in_backward(unflattened(h, x))
        return [h] if len(layers) == 1 else list(h.split([layer.rank for layer in layers], -1))


class RowwiseLowRankLinear(ShardedLayer, LowRankLinear):
    """A low-rank layer whose inputs are sharded: this rank's part of ``(*, in)`` to ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(LowRankLinear, 1)
    action = "inputs sharded"
    size_name = "in_features"
    seen_in_parts = ("up", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        x = self.layouts.take_columns(input, self.local_range)
        partial = unflattened(F.linear(flattened(x), self.local("down").mT), x)
        h, (up, bias) = self.layouts.scatter_or_sum(partial), self.locals("up", "bias")
        return self.layouts.give(unflattened(F.linear(flattened(h), up.mT, bias), h), partial.shape)


def _placed_alike(a: Tensor, b: Tensor) -> bool:
    placed = [(x.device_mesh, x.placements) if isinstance(x, DTensor) else None for x in (a, b)]
    return placed[0] == placed[1] and a.dtype is b.dtype and len(a) == len(b) and a.device == b.device


def shard_layer_(
    layer: nn.Module, mesh: DeviceMesh, kind: type[ShardedLayer], layouts: Layouts | None = None
) -> ShardedLayer:
    """Shard a plain layer that is equal on all ranks, in place; nothing is sent."""
    local_range = chunk_ranges(getattr(layer, kind.size_name), mesh.size())[mesh.get_local_rank()]
    if getattr(layer, "packed", False):
        layer.unpack_()  # type: ignore[operator]  # Packed signs cannot be sharded at every column.
    layouts = layouts or Layouts(mesh)
    summed = kind.seen_in_parts if (layouts.input_dim, layouts.output_dim) != (None, None) else ()
    become_(layer, kind, mesh, local_range=local_range, layouts=layouts, summed=summed)
    sketches: tuple[str, ...] = getattr(layer, "sketch_names", ())
    for name in tuple(parameters_of(layer)):
        if name not in sketches:
            shard_parameter_(layer, name, mesh, kind.placement(name))
    if isinstance(layer, ShardedSketchedModule):
        if layer.seed is None:
            layer.set_fitted_({name: getattr(layer, name).detach() for name in sketches})
        else:
            layer.set_seeded_(layer.seed)
    return layer  # type: ignore[return-value]

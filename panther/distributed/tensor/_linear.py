r"""Linear layers and embeddings sharded over the ranks of one mesh axis, unevenly too, as :func:`torch.chunk` splits.

A column-wise layer shards its outputs, and a row-wise layer its inputs. A column-wise SKLinear replicates S1 and U2,
and shards S2, U1 and the bias along the outputs. A row-wise SKLinear shards S1 and U2 along the inputs, and replicates
the remaining tensors. In both cases ranks exchange only :math:`h = x [S_1 | U_2]`, which has 2R numbers per row: a
row-wise layer sums h in its forward, and a column-wise layer sums the gradient of h in its backward (M. Shoeybi et al.,
2019, arXiv:1909.08053, use the same scheme with dense layers). A LowRankLinear is sharded alike, with
:math:`h = x A`. A MonarchLinear has more numbers between its products than inputs or outputs, so that ranks exchange
what they do for a dense layer: a row-wise layer has some of the blocks of inputs and sums the outputs in its forward,
and a column-wise layer has some of the outputs of each block, replicates ``down``, and sums the gradients of its input
and of ``down`` in its backward. If the sequence is sharded outside of the layer, h is
gathered or scattered along it, and ranks sum the gradients of the factors that are applied to a part of the sequence
only.

Parameters are DTensors, so that checkpoints and gradient norms see the full tensors; products use local tensors.
"""

__all__ = [
    "Colwise", "ColwiseLinear", "ColwiseLowRankLinear", "ColwiseMonarchLinear", "ColwiseSKLinear", "Layouts", "Rowwise",
    "RowwiseLinear", "RowwiseLowRankLinear", "RowwiseMonarchLinear", "RowwiseSKLinear", "ShardedLayer", "SharedInput",
    "VocabularyEmbedding", "shard_layer_", "share_input_",
]  # fmt: skip

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from panther._torch import parameters_of, version_of
from panther.distributed.comm.collectives import all_gather, all_reduce, on_first_rank, reduce_scatter, sum_in_backward
from panther.distributed.comm.mesh import chunk_ranges
from panther.distributed.tensor._module import (
    FullWeightOnDemand,
    ShardedModule,
    ShardedSketchedModule,
    become_,
    flattened,
    shard_parameter_,
    unflattened,
)
from panther.distributed.tensor.unshard import remember_
from panther.errors import ShapeError
from panther.kernels import sketched_inner, sketched_outer
from panther.kernels.ops.library import autocast
from panther.nn import LowRankLinear, MonarchLinear, SKLinear
from panther.nn.monarch import monarch_product
from panther.nn.protocol import CompressedModule
from panther.sketch import signs


class Layouts:
    """Placements of input and output; None is the default of the layer."""

    def __init__(self, mesh: DeviceMesh, input: Placement | None = None, output: Placement | None = None) -> None:
        self.mesh, self.input, self.output = mesh, input, output
        # The dimensions along which input and output are sharded, or None if this is the last dimension (the features).
        self.input_dim, self.output_dim = _other_dim(input), _other_dim(output)

    @property
    def group(self) -> Any:
        """The ranks of the mesh."""
        return self.mesh.get_group()

    def take(self, x: Tensor) -> Tensor:
        """Return the local tensor of an input that is replicated, or sharded along ``input_dim``."""
        dim = self.input_dim
        return self._local(x, Replicate() if dim is None else Shard(_checked(dim, x)))

    def gather_or_sum_in_backward(self, x: Tensor) -> Tensor:
        """Gather a tensor along ``input_dim``; if this is None, only sum its gradient over the ranks.

        Every rank computes a part of the gradient, because its outputs are only a part of the features.
        """
        if self.input_dim is None:
            return sum_in_backward(x, self.group)
        return all_gather(x, self.input_dim, self.group, grad="partial")

    def give_columns(self, y: Tensor) -> Tensor:
        """Return this rank's part of the output features, or gather them if the output is replicated."""
        return all_gather(y, -1, self.group) if isinstance(self.output, Replicate) else y

    def take_columns(self, x: Tensor, columns: range) -> Tensor:
        """Return this rank's features of an input that is sharded by features, or replicated."""
        if isinstance(self.input, Replicate):
            return sum_in_backward(self._local(x, Replicate()), self.group)[..., columns.start : columns.stop]
        return self._local(x, Shard(x.dim() - 1))

    def scatter_or_sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks; with ``output_dim``, keep only this rank's shard of the sum along it."""
        if self.output_dim is None:
            return all_reduce(x, group=self.group)
        return reduce_scatter(x, _checked(self.output_dim, x), self.group)

    def sum_of_products(self, product: Callable[[Tensor | None], Tensor], bias: Tensor | None) -> Tensor:
        """Return the sum over the ranks of what ``product`` returns for a bias or None, with the bias added once."""
        if bias is not None and self.output_dim is not None:
            # The bias is added on the first rank, before the sum. Backward gathers the gradient of the entire sequence
            # there, which the bias needs. If each rank added it to its part of the sequence, its gradient would need
            # another sum.
            partial, bias = product(on_first_rank(bias, self.group)), None
        else:
            partial = product(None)
        y = self.scatter_or_sum(partial)
        return y if bias is None else y + bias.to(y.dtype)

    def _local(self, x: Tensor, placement: Placement) -> Tensor:
        # A plain tensor is assumed to have this placement, because it does not record its placement.
        return x.redistribute(self.mesh, [placement]).to_local() if isinstance(x, DTensor) else x


def _other_dim(placement: Placement | None) -> int | None:
    return placement.dim if isinstance(placement, Shard) and placement.dim != -1 else None


def _checked(dim: int, x: Tensor) -> int:
    # Checked at the call, because a layer takes inputs with any number of dimensions.
    if not 0 <= dim < x.dim() - 1:
        raise ShapeError(
            f"a layout of Shard({dim}) shards a dimension before the features, and the input has shape "
            f"{tuple(x.shape)}: pass (batch, sequence, features), or another layout"
        )
    return dim


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
    always_summed: ClassVar[tuple[str, ...]] = ()
    """Replicated parameters whose gradients are summed in every case, because each rank computes a part of them."""


class Colwise(ShardedLayer):
    """Base of layers that map ``(*, in)`` to this rank's part of ``(*, out)``."""

    action = "outputs sharded"
    size_name = "out_features"


class Rowwise(ShardedLayer):
    """Base of layers that map this rank's part of ``(*, in)`` to ``(*, out)``."""

    action = "inputs sharded"
    size_name = "in_features"


class SharedInput:
    """The input of layers that are called one after another with the same tensor, such as q, k and v.

    All of them get one copy of it, so that autograd adds their gradients before the sum over the ranks.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._num_left = num_layers, 0
        self._input: Tensor | None = None
        self._key: tuple[int, int | None] | None = None
        self._result: Tensor | None = None

    def take(self, input: Tensor, layouts: Layouts) -> Tensor:
        """Return the input on every rank; the gradient is summed over the ranks."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or input.is_inference():
            return layouts.gather_or_sum_in_backward(layouts.take(input))
        result, key = self._result, (version_of(input), layouts.input_dim)
        if result is None or self._input is not input or self._key != key:
            result = layouts.gather_or_sum_in_backward(layouts.take(input))
            self._input, self._key, self._result, self._num_left = input, key, result, self._num_layers
        self._num_left -= 1
        if not self._num_left:
            self._input = self._result = None
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without tensors, so that copies of the layers have none."""
        return vars(SharedInput(self._num_layers))


def share_input_(block: nn.Module) -> None:
    """Let the dense and the Monarch layers of a block whose outputs are sharded share their input."""
    layers = [layer for layer in block.children() if isinstance(layer, ColwiseLinear | ColwiseMonarchLinear)]
    if len(layers) > 1 and not isinstance(block, nn.Sequential | nn.ModuleList):
        shared = SharedInput(len(layers))
        for layer in layers:
            remember_(layer, ("shared_input",))
            layer.shared_input = shared


class ColwiseLinear(Colwise, nn.Linear):
    """A dense layer whose outputs are sharded."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}
    shared_input: SharedInput | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        x = (self.shared_input or SharedInput(1)).take(input, self.layouts)
        y = unflattened(F.linear(flattened(x), *self.locals("weight", "bias")), x)
        return self.layouts.give_columns(y)


class RowwiseLinear(Rowwise, nn.Linear):
    """A dense layer whose inputs are sharded."""

    placements: ClassVar[Mapping[str, Placement]] = {"weight": Shard(1)}

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        x, weight, bias = self.layouts.take_columns(input, self.local_range), *self.locals("weight", "bias")
        return self.layouts.sum_of_products(lambda bias: F.linear(x, weight, bias), bias)


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
        return self.layouts.scatter_or_sum(partial)


class ShardedSKLinear(ShardedLayer, ShardedSketchedModule, SKLinear):
    """Base of the sharded sketched layers. A rank draws only its shard of the sketches."""

    def _draw_signs(self, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.sketch == "sparse":
            return super()._draw_signs(name, dtype=dtype, device=device)
        rows, cols = (range(size) for size in self.sketch_shapes()[name])
        if isinstance(placement := self.placement(name), Shard):
            rows, cols = (self.local_range, cols) if placement.dim == 0 else (rows, self.local_range)
        return signs(self.seed, self._stream_of(name), rows, cols, dtype=dtype, device=device)  # type: ignore[arg-type]

    def _features_of(self, name: str) -> range:
        return self.local_range if isinstance(self.placement(name), Shard) else super()._features_of(name)

    def _first_place(self, name: str) -> int:
        """Return the place in [0, R) of this rank's first sign of a sparse sketch."""
        return self._features_of(name).start % self.S1.shape[1]

    def inner(self, x: Tensor) -> Tensor:  # (*, inputs of this rank) -> (*, 2 R)
        """Return :math:`s x [S_1 | U_2]`, by the kernels of the unsharded layer."""
        S1, U2 = self.locals("S1", self.sketch_names[1])
        x, S1, U2 = autocast(x.device, x, S1, U2.to(S1.dtype))
        h = sketched_inner(flattened(x), S1, U2, self.scale)
        if self.sketch == "sparse" and (shift := self._first_place(self.sketch_names[1])):
            left, right = h.split(S1.shape[1], -1)
            h = torch.cat((left, right.roll(shift, -1)), -1)
        return unflattened(h, x)

    def expanded(self, h: Tensor) -> Tensor:  # (*, 2 R) -> (*, out or this rank's outputs)
        """Return :math:`h [U_1 ; S_2] + b`, by the kernels of the unsharded layer."""
        S2, U1, bias = self.locals("S2", self.sketch_names[0], "bias")
        if self.sketch == "sparse" and (shift := self._first_place(self.sketch_names[0])):
            left, right = h.split(len(S2), -1)
            h = torch.cat((left.roll(-shift, -1), right), -1)
        h, S2, U1, bias = autocast(h.device, h, S2, U1.to(S2.dtype), bias)
        bias = bias if bias is None else bias.to(h.dtype)
        return unflattened(sketched_outer(flattened(h), U1, S2, bias), h)


class ColwiseSKLinear(Colwise, ShardedSKLinear):
    """A sketched layer whose outputs are sharded: ``(*, in)`` to this rank's part of ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(SKLinear, 0)
    seen_in_parts = ("S1", "U2")

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        h = self.layouts.gather_or_sum_in_backward(self.inner(self.layouts.take(input)))
        return self.layouts.give_columns(self.expanded(h))


class RowwiseSKLinear(Rowwise, ShardedSKLinear):
    """A sketched layer whose inputs are sharded: this rank's part of ``(*, in)`` to ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(SKLinear, 1)
    seen_in_parts = ("S2", "U1", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        h = self.inner(self.layouts.take_columns(input, self.local_range))
        return self.expanded(self.layouts.scatter_or_sum(h))


class ColwiseLowRankLinear(Colwise, LowRankLinear):
    """A low-rank layer whose outputs are sharded: ``(*, in)`` to this rank's part of ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(LowRankLinear, 0)
    seen_in_parts = ("down",)

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        x, (down, up, bias) = self.layouts.take(input), self.locals("down", "up", "bias")
        h = self.layouts.gather_or_sum_in_backward(unflattened(F.linear(flattened(x), down.mT), x))
        return self.layouts.give_columns(unflattened(F.linear(flattened(h), up.mT, bias), h))


class RowwiseLowRankLinear(Rowwise, LowRankLinear):
    """A low-rank layer whose inputs are sharded: this rank's part of ``(*, in)`` to ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(LowRankLinear, 1)
    seen_in_parts = ("up", "bias")

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        x = self.layouts.take_columns(input, self.local_range)
        partial = unflattened(F.linear(flattened(x), self.local("down").mT), x)
        h, (up, bias) = self.layouts.scatter_or_sum(partial), self.locals("up", "bias")
        return unflattened(F.linear(flattened(h), up.mT, bias), h)


class ColwiseMonarchLinear(Colwise, FullWeightOnDemand, MonarchLinear):
    """A block layer whose blocks' outputs are sharded: ``(*, in)`` to this rank's part of ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(MonarchLinear, 0)
    always_summed = ("down",)
    shared_input: SharedInput | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map the input to this rank's outputs."""
        x = (self.shared_input or SharedInput(1)).take(input, self.layouts)
        down, up, bias = self.locals("down", "up", "bias")
        sizes, outputs = self._sizes(), len(self.local_range)
        sizes = sizes._replace(outputs=outputs, n1=outputs // sizes.n2)
        return self.layouts.give_columns(monarch_product(x, down, up, bias, sizes))


class RowwiseMonarchLinear(Rowwise, FullWeightOnDemand, MonarchLinear):
    """A block layer whose blocks of inputs are sharded: this rank's part of ``(*, in)`` to ``(*, out)``."""

    placements: ClassVar[Mapping[str, Placement]] = shards(MonarchLinear, 1)

    def forward(self, input: Tensor) -> Tensor:
        """Map this rank's inputs to the output."""
        x = self.layouts.take_columns(input, self.local_range)
        down, up, bias = self.locals("down", "up", "bias")
        sizes = self._sizes()._replace(inputs=len(self.local_range), m1=len(down))
        return self.layouts.sum_of_products(lambda bias: monarch_product(x, down, up, bias, sizes), bias)


def shard_layer_(
    layer: nn.Module, mesh: DeviceMesh, kind: type[ShardedLayer], layouts: Layouts | None = None
) -> ShardedLayer:
    """Shard a plain layer that is equal on all ranks, in place; nothing is sent."""
    local_range = chunk_ranges(getattr(layer, kind.size_name), mesh.size())[mesh.get_local_rank()]
    if isinstance(layer, MonarchLinear):
        dim = 0 if kind is ColwiseMonarchLinear else 1
        if reason := layer.why_not_sharded(dim, mesh.size()):
            raise ShapeError(f"a MonarchLinear cannot have its {kind.action}: {reason}; choose another num_blocks")
    if isinstance(layer, SKLinear):
        layer.unpack_()  # Packed signs cannot be sharded at every column.
    layouts = layouts or Layouts(mesh)
    summed = kind.seen_in_parts if (layouts.input_dim, layouts.output_dim) != (None, None) else ()
    become_(layer, kind, mesh, local_range=local_range, layouts=layouts, summed=kind.always_summed + summed)
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

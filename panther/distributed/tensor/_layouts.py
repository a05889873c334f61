"""Activations before and after a sharded layer: replicated, sharded by features, or sharded by another dimension.

The product of a column-wise layer needs a replicated input, and the product of a row-wise layer an input that is
sharded by features. :class:`Layouts` inserts the collectives that convert the requested placements of input and output
to the placements of the product, with as little communication as possible.
"""

__all__ = ["Layouts"]

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from panther.distributed.comm.collectives import all_gather, all_reduce, reduce_scatter, sum_in_backward
from panther.errors import ShapeError


class Layouts:
    """Placements of input and output; None is the default of the layer.

    With ``local_output``, the output is this rank's shard as a plain tensor, and otherwise a DTensor.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        input: Placement | None = None,
        output: Placement | None = None,
        local_output: bool = True,
    ) -> None:
        self.mesh, self.input, self.output, self.local_output = mesh, input, output, local_output
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

    def give_columns(self, y: Tensor, size: int) -> Tensor:
        """Return this rank's part of the ``size`` output features, or gather them if the output is replicated."""
        if isinstance(self.output, Replicate):
            return self._given(all_gather(y, -1, self.group), Replicate(), (*y.shape[:-1], size))
        return self._given(y, Shard(y.dim() - 1), (*y.shape[:-1], size))

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

    def give(self, y: Tensor, full_shape: tuple[int, ...]) -> Tensor:
        """Return the output, which is replicated or sharded along ``output_dim``; ``full_shape`` is its full shape."""
        placement = Replicate() if self.output_dim is None else Shard(self.output_dim)
        return self._given(y, placement, (*full_shape[:-1], y.shape[-1]))

    def _local(self, x: Tensor, placement: Placement) -> Tensor:
        # A plain tensor is assumed to have this placement, because it does not record its placement.
        return x.redistribute(self.mesh, [placement]).to_local() if isinstance(x, DTensor) else x

    def _given(self, y: Tensor, placement: Placement, shape: tuple[int, ...]) -> Tensor:
        if self.local_output:
            return y
        # Shape and stride are given, because from_local assumes shards of equal size, and these shards may be uneven.
        full = torch.empty(shape, device="meta")
        return DTensor.from_local(y, self.mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())


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

"""How activations lie over ranks before and after a layer that is cut: whole, cut by features, or by the sequence.

A layer's own product needs its input whole (column-wise) or cut by features (row-wise); what is said here of input and
output is brought about around it, with as little sending as the layer allows.
"""

__all__ = ["Layouts"]

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from panther.distributed.comm.collectives import all_gather, all_reduce, reduce_scatter, sum_in_backward
from panther.errors import ShapeError


@dataclass(frozen=True)
class Layouts:
    """Layouts of input and output; None is the layer's usual one."""

    mesh: DeviceMesh
    input: Placement | None = None
    output: Placement | None = None
    local_output: bool = True
    """Whether the output is a tensor, this rank's part, or a DTensor."""

    @property
    def input_dim(self) -> int | None:
        """The dimension that the input is cut by, if not by features."""
        return _other_dim(self.input)

    @property
    def output_dim(self) -> int | None:
        """The dimension that the output is cut by, if not by features."""
        return _other_dim(self.output)

    @property
    def group(self) -> Any:
        """The ranks that share the layer."""
        return self.mesh.get_group()

    def take(self, x: Tensor) -> Tensor:
        """This rank's part of an input that is whole, or cut by another dimension than features."""
        dim = self.input_dim
        return self._local(x, Replicate() if dim is None else Shard(_checked(dim, x)))

    def take_indices(self, x: Tensor) -> Tensor:
        """The whole indices."""
        return self._local(x, Replicate())

    def gather_or_sum_in_backward(self, x: Tensor) -> Tensor:
        """What follows from the whole input, on every rank; gradients, of which each rank has a part, are summed."""
        if self.input_dim is None:
            return sum_in_backward(x, self.group)
        return all_gather(x, self.input_dim, self.group, grad="partial")

    def give_columns(self, y: Tensor, size: int) -> Tensor:
        """From this rank's features of ``size``, all of them, or as they are."""
        if isinstance(self.output, Replicate):
            return self._given(all_gather(y, -1, self.group), Replicate(), None)
        return self._given(y, Shard(y.dim() - 1), (*y.shape[:-1], size))

    def take_columns(self, x: Tensor, part: range) -> Tensor:
        """This rank's features of an input that is cut by them, or whole."""
        if isinstance(self.input, Replicate):
            return sum_in_backward(self._local(x, Replicate()), self.group)[..., part.start : part.stop]
        return self._local(x, Shard(x.dim() - 1))

    def scatter_or_sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, or this rank's part of it."""
        if self.output_dim is None:
            return all_reduce(x, group=self.group)
        return reduce_scatter(x, _checked(self.output_dim, x), self.group)

    def give(self, y: Tensor, whole: tuple[int, ...]) -> Tensor:
        """What is whole, or cut by a dimension whose size ``whole`` has."""
        if self.output_dim is None:
            return self._given(y, Replicate(), None)
        shape = list(y.shape)
        shape[self.output_dim] = whole[self.output_dim]
        return self._given(y, Shard(self.output_dim), tuple(shape))

    def _local(self, x: Tensor, placement: Placement) -> Tensor:
        return x.redistribute(self.mesh, [placement]).to_local() if isinstance(x, DTensor) else x

    def _given(self, y: Tensor, placement: Placement, shape: tuple[int, ...] | None) -> Tensor:
        if self.local_output:
            return y
        if shape is None:
            return DTensor.from_local(y, self.mesh, [placement], run_check=False)
        stride, step = [1] * len(shape), 1
        for dim in reversed(range(len(shape))):
            stride[dim], step = step, step * shape[dim]
        return DTensor.from_local(y, self.mesh, [placement], run_check=False, shape=shape, stride=tuple(stride))  # type: ignore[arg-type]


def _other_dim(placement: Placement | None) -> int | None:
    return placement.dim if isinstance(placement, Shard) and placement.dim != -1 else None


def _checked(dim: int, x: Tensor) -> int:
    if not 0 <= dim < x.dim() - 1:
        raise ShapeError(
            f"a layout of Shard({dim}) cuts a dimension before the features, and the input has shape "
            f"{tuple(x.shape)}: pass (batch, sequence, features), or another layout"
        )
    return dim

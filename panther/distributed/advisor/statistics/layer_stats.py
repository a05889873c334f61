"""The tensors and layers of a model as planning sees them."""

__all__ = ["LayerStats", "Line", "Measured", "Product", "TensorStats"]

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple


class Line(NamedTuple):
    """A quantity that is linear in the number of samples: ``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        """Return its value for a number of samples."""
        return self.fixed + self.per_sample * samples


_NOTHING = Line(0.0, 0.0)


class Product(NamedTuple):
    """Matrix products, convolutions or attention of one shape, with the work of one of them."""

    flops: Line
    moved: Line
    """Bytes that it reads and writes."""
    times: int
    """How many of them there are."""
    narrowest: int = 0
    """Their smallest size, of those that do not depend on the batch; 0 if it is not known. For a sketched layer it is
    the sketch size."""


@dataclass(frozen=True)
class TensorStats:
    """A parameter or buffer of one rank, before data parallelism shards it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    role: str
    """``"parameter"``, ``"sketch"`` (of a seeded layer; those of a fitted layer are parameters) or ``"buffer"``."""
    trained: bool
    layer: int
    """Index of the layer that holds it, in ``ModelStats.layers``."""
    block: str
    """Name of the block that FSDP gathers it with; ``""`` for parameters outside of all blocks."""
    on_mesh: bool = False
    """Whether tensor parallelism made it a DTensor."""
    global_numel: int = 0
    """Number of entries over all ranks of the tp axis."""
    last_layer: int = -1
    """Index of the last layer that shares it; -1 if ``layer`` alone has it."""

    @cached_property
    def numel(self) -> int:
        """Number of entries on this rank."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes on this rank."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class LayerStats:
    """A layer that a pipeline does not split, with flops and bytes as functions of the number of samples."""

    name: str
    flops: Line
    """Flops of the forward and backward pass."""
    activations: Line
    """Bytes that are kept for the backward pass: what autograd saves, or with activation checkpointing the inputs of
    blocks and what is saved selectively."""
    output: Line
    largest: Line
    """Bytes of the largest tensor that an operation makes, forward or backward, of those that grow with the batch."""
    tp_bytes: Line
    """Bytes that its sharded layers reduce or gather over the tp axis, forward and backward."""
    tp_calls: int
    """Number of these collectives."""
    tp_gathered: Line
    """Those of ``tp_bytes`` that are gathered."""
    tp_gathers: int
    """Those of ``tp_calls`` that gather."""
    saves_input: bool
    """Whether ``activations`` include its input; otherwise those of the layer before do."""
    products: tuple[Product, ...]
    """The operations that ``flops`` counts, forward and backward."""
    moved: Line
    """Bytes that all other operations read and write, forward and backward."""
    calls: int
    """Number of all operations."""
    recomputed: Line = _NOTHING
    """With activation checkpointing, the bytes that are made again for the backward pass of a block, of the largest."""


class Measured(NamedTuple):
    """What running a model on fake tensors finds."""

    tensors: tuple[TensorStats, ...]
    layers: tuple[LayerStats, ...]
    is_sequential: bool
    """Whether it is a sequence of layers that return one tensor each, so that a pipeline can split it."""
    tokens_per_sample: int | None

"""The statistics from which plans are computed: of tensors and of layers."""

__all__ = ["LayerStats", "Line", "Measured", "TensorStats"]

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple


class Line(NamedTuple):
    """A quantity that is linear in the number of samples: ``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        """Return the value for a number of samples."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class TensorStats:
    """A parameter or buffer of one rank, before data parallelism shards it."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    role: str
    """``"parameter"``, ``"sketch"`` (of a seeded layer; sketches of a fitted layer are parameters) or ``"buffer"``."""
    trained: bool
    layer: int
    """Index of the tensor's layer in ``ModelStats.layers``."""
    block: str
    """Name of the block with which FSDP gathers the tensor; ``""`` for parameters outside of all blocks."""
    on_mesh: bool = False
    """Whether tensor parallelism made it a DTensor."""
    global_numel: int = 0
    """Number of entries over all ranks of the tp axis."""
    last_layer: int = -1
    """Index of the last layer that shares the tensor; -1 if only ``layer`` has it."""

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
    """A layer that a pipeline does not split. Counts are for the forward and backward pass."""

    name: str
    activations: Line
    """Bytes that are kept for the backward pass: tensors that autograd saves, or, with activation checkpointing, inputs
    of blocks and selectively saved tensors."""
    recomputed: Line
    """With activation checkpointing, the bytes that the backward pass recomputes for the largest block."""
    output: Line
    largest: Line
    """Bytes of the largest tensor that an operation makes, whose size grows with the batch."""
    flops: Line
    moved: Line
    """Bytes that operations read and write."""
    calls: int
    """Number of operations."""
    tp_bytes: Line
    """Bytes that sharded layers reduce or gather over the tp axis."""
    tp_calls: int
    """Number of collectives over the tp axis."""
    tp_gathered: Line
    """Part of ``tp_bytes`` that is gathered."""
    tp_gathers: int
    """Number of ``tp_calls`` that gather."""


class Measured(NamedTuple):
    """The statistics of a model that were measured on fake tensors."""

    tensors: tuple[TensorStats, ...]
    layers: tuple[LayerStats, ...]
    is_sequential: bool
    """Whether the model is a sequence of layers that return one tensor each, so that a pipeline can split it."""

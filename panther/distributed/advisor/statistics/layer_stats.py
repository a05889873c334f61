"""The statistics from which plans are computed: of tensors, of layers, and of the optimizer's states."""

__all__ = ["ADAM", "LayerStats", "Line", "Measured", "OptimizerStates", "Product", "TensorStats"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from panther.distributed.advisor.statistics.fake_run import meta_copy
from panther.errors import ConfigError, check_size


class Line(NamedTuple):
    """A quantity that is linear in the number of samples: ``fixed + per_sample * samples``."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        """Return the value for a number of samples."""
        return self.fixed + self.per_sample * samples


_NOTHING = Line(0.0, 0.0)


class Product(NamedTuple):
    """Matrix products, convolutions or attention of one shape; flops and bytes are per call."""

    flops: Line
    moved: Line
    """Bytes that the product reads and writes."""
    times: int
    """Number of these products."""
    narrowest: int = 0
    """The smallest size that does not depend on the batch; 0 if it is unknown. For a sketched layer, it is the sketch
    size."""


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
    """A layer that a pipeline does not split, with flops and bytes as functions of the number of samples."""

    name: str
    flops: Line
    """Flops of the forward and backward pass."""
    activations: Line
    """Bytes that are kept for the backward pass: tensors that autograd saves, or, with activation checkpointing, inputs
    of blocks and selectively saved tensors."""
    output: Line
    largest: Line
    """Bytes of the largest tensor that an operation makes, forward or backward, whose size grows with the batch."""
    tp_bytes: Line
    """Bytes that sharded layers reduce or gather over the tp axis, forward and backward."""
    tp_calls: int
    """Number of collectives over the tp axis."""
    tp_gathered: Line
    """Part of ``tp_bytes`` that is gathered."""
    tp_gathers: int
    """Number of ``tp_calls`` that gather."""
    saves_input: bool
    """Whether ``activations`` include the layer's input; otherwise ``activations`` of the previous layer include it."""
    products: tuple[Product, ...]
    """The operations that ``flops`` counts, forward and backward."""
    moved: Line
    """Bytes that all other operations read and write, forward and backward."""
    calls: int
    """Number of all operations."""
    recomputed: Line = _NOTHING
    """With activation checkpointing, the bytes that the backward pass recomputes for the largest block."""


class Measured(NamedTuple):
    """The statistics of a model that were measured on fake tensors."""

    tensors: tuple[TensorStats, ...]
    layers: tuple[LayerStats, ...]
    is_sequential: bool
    """Whether the model is a sequence of layers that return one tensor each, so that a pipeline can split it."""
    tokens_per_sample: int | None


_STEP = 4  # bytes of a count of steps
_Shape = tuple[int, ...]
_State = tuple[_Shape, int]
"""The shape of a state, and the bytes of an entry."""


@dataclass(frozen=True)
class OptimizerStates:
    """What an optimizer keeps of each parameter.

    Attributes:
        copies: Number of copies of each trained parameter, and a count of steps if it is not zero.
        measured: By the name of a parameter, its shape and its states, in place of copies.
    """

    copies: int = 2
    measured: Mapping[str, tuple[_Shape, tuple[_State, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, make: Callable[[nn.Module], Any]) -> "OptimizerStates":
        """Return the states of an optimizer that ``make`` makes, from a step on a copy of the model without values.

        Raises:
            ConfigError: If a step needs values before the states exist.
        """
        model = meta_copy(model)
        optimizer = make(model)
        trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        for p in trained:
            p.grad = torch.empty_like(p)
        try:
            optimizer.step()
        except Exception as error:
            # Adafactor reads a norm, after it has made its states.
            if any(p not in optimizer.state for p in trained):
                raise ConfigError(
                    f"{type(optimizer).__name__} takes no step on tensors without values, from which its states are "
                    f"measured ({error}): give optimizer_states as a number of copies of the parameters"
                ) from error
        measured = {}
        for name, p in model.named_parameters():
            states = optimizer.state.get(p, {})
            measured[name] = (
                tuple(p.shape),
                tuple(
                    (tuple(value.shape), value.element_size())
                    for value in states.values()
                    if isinstance(value, torch.Tensor)
                ),
            )
        return cls(0, measured)

    @classmethod
    def checked(cls, states: int | Callable[[nn.Module], Any], model: Any) -> "OptimizerStates":
        """Return the states for an argument of a user: a number of copies, or a function for :meth:`of`."""
        if not callable(states):
            return cls(check_size("optimizer_states", states, least=0))
        if not hasattr(model, "named_parameters"):
            raise TypeError(
                "optimizer_states is a function, which needs the module, and the model is given by its ModelStats: "
                "give the module, or a number of copies of the parameters"
            )
        return cls.of(model, states)

    def nbytes(self, name: str, shard: _Shape, itemsize: int) -> int:
        """Return the bytes of the states of a parameter on a rank that holds a part of the shape ``shard``."""
        if name not in self.measured:
            return self.copies * prod(shard) * itemsize + (_STEP if self.copies else 0)
        parameter, states = self.measured[name]
        return sum(prod(_shard_of(shape, parameter, shard)) * entry for shape, entry in states)

    def count(self, name: str) -> int:
        """Return the number of states of a parameter, without counts of steps."""
        if name not in self.measured:
            return self.copies
        return sum(1 for shape, *_ in self.measured[name][1] if shape)


def _shard_of(shape: _Shape, parameter: _Shape, shard: _Shape) -> _Shape:
    """Return the shape of a rank's part of a state, which is sharded along the dimensions that it shares."""
    if len(shape) != len(parameter):
        return shape
    return tuple(part if size == full else size for size, full, part in zip(shape, parameter, shard, strict=True))


ADAM = OptimizerStates(2)
"""The two moments of Adam, and a count of steps."""

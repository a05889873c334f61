"""Layers that take one tensor, such as the projections of queries, keys and values: one product and one collective.

The layers are called one after another, by code that knows nothing of this. The first one that is given a tensor does
what all of them need to do with it, and keeps the results of the others until they are called with the same tensor.
Layers that turn out to be given different tensors, as in attention to another sequence, are separated for good.
"""

__all__ = ["SharedInput", "share_input_"]

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from panther._torch import parameters_of, saved_tensor_hooks_are_set, version_of
from panther.distributed.tensor._module import ShardedModule
from panther.distributed.tensor.unshard import remember_
from panther.kernels._torch import can_autocast


class SharesInput(Protocol):
    """A layer whose class can do the first part of the work of several layers at once."""

    shared_input: "SharedInput | None"

    def joins(self, other: Any) -> bool:
        """Return whether the other layer's first part can be computed together with this one's now."""

    def enter_together(self, layers: Sequence[Any], input: Tensor) -> list[Tensor]:
        """Do the first part for several layers that join, this one among them."""


class SharedInput:
    """The layers that share an input, and what was computed for those that are still to be called."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self.layers: list[Any] = list(layers)
        self._input: Tensor | None = None
        self._state: tuple[Any, ...] = ()
        self._members: list[Any] = []
        self._ready: dict[int, Tensor] = {}
        """Results by the ids of the layers that have not taken theirs."""

    def enter(self, layer: SharesInput, input: Tensor) -> Tensor:
        """Return the first part of a layer's work: computed now for all, or when another layer was called."""
        # Without gradients little is gained, and weights could change between two calls without a trace. A compiled
        # graph must not depend on what was called before.
        if len(self.layers) == 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return layer.enter_together([layer], input)[0]
        if self._ready:
            same = self._input is input and self._state == _state(self._members, input)
            if same and id(layer) in self._ready:
                return self._give(self._ready.pop(id(layer)))
            if same and layer not in self._members:
                return layer.enter_together([layer], input)[0]
            self._mismatch()
            return layer.shared_input.enter(layer, input)  # type: ignore[union-attr]
        members = [other for other in self.layers if other is layer or layer.joins(other)]
        results = dict(zip(map(id, members), layer.enter_together(members, input), strict=True))
        result = results.pop(id(layer))
        self._input, self._state, self._members, self._ready = input, _state(members, input), members, results
        return self._give(result)

    def _give(self, result: Tensor) -> Tensor:
        """Return a layer's result; if it goes through a backward pass before all are taken, the others are void."""
        if not self._ready:
            self._let_go()
        elif result.requires_grad:
            waiting = self._ready

            def void(gradient: Tensor) -> None:
                if self._ready is waiting:
                    self._mismatch()

            result.register_hook(void)
        return result

    def _mismatch(self) -> None:
        """Part the layers that have taken their results from those that were not called with the same tensor."""
        waiting = [layer for layer in self.layers if id(layer) in self._ready]
        self._let_go()
        # Activation checkpointing, known by its hooks, computes in backward what it did in forward, and compares the
        # two: what is learned from one must not change the other.
        if saved_tensor_hooks_are_set():
            return
        self.layers = [layer for layer in self.layers if layer not in waiting]
        others = SharedInput(waiting)
        for layer in waiting:
            layer.shared_input = others

    def _let_go(self) -> None:
        self._input, self._state, self._members, self._ready = None, (), [], {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a forward keeps: copies of the layers start afresh."""
        return vars(SharedInput(self.layers))


def _state(layers: Sequence[nn.Module], input: Tensor) -> tuple[Any, ...]:
    """Return what decides the results beside the tensor: its version, the weights, and autocast."""
    kind = input.device.type
    cast = torch.get_autocast_dtype(kind) if can_autocast(kind) else None
    weights = [(id(p), version_of(p)) for layer in layers for p in parameters_of(layer).values() if p is not None]
    version = None if input.is_inference() else version_of(input)
    return version, cast, torch.is_autocast_enabled(kind), weights


def share_input_(layers: Sequence[nn.Module]) -> None:
    """Let sharded layers share their input, if their classes can and they are alike in all that decides about it."""
    able: list[Any] = [layer for layer in layers if isinstance(layer, ShardedModule) and hasattr(layer, "joins")]
    while able:
        first, *rest = able
        alike = [first, *(layer for layer in rest if first.joins(layer))]
        able = [layer for layer in rest if layer not in alike]
        if len(alike) > 1:
            shared = SharedInput(alike)
            for layer in alike:
                remember_(layer, ("shared_input",))
                layer.shared_input = shared

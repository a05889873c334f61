"""One product and one collective for layers with the same input, such as projections of queries, keys and values.

The layers are called one after another, by code that does not know about the sharing. The first layer that is called
computes the first product of all layers, and caches the results until the remaining layers are called with the same
tensor. Layers that are called with different tensors, as in cross-attention, are separated permanently.
"""

__all__ = ["SharedInput", "share_input_"]

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from panther._torch import parameters_of, saved_tensor_hooks_are_set, version_of
from panther.distributed.tensor._module import ShardedModule
from panther.distributed.tensor.unshard import remember_
from panther.kernels.ops.library import can_autocast


class SharesInput(Protocol):
    """A layer whose class can compute the first product of more than one layer in one call."""

    shared_input: "SharedInput | None"

    def can_share_with(self, other: Any) -> bool:
        """Return whether :meth:`shared_forward` can compute the first product of the other layer too."""

    def shared_forward(self, layers: Sequence[Any], input: Tensor) -> list[Tensor]:
        """Compute the first product of all ``layers`` (self included) in one call and one collective."""


class SharedInput:
    """The layers that share an input, and cached results of the layers that were not called yet."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self.layers: list[Any] = list(layers)
        self._input: Tensor | None = None
        self._state: tuple[Any, ...] = ()
        self._members: list[Any] = []
        self._ready: dict[int, Tensor] = {}
        """Cached results by the ids of the layers that were not called yet."""

    def enter(self, layer: SharesInput, input: Tensor) -> Tensor:
        """Return the first product of a layer, from the cache or computed now for all layers that can share it."""
        # Without gradients, sharing gains little, and weights could change between two calls without being noticed. A
        # compiled graph must not depend on earlier calls.
        if len(self.layers) == 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return layer.shared_forward([layer], input)[0]
        if self._ready:
            same = self._input is input and self._state == _state(self._members, input)
            if same and id(layer) in self._ready:
                return self._release(self._ready.pop(id(layer)))
            if same and layer not in self._members:
                return layer.shared_forward([layer], input)[0]
            self._separate()
            return layer.shared_input.enter(layer, input)  # type: ignore[union-attr]
        members = [other for other in self.layers if other is layer or layer.can_share_with(other)]
        results = dict(zip(map(id, members), layer.shared_forward(members, input), strict=True))
        result = results.pop(id(layer))
        self._input, self._state, self._members, self._ready = input, _state(members, input), members, results
        return self._release(result)

    def _release(self, result: Tensor) -> Tensor:
        """Return the cached result of one layer.

        If its backward runs before the other layers were called, their cached results are discarded.
        """
        if not self._ready:
            self._clear()
        elif result.requires_grad:
            waiting = self._ready

            def void(gradient: Tensor) -> None:
                if self._ready is waiting:
                    self._separate()

            result.register_hook(void)
        return result

    def _separate(self) -> None:
        """Discard cached results, and separate the layers that were not called with the same tensor from the rest."""
        waiting = [layer for layer in self.layers if id(layer) in self._ready]
        self._clear()
        # Activation checkpointing, recognized by its hooks, repeats the forward in backward and compares both runs, so
        # that the first run must not change the second one.
        if saved_tensor_hooks_are_set():
            return
        self.layers = [layer for layer in self.layers if layer not in waiting]
        separate = SharedInput(waiting)
        for layer in waiting:
            layer.shared_input = separate

    def _clear(self) -> None:
        self._input, self._state, self._members, self._ready = None, (), [], {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached results, so that copies of the layers have none."""
        return vars(SharedInput(self.layers))


def _state(layers: Sequence[nn.Module], input: Tensor) -> tuple[Any, ...]:
    """Return everything besides the input's identity that determines results: its version, weights and autocast."""
    kind = input.device.type
    cast = torch.get_autocast_dtype(kind) if can_autocast(kind) else None
    weights = [(id(p), version_of(p)) for layer in layers for p in parameters_of(layer).values() if p is not None]
    version = None if input.is_inference() else version_of(input)
    return version, cast, torch.is_autocast_enabled(kind), weights


def share_input_(layers: Sequence[nn.Module]) -> None:
    """Let sharded layers share their input, in groups of layers whose first products can be computed in one call."""
    able: list[Any] = [
        layer for layer in layers if isinstance(layer, ShardedModule) and hasattr(layer, "can_share_with")
    ]
    while able:
        first, *rest = able
        group = [first, *(layer for layer in rest if first.can_share_with(layer))]
        able = [layer for layer in rest if layer not in group]
        if len(group) > 1:
            shared = SharedInput(group)
            for layer in group:
                remember_(layer, ("shared_input",))
                layer.shared_input = shared

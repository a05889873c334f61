"""Detection of whether a model calls its new layers, and whether it still uses the weights of replaced layers.

A list in the model, or a forward that a library has stored, can reference a replaced layer. The replaced layer is then
still used, while the model seems to be smaller. Therefore the tensors of all operations are examined.
"""

__all__ = ["STILL_REFERENCED", "Usage", "recording_usage"]

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from panther._torch import TorchDispatchMode, storage_key
from panther.compression.forms import Replacement

STILL_REFERENCED = (
    "something else references the old layer, for example a forward that a library has stored: remove the reference, "
    "or exclude the layer from the search"
)


@dataclass(frozen=True)
class Usage:
    """The use of replaced layers and their replacements.

    Attributes:
        called: Replaced layers whose replacements were called.
        held: Replaced layers whose weights were used.
    """

    called: set[nn.Module] = field(default_factory=set)
    held: set[nn.Module] = field(default_factory=set)


@contextmanager
def recording_usage(model: nn.Module, replacement: Replacement, usage: Usage) -> Iterator[None]:
    """Record in ``usage`` which new layers are called, and which replaced layers' weights are used.

    A compiled model runs uncompiled meanwhile. The use of weights in threads that start meanwhile is not recorded.
    """
    used_memory = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    old = {_memory(tensor): layer for layer in replacement for tensor in layer.parameters()}
    old = {memory: layer for memory, layer in old.items() if memory is not None and memory not in used_memory}

    def calls(layer: nn.Module) -> Callable[..., None]:
        # A deepcopy of the model shares functions, so calls of the copy count too.
        def note(*_: Any) -> None:
            usage.called.add(layer)

        return note

    with ExitStack() as stack:
        for layer, new in replacement.items():
            stack.callback(new.register_forward_pre_hook(calls(layer)).remove)
        if old:
            stack.enter_context(_Weights(old, usage.held))
        yield


class _Weights(TorchDispatchMode):
    """Records the layers whose memory an operation reads.

    It is a dispatch mode and not a function mode, under which nn.MultiheadAttention would take another path that rounds
    differently.
    """

    def __init__(self, layers: dict[int | None, nn.Module], held: set[nn.Module]) -> None:
        super().__init__()
        self._layers, self._held = layers, held

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in args:
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(tensor, Tensor) and (layer := self._layers.get(_memory(tensor))) is not None:
                    self._held.add(layer)
        return function(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int | None:
    """Return a key that is equal for views of the same memory, or None for a tensor without memory."""
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError, ValueError):
        return None

"""Whether a model calls the layers that were put into it, and whether it still computes with the old ones' weights.

Something else can hold an old layer: a list of the model's own, or a forward that a library has put aside. The old
layer then runs on unnoticed, while the model seems to be smaller. So the tensors of all operations are looked at.
"""

__all__ = ["HELD", "Usage", "watched"]

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from panther._torch import TorchDispatchMode, storage_key
from panther.compression.conversion import Replacement

HELD = (
    "something else holds the old one, such as a forward that a library has put aside: remove that, or leave the layer "
    "out of the search"
)


@dataclass(frozen=True)
class Usage:
    """What was seen of layers that were replaced.

    Attributes:
        called: Old layers whose new ones were called.
        held: Old layers whose weights were used.
    """

    called: set[nn.Module] = field(default_factory=set)
    held: set[nn.Module] = field(default_factory=set)


@contextmanager
def watched(model: nn.Module, replacement: Replacement, usage: Usage) -> Iterator[None]:
    """Watch a model in which new layers stand in the place of old ones, and add what is seen.

    A model that torch.compile has compiled runs uncompiled meanwhile. Threads that are started within are not watched
    for weights.
    """
    kept = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    old = {_memory(tensor): layer for layer in replacement for tensor in layer.parameters()}
    old = {memory: layer for memory, layer in old.items() if memory is not None and memory not in kept}

    def calls(layer: nn.Module) -> Callable[..., None]:
        # A function, because a copy of the model that an evaluation makes shares it; its calls count too.
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
    """Notes the layers whose memory an operation reads.

    A mode of dispatch, not of functions: under one of those nn.MultiheadAttention takes another path, which rounds
    differently.
    """

    def __init__(self, layers: dict[int | None, nn.Module], held: set[nn.Module]) -> None:
        super().__init__()
        self._layers, self._held = layers, held

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in args:
            for one in given if isinstance(given, list | tuple) else (given,):
                if isinstance(one, Tensor) and (layer := self._layers.get(_memory(one))) is not None:
                    self._held.add(layer)
        return function(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int | None:
    """Return what is equal for views of the same memory; None of a tensor without memory of its own."""
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError, ValueError):
        return None

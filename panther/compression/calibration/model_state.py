"""Save and restore the state that a forward may change in a model, as the same objects with the same values.

A forward may write its buffers, assign attributes, append to a list, or draw from a generator of the model. Each
forward of a calibration starts from the same state, and the model is unchanged after the calibration.
"""

__all__ = ["ModelState", "deferred_interrupts", "without_compiled_blocks"]

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from panther._torch import (
    COMPILED,
    FLAT_WEIGHTS,
    buffers_of,
    parameters_of,
    storage_key,
    version_of,
    without_inner_wrappers,
)
from panther.compression.calibration.attribute_state import AttributeState, refill
from panther.nn.base import CompressedModule

# Attributes of nn.Module itself, such as the dictionaries of hooks and the training flag, and a list of weights that
# torch derives from the parameters. Calibration changes them on purpose from one forward to the next, as it does with
# the forward of a module of experts.
_OF_MODULES = frozenset(vars(nn.Module())) | {FLAT_WEIGHTS, "forward"}


class _Contents:
    """The values of a tensor that is not a parameter, and its layout."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._geometry = _geometry(tensor)
        self._storage = tensor.untyped_storage() if _has_storage(tensor) else None
        # The memory is saved instead of the values if it is not larger, as for a tensor that is expanded.
        self._saves_memory = self._storage is not None and self._storage.nbytes() <= tensor.nbytes
        self._saved = (_bytes(self._storage, tensor.device) if self._saves_memory else tensor.detach()).clone()
        self.count_writes()

    def count_writes(self) -> None:
        # Tensors of inference mode count no writes.
        self._writes = None if self.tensor.is_inference() else version_of(self.tensor)

    def restore(self, *, thorough: bool) -> None:
        """Restore the values; ``thorough`` also finds writes to ``tensor.data``, which autograd does not count."""
        tensor = self.tensor
        moved = _geometry(tensor) != self._geometry
        if not moved and not thorough and self._writes is not None and version_of(tensor) == self._writes:
            return
        with torch.no_grad():
            if self._storage is not None and moved:
                if self._saves_memory and self._storage.nbytes() != self._saved.numel():
                    self._storage.resize_(self._saved.numel())
                alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = alias.set_(self._storage, *self._geometry[1:])
            present = _bytes(self._storage, tensor.device) if self._saves_memory else tensor.detach()
            # Compared first, because the memory of a mapped file may not be written.
            if not _are_equal(present, self._saved):
                present.copy_(self._saved)
        self.count_writes()


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return (storage_key(x), x.storage_offset(), x.shape, x.stride()) if _has_storage(x) else ()


def _has_storage(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and type(x) in (Tensor, nn.Parameter, nn.Buffer)


def _bytes(storage: Any, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def _are_equal(first: Tensor, second: Tensor) -> bool:
    # NaN differs from itself, so that a tensor with NaN is written again, which does no harm.
    return _has_storage(first) and first.shape == second.shape and torch.equal(first, second)


class ModelState:
    """The buffers, attributes and generators of a model's modules at the time when this object is made.

    The contents of attributes are saved too: of containers, and of objects with their attributes, at any depth within
    the limits of :class:`AttributeState`. Parameters are not copied, and neither are the codes of compressed layers,
    which no forward writes. While this object is in use, parameters and buffers that were made in inference mode are
    replaced by normal tensors of the same memory, because autograd refuses tensors of inference mode.

    Cost: a copy of all buffers, and of tensors and arrays that are attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._attributes = {module: dict(vars(module)) for module in model.modules()}
        values: list[Any] = []
        values_of_modules: list[Any] = []
        tensors: dict[int, Tensor] = {}
        for module, attributes in self._attributes.items():
            writable = [] if isinstance(module, CompressedModule) else [*buffers_of(module).values()]
            tensors |= {id(tensor): tensor for tensor in writable if tensor is not None and _is_written(tensor)}
            for name, value in attributes.items():
                (values_of_modules if name in _OF_MODULES else values).append(value)
        self._held = AttributeState(values, self._attributes)
        self._held_by_torch = AttributeState(values_of_modules, self._attributes, is_deep=False)
        tensors |= {id(tensor): tensor for tensor in self._held.tensors if _is_written(tensor)}
        aliases = self._use_normal_tensors()
        self._contents = [_Contents(aliases.get(key, tensor)) for key, tensor in tensors.items()]
        self._writes = [
            (name, parameter, version_of(parameter))
            for name, parameter in model.named_parameters()
            if not is_lazy(parameter) and not parameter.is_inference()
        ]
        # A ScriptModule has no dictionary of its buffers: only the values of its buffers are put back.
        self._present_buffers = {
            module: dict(buffers_of(module))
            for module in self._attributes
            if not isinstance(module, torch.jit.ScriptModule)
        }

    def _use_normal_tensors(self) -> dict[int, Tensor]:
        """Replace parameters and buffers of inference mode by normal tensors; return them by the old ids."""
        aliases: dict[int, Tensor] = {}
        for module in self._attributes:
            for tensors in (parameters_of(module), buffers_of(module)):
                for name, tensor in tensors.items():
                    if tensor is None or is_lazy(tensor) or not tensor.is_inference() or not _has_storage(tensor):
                        continue
                    if id(tensor) not in aliases:
                        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
                        is_parameter = isinstance(tensor, nn.Parameter)
                        aliases[id(tensor)] = nn.Parameter(alias, requires_grad=False) if is_parameter else alias
                    tensors[name] = aliases[id(tensor)]  # type: ignore[assignment]
        return aliases

    def written_parameters(self) -> list[str]:
        """Return the names of the parameters that were written in place since this object was made."""
        return [name for name, parameter, writes in self._writes if version_of(parameter) != writes]

    def restore_before_forward(self) -> None:
        """Undo changes of the last forward, except for hooks and flags, which calibration itself changes."""
        for module, attributes in self._attributes.items():
            if module in self._present_buffers:
                refill(buffers_of(module), self._present_buffers[module])
            refill(vars(module), attributes, leave=_OF_MODULES)
        self._restore_values(thorough=False)

    def restore(self) -> None:
        """Restore the state of the time when this object was made."""
        for module, attributes in self._attributes.items():
            refill(vars(module), attributes)
        self._held_by_torch.restore()
        self._restore_values(thorough=True)

    def _restore_values(self, *, thorough: bool) -> None:
        self._held.restore()
        for contents in self._contents:
            contents.restore(thorough=thorough)


def _is_written(x: Tensor) -> bool:
    """Return whether a forward could write to a tensor."""
    return not (x.is_meta or is_lazy(x) or isinstance(x, nn.Parameter))


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the end of the block, so that its changes are made completely or not at all.

    Only the main thread gets signals; in other threads nothing is deferred.
    """
    received: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, lambda number, frame: received.append((number, frame)))
        yield
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)
    for signal_number, frame in received:
        handlers[signal_number](signal_number, frame)


@contextmanager
def without_compiled_blocks(model: nn.Module) -> Iterator[None]:
    """Take torch.compile's wrappers off the blocks of a model, and put them around what stands there at the end.

    A wrapper is bound to its module, and would call a layer that has been replaced.
    """
    stack = ExitStack()
    try:
        with deferred_interrupts():
            stack.enter_context(without_inner_wrappers(model, (COMPILED,)))
        yield
    finally:
        with deferred_interrupts():
            stack.close()

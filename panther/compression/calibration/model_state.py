"""Save and restore the state that a forward may change in a model, as the same objects with the same values.

A forward may write its buffers, assign attributes, append to a list, or draw from a generator of the model. Each
forward of a calibration starts from the same state, and the model is unchanged after the calibration.
"""

__all__ = ["ModelState", "deferred_interrupts", "without_compiled_blocks"]

import signal
import threading
from collections.abc import Collection, Iterable, Iterator
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
from panther.compression.calibration.attribute_state import (
    AttributeState,
    class_attributes,
    is_same,
    refill,
    restore_classes,
)
from panther.errors import CompressionError
from panther.nn.protocol import CompressedModule

# Attributes of nn.Module itself, such as the dictionaries of hooks and the training flag, and a list of weights that
# torch derives from the parameters. Calibration changes them on purpose from one forward to the next, as it does with
# the forward of a module of experts. Before a forward, only what the last forward changed in them is undone.
_EMPTY = nn.Module()
_OF_MODULES = frozenset(vars(_EMPTY)) | {FLAT_WEIGHTS, "forward"}
_TABLES = {name: value for name, value in vars(_EMPTY).items() if isinstance(value, dict)}
_DICTIONARIES = tuple(name for name, value in _TABLES.items() if value is not buffers_of(_EMPTY))
_FLAGS = frozenset(vars(_EMPTY)) - _TABLES.keys() | {"forward"}
# A dictionary of a module, the names that count in it (None for all), and its entries before and after a forward.
_Change = tuple[dict[Any, Any], frozenset[str] | None, dict[Any, Any], dict[Any, Any]]


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
        self._model = model
        self._changes: list[_Change] = []  # by the last forward
        self._attributes = {module: dict(vars(module)) for module in model.modules()}
        values: list[Any] = []
        values_of_modules: list[Any] = []
        tensors: dict[int, Tensor] = {}
        for module, attributes in self._attributes.items():
            writable = [] if isinstance(module, CompressedModule) else [*buffers_of(module).values()]
            tensors |= {id(tensor): tensor for tensor in writable if tensor is not None and _is_written(tensor)}
            for name, value in attributes.items():
                (values_of_modules if name in _OF_MODULES else values).append(value)
        self._classes = class_attributes(map(type, self._attributes))
        values += [value for attributes in self._classes.values() for value in attributes.values()]
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

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Undo what the last forward changed, and note what the forward in the block changes in hooks and submodules.

        A model can register hooks at its first forward, and note that in an attribute, its class or its config. The
        hooks and the note are undone together, so that each forward registers them once. A note in a different place,
        as in a global variable, is not seen.

        Raises:
            CompressionError: If the forward makes parameters.
        """
        self._undo()
        for module, attributes in self._attributes.items():
            if module in self._present_buffers:
                refill(buffers_of(module), self._present_buffers[module])
            refill(vars(module), attributes, leave=_OF_MODULES)
        self._restore_values(thorough=False)
        tables = [
            (table, names, _entries(table, names) if table else {})
            for module in self._model.modules()
            for table, names in _tables(module)
        ]
        try:
            yield
        finally:
            self._changes = [
                (table, names, entries, changed_entries)
                for table, names, entries in tables
                if (table or entries) and not is_same(entries, changed_entries := _entries(table, names))
            ]
        if self._changes:
            _check_parameters(self._changes, {id(value) for *_, entries in tables for value in entries.values()})

    def _undo(self) -> None:
        """Undo what the last forward changed in hooks, flags and submodules, but not what calibration changed since."""
        for table, names, entries, changed_entries in self._changes:
            present = _entries(table, names)
            merged = {
                key: value if present.get(key) is changed_entries.get(key) else present[key]
                for key, value in entries.items()
                if key in present or key not in changed_entries
            }
            earlier = entries.keys() | changed_entries.keys()
            merged |= {key: value for key, value in present.items() if key not in earlier}
            refill(table, merged, leave=frozenset() if names is None else frozenset(table) - names)
        self._changes = []

    def restore(self) -> None:
        """Restore the state of the time when this object was made."""
        self._undo()
        for module, attributes in self._attributes.items():
            refill(vars(module), attributes)
        self._held_by_torch.restore()
        self._restore_values(thorough=True)

    def _restore_values(self, *, thorough: bool) -> None:
        restore_classes(self._classes)
        self._held.restore()
        for contents in self._contents:
            contents.restore(thorough=thorough)


def _tables(module: nn.Module) -> Iterator[tuple[dict[Any, Any], frozenset[str] | None]]:
    """Yield the dictionaries of a module that calibration and forwards change, and the names that count in them."""
    yield vars(module), _FLAGS
    yield from ((table, None) for name in _DICTIONARIES if isinstance(table := vars(module).get(name), dict))


def _entries(table: dict[Any, Any], names: frozenset[str] | None) -> dict[Any, Any]:
    return {**table} if names is None else {name: table[name] for name in names if name in table}


def _check_parameters(changes: Iterable[_Change], present_ids: Collection[int]) -> None:
    """Raise CompressionError if entries are new parameters, or submodules with tensors, where there were none."""
    for _, _, entries, changed_entries in changes:
        for name, value in changed_entries.items():
            if id(value) not in present_ids and _has_values(value) and not _has_values(entries.get(name)):
                raise CompressionError(
                    f"a forward of the model makes {name!r}, whose values would be made anew by each forward of the "
                    "calibration: run the model on a batch first"
                )


def _has_values(value: Any) -> bool:
    return isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and bool(value.state_dict()))


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

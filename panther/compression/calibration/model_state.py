"""Save and restore the state that a forward may change in a model, as the same objects with the same values.

A forward may write its buffers, assign attributes, append to a list, or draw from a generator of the model. Each
forward of a calibration starts from the same state, and the model is unchanged after the calibration.

Of an attribute's value, the contents of a list, set or dictionary, the attributes of an object such as a config, the
values of a tensor and the state of a generator are saved, but not what lies deeper, as in a dictionary of dictionaries.
"""

__all__ = ["ModelState", "deferred_interrupts", "refill", "without_compiled_blocks"]

import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
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
from panther.errors import CompressionError
from panther.nn.protocol import CompressedModule

# Objects of Python's own libraries, such as pools of threads and loggers, change in ways that must not be undone, so
# they are not saved. Namespaces only hold values.
_SYSTEM = sys.stdlib_module_names - {"types"} | {"torch", "numpy", "builtins"}
_LIBRARIES = frozenset({"torch", "panther"})
_MISSING = object()


def _is_same(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> bool:
    """Return whether two dictionaries have the same objects."""
    return first.keys() == second.keys() and all(second[key] is value for key, value in first.items())


def refill(present: dict[Any, Any], saved: Mapping[Any, Any], leave: frozenset[str] = frozenset()) -> None:
    """Let a dictionary have the saved entries again, in their order; the keys of ``leave`` stay as they are."""
    same = all(present.get(key, _MISSING) is value for key, value in saved.items() if key not in leave)
    if same and all(key in saved or key in leave for key in present):
        return
    entries = {key: present[key] if key in leave and key in present else value for key, value in saved.items()}
    entries |= {key: value for key, value in present.items() if key in leave}
    present.clear()
    present.update(entries)


def _refill_container(container: Any, entries: list[Any]) -> None:
    if len(container) != len(entries) or any(a is not b for a, b in zip(container, entries, strict=True)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(entries)


def _restorers_of(values: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Yield functions that give values the contents again that they have now."""
    for value in {id(value): value for value in values}.values():
        kind = type(value)  # and not isinstance, which asks the object of a weak proxy
        if issubclass(kind, (list, set, deque)):
            yield partial(_refill_container, value, [*value])
        elif issubclass(kind, dict):
            yield partial(refill, value, dict(value))
        elif issubclass(kind, (torch.Generator, np.random.RandomState)):
            yield partial(value.set_state, value.get_state())
        elif issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
            yield partial(value.setstate, value.getstate())
        elif issubclass(kind, (np.random.Generator, np.random.BitGenerator)):
            bits = value.bit_generator if issubclass(kind, np.random.Generator) else value
            yield partial(setattr, bits, "state", bits.state)
        elif not issubclass(kind, nn.Module) and kind.__module__.partition(".")[0] not in _SYSTEM:
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict):
                yield partial(refill, attributes, dict(attributes))


def _attributes_of(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


def _restore_class(kind: type, saved: Mapping[str, Any]) -> None:
    if not _is_same(saved, present := _attributes_of(kind)):
        for name in present.keys() - saved.keys():
            delattr(kind, name)
        for name, value in saved.items():
            setattr(kind, name, value)


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
    """The values of a tensor that is not a parameter, and its memory and layout."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._alias, self._saved = tensor, tensor.detach(), tensor.detach().clone()
        self.count_writes()

    def count_writes(self) -> None:
        # Tensors of inference mode count no writes.
        self._writes = None if self.tensor.is_inference() else version_of(self.tensor)

    def restore(self, *, thorough: bool) -> None:
        """Restore the values; ``thorough`` also finds writes to ``tensor.data``, which autograd does not count."""
        tensor = self.tensor
        moved = _geometry(tensor) != _geometry(self._alias)
        if not moved and not thorough and self._writes is not None and version_of(tensor) == self._writes:
            return
        with torch.no_grad():
            if moved:
                tensor.data = self._alias.detach()
            # Compared first, because the memory of a mapped file may not be written.
            if not _are_equal(tensor, self._saved):
                tensor.copy_(self._saved)
        self.count_writes()


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return (storage_key(x), x.storage_offset(), x.shape, x.stride()) if _has_storage(x) else ()


def _has_storage(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested and type(x) in (Tensor, nn.Parameter, nn.Buffer)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    # NaN differs from itself, so that a tensor with NaN is written again, which does no harm.
    return _has_storage(first) and first.shape == second.shape and torch.equal(first, second)


class ModelState:
    """The buffers, attributes and generators of a model's modules at the time when this object is made.

    Parameters are not copied, and neither are the codes of compressed layers, which no forward writes. While this
    object is in use, parameters and buffers that were made in inference mode are replaced by normal tensors of the same
    memory, because autograd refuses tensors of inference mode.

    Cost: a copy of all buffers, and of tensors that are attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changes: list[_Change] = []  # by the last forward
        self._attributes = {module: dict(vars(module)) for module in model.modules()}
        bases = {base for module in self._attributes for base in type(module).__mro__ if issubclass(base, nn.Module)}
        self._classes = {
            base: _attributes_of(base) for base in bases if base.__module__.partition(".")[0] not in _LIBRARIES
        }
        values = [value for attributes in self._classes.values() for value in attributes.values()]
        values_of_modules: list[Any] = []
        written: list[Any] = []
        for module, attributes in self._attributes.items():
            written += [] if isinstance(module, CompressedModule) else buffers_of(module).values()
            for name, value in attributes.items():
                (values_of_modules if name in _OF_MODULES else values).append(value)
        self._restorers = [*_restorers_of(values)]
        self._restorers_of_modules = [*_restorers_of(values_of_modules)]
        tensors = {id(value): value for value in [*written, *values] if _is_written(value)}
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
                if (table or entries) and not _is_same(entries, changed_entries := _entries(table, names))
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
        for restore in self._restorers_of_modules:
            restore()
        self._restore_values(thorough=True)

    def _restore_values(self, *, thorough: bool) -> None:
        for kind, attributes in self._classes.items():
            _restore_class(kind, attributes)
        for restore in self._restorers:
            restore()
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


def _is_written(x: Any) -> bool:
    """Return whether a value is a tensor that a forward could write to."""
    return issubclass(type(x), Tensor) and not (x.is_meta or is_lazy(x) or isinstance(x, nn.Parameter))


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

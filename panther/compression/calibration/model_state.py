"""Save and restore the state that a forward may change in a model, as the same objects with the same values.

A forward may write its buffers, assign attributes, append to a list, or draw from a generator of the model. Each
forward of a calibration starts from the same state, and the model is unchanged after the calibration.

A model can also keep its state in a cache object, a dictionary of dictionaries, a NumPy array or its own generator.
What attributes hold is therefore saved at any depth. The objects stay the same, and get the contents that they had.
"""

__all__ = [
    "AttributeState", "ModelState", "class_attributes", "deferred_interrupts", "is_same", "refill", "restore_classes",
    "without_compiled_blocks",
]  # fmt: skip

import random
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType, MemberDescriptorType
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
from panther.compression.calibration.batches import SHARED
from panther.errors import CompressionError
from panther.nn.protocol import CompressedModule

# A model can refer to its trainer and so to a whole data set. Of what is neither an attribute nor an entry of one, no
# more objects are looked at, and no more bytes of tensors are copied. The limit of bytes is for all arrays.
_MOST_OBJECTS = 10_000
_MOST_BYTES = 1 << 26
# Objects of Python's own libraries, such as pools of threads and loggers, change in ways that must not be undone, so
# they are not saved. The classes of collections and types are exceptions, because they only hold values.
_PLAIN_MODULES = frozenset({"collections", "types"})
_LIBRARIES = frozenset({"torch", "panther"})
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_MISSING = object()


class AttributeState:
    """The contents of everything that can be reached from some values, as they are when this object is made.

    Args:
        values: The values of the modules' attributes.
        modules: The modules, into which the search does not go.
        is_deep: Whether what the values refer to is saved too, and not only their own contents.

    Attributes:
        tensors: The tensors that were reached. Their contents are not saved here.
    """

    def __init__(self, values: Iterable[Any], modules: Iterable[nn.Module], *, is_deep: bool = True) -> None:
        self.tensors: list[Tensor] = []
        self._containers: list[tuple[Any, Any]] = []
        self._dictionaries: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._slots: list[tuple[Any, MemberDescriptorType, Any]] = []
        self._arrays: list[tuple[np.ndarray, np.ndarray]] = []
        self._generators: list[tuple[Callable[[Any], Any], Any]] = []
        self._copied_bytes = 0
        visited = set(map(id, modules))
        queue = deque((0, value) for value in values)
        deep_objects = 0
        while queue and deep_objects < _MOST_OBJECTS:  # the nearest ones come first
            depth, value = queue.popleft()
            if value is None or type(value) in _PROXIES or id(value) in visited:
                continue
            if isinstance(value, SHARED) and not isinstance(value, nn.Module):
                continue
            visited.add(id(value))
            deep_objects += depth > 1
            entries = self._save(value, depth)
            if is_deep:
                queue.extend((depth + 1, entry) for entry in entries)

    def _save(self, value: Any, depth: int) -> Iterable[Any]:
        """Save the contents of one value; return what it refers to."""
        if isinstance(value, Tensor):
            if depth <= 1 or self._has_room(value.nbytes if value.layout is torch.strided else 0):
                self.tensors.append(value)
            return ()
        if isinstance(value, np.ndarray):
            if value.flags.writeable and not value.dtype.hasobject and self._has_room(value.nbytes):
                self._arrays.append((value, value.copy()))
            return ()
        if (generator := _generator_state(value)) is not None:
            self._generators.append(generator)
            return ()
        entries: list[Any] = []
        if isinstance(value, (list, set, deque)):
            entries = [*value]
            self._containers.append((value, [*value]))
        elif isinstance(value, dict):
            entries = [*value.values()]
            self._dictionaries.append((value, dict(value)))
        elif isinstance(value, (tuple, frozenset)):
            return [*value]
        if not _holds_values(type(value)):
            return entries
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            entries += attributes.values()
            self._dictionaries.append((attributes, dict(attributes)))
        for descriptor in _slots_of(type(value)):
            content = _slot(value, descriptor)
            entries.append(None if content is _MISSING else content)
            self._slots.append((value, descriptor, content))
        return entries

    def _has_room(self, size: int) -> bool:
        if self._copied_bytes + size > _MOST_BYTES:
            return False
        self._copied_bytes += size
        return True

    def restore(self) -> None:
        """Put the contents back, except for the values of tensors."""
        for dictionary, saved in self._dictionaries:
            refill(dictionary, saved)
        for container, entries in self._containers:
            if len(container) != len(entries) or any(a is not b for a, b in zip(container, entries, strict=True)):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(entries)
        for value, descriptor, content in self._slots:
            if _slot(value, descriptor) is not content:
                if content is _MISSING:
                    descriptor.__delete__(value)
                else:
                    descriptor.__set__(value, content)
        for array, values in self._arrays:
            if array.shape == values.shape and array.tobytes() != values.tobytes():
                array[...] = values
        for put_state, state in self._generators:
            put_state(state)


def is_same(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> bool:
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


def class_attributes(kinds: Iterable[type]) -> dict[type, dict[str, Any]]:
    """Return the attributes of classes of modules and of their bases, except for the classes of torch and Panther."""
    bases = {base for kind in kinds for base in kind.__mro__ if _holds_values(base)}
    return {base: _attributes(base) for base in bases if base.__module__.partition(".")[0] not in _LIBRARIES}


def restore_classes(classes: Mapping[type, Mapping[str, Any]]) -> None:
    """Let classes have the attributes again that :func:`class_attributes` returned."""
    for kind, saved in classes.items():
        if not is_same(saved, present := _attributes(kind)):
            for name in present.keys() - saved.keys():
                delattr(kind, name)
            for name, value in saved.items():
                setattr(kind, name, value)


def _attributes(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


def _generator_state(value: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return the function that sets the state of a random generator, and its state; None for other values."""
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state()
    if isinstance(value, np.random.RandomState):
        return value.set_state, value.get_state()
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.setstate, value.getstate()
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.BitGenerator):
        return lambda state: setattr(bits, "state", state), bits.state
    return None


def _holds_values(kind: type) -> bool:
    """Return whether objects of a class only hold values, as far as its module tells."""
    module = kind.__module__.partition(".")[0]
    if issubclass(kind, nn.Module) or module in _PLAIN_MODULES:
        return True
    return module not in ("torch", "numpy", "builtins") and module not in sys.stdlib_module_names


def _slots_of(kind: type) -> list[MemberDescriptorType]:
    return [
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, MemberDescriptorType)
    ]


def _slot(value: Any, descriptor: MemberDescriptorType) -> Any:
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return _MISSING


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

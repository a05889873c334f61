"""What the attributes of modules hold, at any depth, and how it is put back: containers, objects, arrays, generators.

A model can keep its state in a cache object, a dictionary of dictionaries, a NumPy array or a generator of its own. The
objects stay the same, and get the contents that they had.
"""

__all__ = ["AttributeState", "class_attributes", "is_same", "refill", "restore_classes"]

import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from panther.compression.calibration.batches import SHARED

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

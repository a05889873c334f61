"""Values of Python as JSON and tensors, so that no file of somebody else can run code or make objects of any class.

A value consists of numbers, strings, tensors, lists, tuples, sets, dictionaries, dtypes, data classes, named tuples and
objects that have names. Objects that occur more than once in a value are one object again when it is read.
"""

__all__ = ["Decoder", "Encoder"]

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from panther.errors import CompressionError

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)}
_DICTIONARIES = {kind.__name__: kind for kind in (dict, OrderedDict)}


class Encoder:
    """Make JSON of values. It is a class, because a function that calls itself would keep the tensors in a cycle.

    Args:
        objects: Objects that are not stored, by name.
        offset_of: Stores a tensor and returns its offset.
    """

    def __init__(self, objects: Mapping[str, Any], offset_of: Callable[[Tensor], int]) -> None:
        self._names, self._offset_of = {id(value): name for name, value in objects.items()}, offset_of
        self._numbers: dict[int, int] = {}

    def place(self, value: Any) -> Any:
        """Return JSON of a tensor or of an object that is not stored; None for other values."""
        if (name := self._names.get(id(value))) is not None:
            return "name", name
        if not isinstance(value, Tensor):
            return None
        gradient = value.requires_grad if isinstance(value, nn.Parameter) else None
        return "tensor", gradient, self._offset_of(value), _dtype_name(value.dtype), tuple(value.shape)

    def encode(self, value: Any) -> Any:
        """Return a value as JSON, or raise CompressionError if it contains an object of a different kind."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if (place := self.place(value)) is not None:
            return place
        if kind is torch.dtype:
            return "dtype", _dtype_name(value)
        if id(value) in self._numbers:
            return "again", self._numbers[id(value)]
        self._numbers[id(value)] = len(self._numbers)
        if kind in _SEQUENCES.values():
            return kind.__name__, [self.encode(each) for each in value]
        if kind in _DICTIONARIES.values():
            return kind.__name__, [[self.encode(key), self.encode(each)] for key, each in value.items()]
        path = f"{kind.__module__}:{kind.__qualname__}"
        if _class_of(path) is not kind:
            raise CompressionError(
                f"a {kind.__name__} cannot be kept on disk, because it is not a tensor, a number, a data class or a "
                "collection of these: return these, or compress the model in memory, with pr.compress"
            )
        return "object", path, {name: self.encode(each) for name, each in _attributes(value).items()}


class Decoder:
    """Make the values of JSON that :class:`Encoder` has made.

    Args:
        objects: The objects that are not stored, by name.
        tensor_at: Returns the tensor at an offset, given its dtype and shape.
    """

    def __init__(self, objects: Mapping[str, Any], tensor_at: Callable[..., Tensor]) -> None:
        self._objects, self._tensor_at = objects, tensor_at
        self._values: list[Any] = []
        self._tensors: dict[Any, Tensor] = {}

    def decode(self, plain: Any) -> Any:
        """Return a value, or raise ValueError, TypeError, KeyError or similar if :class:`Encoder` has not made it."""
        if type(plain) in _PLAIN:
            return plain
        kind, *content = plain
        if kind == "name":
            return self._objects[content[0]]
        if kind == "tensor":
            return self._tensor(*content)
        if kind == "dtype":
            return _dtype(content[0])
        if kind == "again":
            return self._values[content[0]]
        number = len(self._values)
        self._values.append(None)
        if kind in _SEQUENCES:
            value: Any = _SEQUENCES[kind](map(self.decode, content[0]))
        elif kind in _DICTIONARIES:
            value = _DICTIONARIES[kind]((self.decode(key), self.decode(each)) for key, each in content[0])
        elif kind == "object" and (actual := _class_of(content[0])) is not None:
            value = _object(actual, {name: self.decode(each) for name, each in content[1].items()})
        else:
            raise ValueError(f"{plain!r:.60} is not a value of this process")
        self._values[number] = value
        return value

    def _tensor(self, gradient: bool | None, offset: int, dtype: str, shape: Sequence[int]) -> Tensor:
        key = gradient, offset, dtype, *shape
        if key not in self._tensors:
            tensor = self._tensor_at(offset, _dtype(dtype), tuple(shape))
            self._tensors[key] = tensor if gradient is None else nn.Parameter(tensor, gradient)
        return self._tensors[key]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def _class_of(path: str) -> type | None:
    """Return the class of a path, if a module that is imported already defines it.

    It is a data class, a named tuple or a class of :mod:`panther.compression`: making them has no effects.
    """
    module, _, names = path.partition(":")
    value: Any = sys.modules.get(module)
    for name in names.split("."):
        value = getattr(value, name, None)
    if not isinstance(value, type) or issubclass(value, nn.Module):
        return None
    is_named_tuple = issubclass(value, tuple) and hasattr(value, "_fields")
    is_ours = value.__module__.startswith("panther.compression.") and value.__module__ == module
    return value if is_named_tuple or is_ours or dataclasses.is_dataclass(value) else None


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):  # a data class of transformers, which leaves out what is None
        return dict(value)
    is_data = dataclasses.is_dataclass(value)
    names = (
        [each.name for each in dataclasses.fields(value)] if is_data else getattr(value, "_fields", None) or vars(value)
    )
    return {name: getattr(value, name) for name in names}


def _object(kind: Any, attributes: dict[str, Any]) -> Any:
    if issubclass(kind, (tuple, dict)):
        return kind(**attributes)
    value = object.__new__(kind)  # what __init__ checks has been checked, and it may take other arguments
    for name, each in attributes.items():
        object.__setattr__(value, name, each)
    return value

"""Selection of the layers of a space's line by name, by type, and by index among the matching layers."""

__all__ = ["Group", "as_group", "selected"]

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from panther.compression.linearization.survey import is_attention
from panther.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """A key of a space: the layers that satisfy all conditions.

    Args:
        names: A glob of names, such as ``"encoder.*.up"``, or a tuple of globs.
        type: A class of layers (with its subclasses) or its name, or a tuple.
        contains: A part of the name, or a tuple of alternative parts.
        where: A function of the module and its name.
        indices: Indices among the matching layers, in the model's order: an integer, a tuple or a range.
        joint: Whether all layers have the same values. Otherwise each layer has its values.

    Example:
        >>> Group(
        ...     "encoder.*", type="Linear", indices=range(0, 6, 2), joint=True
        ... ).label
        'encoder.* Linear [0:6:2]'
    """

    names: str | tuple[str, ...] = "*"
    type: Any = None
    contains: str | tuple[str, ...] | None = None
    where: Callable[[nn.Module, str], bool] | None = None
    indices: int | tuple[int, ...] | range | None = None
    joint: bool = False

    def __post_init__(self) -> None:
        """Convert lists to tuples, so that a group can be a key."""
        for name in ("names", "type", "contains", "indices"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name in ("names", "contains"):
            if not all(isinstance(item, str) for item in _as_tuple(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)!r} of a Group must be a text, or several")
        if not all(isinstance(item, str | type) for item in _as_tuple(self.type)):
            raise ConfigError(f"type={self.type!r} of a Group must be a class of layers, its name, or several")
        if self.where is not None and not callable(self.where):
            raise ConfigError(f"where={self.where!r} of a Group must be a function of a module and its name")
        indices = self.indices if isinstance(self.indices, range) else _as_tuple(self.indices)
        if any(isinstance(item, bool) or not isinstance(item, int) for item in indices):
            raise ConfigError(f"indices={self.indices!r} of a Group must be an integer, several, or a range")
        if self.indices is not None and not len(indices):
            raise ConfigError(f"indices={self.indices!r} of a Group selects nothing: leave it out for all")

    @property
    def label(self) -> str:
        """Return the group's name in the parameters of a study."""
        parts = ["|".join(_as_tuple(self.names))]
        parts += ["|".join(item if isinstance(item, str) else item.__name__ for item in _as_tuple(self.type))]
        parts += ["|".join(f"*{item}*" for item in _as_tuple(self.contains))]
        parts += [] if self.where is None else [getattr(self.where, "__name__", "where")]
        if isinstance(self.indices, range):
            parts.append(f"[{self.indices.start}:{self.indices.stop}:{self.indices.step}]")
        elif self.indices is not None:
            parts.append(str(list(_as_tuple(self.indices))))
        return " ".join(filter(None, parts))


def as_group(key: Any) -> Group:
    """Return the group that a key of a space stands for: a glob, a tuple of globs, a class, or a function.

    Raises:
        ConfigError: If it is something else.
    """
    if isinstance(key, Group):
        return key
    if isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(glob, str) for glob in key)):
        return Group(key)
    if isinstance(key, type):
        return Group(type=key)
    if callable(key):
        return Group(where=key)
    raise ConfigError(f"space has the key {key!r}: use a glob of names, a class of layers, a function or a Group")


def selected(model: nn.Module, group: Group, attention: bool = False) -> tuple[str, ...]:
    """Return the names of a group's modules, in the model's order: modules with a matrix, or attention.

    Raises:
        ConfigError: If there are none, or an index is out of range.
    """
    is_eligible = is_attention if attention else _is_layer
    names = tuple(
        name for name, module in model.named_modules() if name and is_eligible(module) and _matches(group, module, name)
    )
    if not names:
        raise ConfigError(
            f"{group.label!r} of the space matches no {'attention' if attention else 'layer'}: "
            "panther.inspect.tree(model) shows their names"
        )
    if group.indices is None:
        return names
    places: Sequence[int] = group.indices if isinstance(group.indices, range) else _as_tuple(group.indices)
    try:
        return tuple(dict.fromkeys(names[place] for place in places))
    except IndexError:
        raise ConfigError(
            f"{group.label!r} of the space needs the layers at {list(places)}, and {len(names)} match, from 0 to "
            f"{len(names) - 1}"
        ) from None


def _matches(group: Group, module: nn.Module, name: str) -> bool:
    types, parts = _as_tuple(group.type), _as_tuple(group.contains)
    kinds = [kind.__name__ for kind in type(module).__mro__]
    return (
        any(fnmatch.fnmatchcase(name, item) for item in _as_tuple(group.names))
        and (not types or any(item in kinds if isinstance(item, str) else isinstance(module, item) for item in types))
        and (not parts or any(part in name for part in parts))
        and (group.where is None or bool(group.where(module, name)))
    )


def _is_layer(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return () if value is None else value if isinstance(value, tuple) else (value,)

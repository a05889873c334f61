"""Which layers a line of a space is of: by name, by type, by place among those that match."""

__all__ = ["Group", "as_group", "selected"]

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from panther.compression.linearization.survey import is_attention
from panther.compression.targets import Selector
from panther.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """Layers that match all that is given, as a key of a space.

    Args:
        names: A glob of names, such as ``"encoder.*.up"``, or several.
        type: A class of layers (with its subclasses) or its name, or several.
        contains: A part that the name has, or one of several.
        where: A function of the module and its name.
        indices: Of the layers that match, in the model's order, those at this place or these places, or in a range.
        joint: Whether all the layers take the same values; else each has its own.

    Example:
        >>> Group("encoder.*", type="Linear", indices=range(0, 6, 2), joint=True).label
        'encoder.* Linear [0:6:2]'
    """

    names: str | tuple[str, ...] = "*"
    type: Any = None
    contains: str | tuple[str, ...] | None = None
    where: Callable[[nn.Module, str], bool] | None = None
    indices: int | tuple[int, ...] | range | None = None
    joint: bool = False

    def __post_init__(self) -> None:
        """Make lists tuples, so that a group can be a key."""
        for name in ("names", "type", "contains", "indices"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name in ("names", "contains"):
            if not all(isinstance(one, str) for one in _several(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)!r} of a Group must be a text, or several")
        if not all(isinstance(one, str | type) for one in _several(self.type)):
            raise ConfigError(f"type={self.type!r} of a Group must be a class of layers, its name, or several")
        if self.where is not None and not callable(self.where):
            raise ConfigError(f"where={self.where!r} of a Group must be a function of a module and its name")
        several = self.indices if isinstance(self.indices, range) else _several(self.indices)
        if any(isinstance(one, bool) or not isinstance(one, int) for one in several):
            raise ConfigError(f"indices={self.indices!r} of a Group must be an integer, several, or a range")
        if self.indices is not None and not len(several):
            raise ConfigError(f"indices={self.indices!r} of a Group selects nothing: leave it out for all")

    @property
    def label(self) -> str:
        """Return the group's name in the parameters of a study."""
        parts = ["|".join(_several(self.names))]
        parts += ["|".join(one if isinstance(one, str) else one.__name__ for one in _several(self.type))]
        parts += ["|".join(f"*{one}*" for one in _several(self.contains))]
        parts += [] if self.where is None else [getattr(self.where, "__name__", "where")]
        if isinstance(self.indices, range):
            parts.append(f"[{self.indices.start}:{self.indices.stop}:{self.indices.step}]")
        elif self.indices is not None:
            parts.append(str(list(_several(self.indices))))
        return " ".join(filter(None, parts))


def as_group(key: Any) -> Group:
    """Return the group that a key of a space stands for: a glob, several of them, a class, or a function.

    Raises:
        ConfigError: If it is something else.
    """
    if isinstance(key, Group):
        return key
    if isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(one, str) for one in key)):
        return Group(key)
    if isinstance(key, type):
        return Group(type=key)
    if callable(key):
        return Group(where=key)
    raise ConfigError(f"space has the key {key!r}: use a glob of names, a class of layers, a function or a Group")


def selected(model: nn.Module, group: Group, attention: bool = False) -> tuple[str, ...]:
    """Return the names of a group's modules, those that hold a matrix or are attention, in the model's order.

    Raises:
        ConfigError: If there are none, or not as many as an index needs.
    """
    wanted = is_attention if attention else _is_layer
    found = tuple(
        name for name, module in model.named_modules() if name and wanted(module) and _fits(group, module, name)
    )
    if not found:
        raise ConfigError(
            f"{group.label!r} of the space matches no {'attention' if attention else 'layer'}: "
            "panther.tuning.tree(model) shows their names"
        )
    if group.indices is None:
        return found
    places: Sequence[int] = group.indices if isinstance(group.indices, range) else _several(group.indices)
    try:
        return tuple(dict.fromkeys(found[place] for place in places))
    except IndexError:
        raise ConfigError(
            f"{group.label!r} of the space needs the layers at {list(places)}, and {len(found)} match, from 0 to "
            f"{len(found) - 1}"
        ) from None


def _fits(group: Group, module: nn.Module, name: str) -> bool:
    types, parts = _several(group.type), _several(group.contains)
    kinds = [kind.__name__ for kind in type(module).__mro__]
    return (
        any(fnmatch.fnmatchcase(name, one) for one in _several(group.names))
        and (not types or any(one in kinds if isinstance(one, str) else isinstance(module, one) for one in types))
        and (not parts or any(part in name for part in parts))
        and (group.where is None or bool(group.where(module, name)))
    )


def _is_layer(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _several(given: Any) -> tuple[Any, ...]:
    return () if given is None else given if isinstance(given, tuple) else (given,)


Key = Selector | Group

"""Dataclasses of settings, which are given by name and checked against their types."""

__all__ = ["Settings", "kinds"]

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from panther._setting_names import name_hint, value_hint
from panther.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of dataclasses of settings, which are given by name and checked against their types."""

    _other_names: ClassVar[Mapping[str, str]] = {}
    """Other names under which ``__init__`` takes settings too."""

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        """Refuse unknown names before ``__init__`` does, which could not suggest the right one."""
        known = [entry.name for entry in dataclasses.fields(cls)]
        if values:
            named = ", ".join(f"{name}={value!r}" for name, value in zip(known, values, strict=False))
            raise ConfigError(f"{cls.__name__} takes its settings by name: write {cls.__name__}({named})")
        for name in settings:
            if name not in known and name not in cls._other_names:
                hint = name_hint(name, known, cls.__name__)
                raise ConfigError(f"{name!r} is not a setting of {cls.__name__}: {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Convert and check every value."""
        for name, (kind, optional) in kinds(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if not (optional and value is None):
                # The only way to set a value of a frozen dataclass.
                object.__setattr__(self, name, _checked(name, value, kind, type(self).__name__))


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


@functools.cache
def kinds(settings: type) -> dict[str, tuple[Any, bool]]:
    """Return the type of each setting, and whether it may be None."""
    found = {}
    hints = typing.get_type_hints(settings)
    for name in (entry.name for entry in dataclasses.fields(settings)):
        hint = hints[name]
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        options = typing.get_args(hint) if is_union else (hint,)
        # Paths become strings, so they are no kind of their own.
        given = [one for one in options if one is not type(None) and typing.get_origin(one) is not os.PathLike]
        found[name] = (given[0] if len(given) == 1 else tuple(given), type(None) in options)
    return found


def _checked(name: str, value: Any, kind: Any, owner: str) -> Any:
    """Return a value as the type of its setting, or raise ConfigError."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        # The command line gives "a,b"; JSON and TOML have lists and no tuples.
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{name}={value!r} must be a list")
        return tuple(_checked(name, item, options[0], owner) for item in items)
    if options:  # of a Literal
        if value not in options:
            raise ConfigError(f"{name}={value!r} is unknown: {value_hint(name, value, options, owner)}")
        return value
    accepted = kind if isinstance(kind, tuple) else (kind,)
    if str in accepted and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value == "":
        raise ConfigError(f"{name} must not be empty")
    if float in accepted and type(value) is int:
        return float(value)
    # A bool is an int to Python.
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        words = " or ".join(_WORDS[one] for one in accepted)
        raise ConfigError(f"{name}={value!r} must be {words}, not {type(value).__name__}")
    return value

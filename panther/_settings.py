"""Base class of settings that are passed by name and checked against their types."""

__all__ = ["Settings", "kinds"]

import dataclasses
import functools
import inspect
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from panther._hints import name_hint, value_hint
from panther.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of dataclasses of settings, which are passed by name and checked against their types."""

    _other_names: ClassVar[Mapping[str, str]] = {}
    """Other names of settings that ``__init__`` accepts."""
    _title: ClassVar[str] = ""
    """What messages call the settings; empty for the name of the class."""

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        """Refuse unknown names with a hint, which the generated ``__init__`` could not give."""
        # The class's own settings come before those of its base classes.
        inherited = {entry.name for entry in dataclasses.fields(cls)} - inspect.get_annotations(cls).keys()
        setting_names = sorted((entry.name for entry in dataclasses.fields(cls)), key=inherited.__contains__)
        if values:
            assignments = ", ".join(f"{name}={value!r}" for name, value in zip(setting_names, values, strict=False))
            raise ConfigError(f"{cls.__name__} takes its settings by name: write {cls.__name__}({assignments})")
        for name in settings:
            if name not in setting_names and name not in cls._other_names:
                title = cls._title or cls.__name__
                hint = name_hint(name, setting_names, title)
                raise ConfigError(f"{name!r} is not a setting of {title}: {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Convert and check every value."""
        for name, (kind, optional) in kinds(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if not (optional and value is None):
                # A frozen dataclass has no other way to set a value.
                object.__setattr__(self, name, _checked(name, value, kind, self._title or type(self).__name__))


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


@functools.cache
def kinds(settings: type) -> dict[str, tuple[Any, bool]]:
    """Return the type of each setting, and whether it may be None."""
    types_by_name = {}
    hints = typing.get_type_hints(settings)
    for name in (entry.name for entry in dataclasses.fields(settings)):
        hint = hints[name]
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        options = typing.get_args(hint) if is_union else (hint,)
        # Paths become strings, so PathLike needs no type.
        members = [member for member in options if member is not type(None)]
        members = [member for member in members if typing.get_origin(member) is not os.PathLike]
        types_by_name[name] = (members[0] if len(members) == 1 else tuple(members), type(None) in options)
    return types_by_name


def _checked(name: str, value: Any, kind: Any, owner: str) -> Any:
    """Return a value as the type of its setting, or raise ConfigError."""
    if kind is Any:
        return value
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        # The command line gives "a,b"; JSON and TOML have lists and no tuples.
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{name}={value!r} must be a list")
        return tuple(_checked(name, item, options[0], owner) for item in items)
    if options:  # The type is a Literal.
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
    # In Python a bool is an int.
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        expected = " or ".join(_WORDS[accepted_type] for accepted_type in accepted)
        raise ConfigError(f"{name}={value!r} must be {expected}, not {type(value).__name__}")
    return value

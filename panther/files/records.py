"""JSON objects with the name of their format, a version and a checksum of all entries; and their typed values."""

__all__ = ["from_plain", "read_record", "read_valid_json", "record_checksum"]

import dataclasses
import json
import math
import types
import typing
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panther.errors import FormatError
from panther.files.reader import read_json


def read_record(path: Path, format: str, versions: range, writer: str, damaged: str) -> dict[str, Any]:
    """Return the JSON object of a file, or raise FormatError unless it has this ``"format"`` and one of the versions.

    Messages name the function that writes such files, and give the advice ``damaged`` if the file is not JSON or does
    not match its checksum. Files of version 1 have none.
    """
    record = read_valid_json(path, missing=f"give what {writer} wrote", damaged=damaged)
    if not isinstance(record, dict) or record.get("format") != format:
        raise FormatError(f"{path} was not written by {writer}: its 'format' must be {format!r}")
    version = record.get("format_version")
    if type(version) is not int or version not in versions:
        reads = str(versions[0]) if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        raise FormatError(
            f"{path} has format_version {version!r} and this Panther reads {reads}: use the Panther that wrote it "
            f"({record.get('panther_version', 'of unknown version')}), or a newer one"
        )
    if version > 1 and record.pop("checksum", None) != record_checksum(record):
        raise FormatError(f"{path} does not match its checksum: {damaged}")
    return record


def read_valid_json(path: Path, *, missing: str, damaged: str) -> Any:
    """Return the value of a JSON file, or raise FormatError, with the advice for a missing or for a damaged file."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise FormatError(f"{path} is missing: {missing}") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read as JSON ({error}): {damaged}") from None


def record_checksum(record: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a JSON object without its checksum: of its sorted entries, so that its layout is free."""
    return zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())


def from_plain(kind: Any, value: Any, place: str) -> Any:
    """Return a value of a type from the plain value that JSON has of it, or raise FormatError that names ``place``.

    Types are int, float, str, bool, None, Any, their unions, tuples, mappings of names, named tuples and dataclasses,
    whose fields may be missing if they have a default. None stands for a float that is not finite. An entry of a
    dataclass that is not a field must be a property, which follows from the fields.
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        (kind,) = (option for option in options if option is not type(None))
        return from_plain(kind, value, place)
    if origin is tuple and isinstance(value, list):
        items = (options[0],) * len(value) if options[1:] == (...,) else options
        if len(items) == len(value):
            pairs = enumerate(zip(items, value, strict=True))
            return tuple(from_plain(item, entry, f"{place}[{index}]") for index, (item, entry) in pairs)
    if origin is Mapping and isinstance(value, dict):
        return {key: from_plain(options[1], entry, f"{place}.{key}") for key, entry in value.items()}
    if origin is None and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")) and isinstance(value, dict):
        return _object_from_plain(kind, value, place)
    if kind is float and (value is None or (type(value) in (int, float) and math.isfinite(value))):
        return math.nan if value is None else float(value)
    if type(value) is kind:
        return value
    name = str(kind) if origin is not None else kind.__name__
    raise FormatError(f"{place} is {value!r:.60}, which is not a {name}")


def _object_from_plain(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        entries = {entry.name: entry for entry in dataclasses.fields(kind) if entry.init}
        no_default = dataclasses.MISSING
        needed = [n for n, f in entries.items() if f.default is no_default and f.default_factory is no_default]
        names = list(entries)
    else:
        names = needed = list(kind._fields)
    for name in value:
        if name not in names and not isinstance(getattr(kind, name, None), property):
            raise FormatError(f"{place} has the unknown entry {name!r}: its entries are {', '.join(names)}")
    if missing := [name for name in needed if name not in value]:
        raise FormatError(f"{place} has no entry {missing[0]!r}")
    return kind(**{n: from_plain(hints[n], value[n], f"{place}.{n}") for n in names if n in value})

"""JSON objects with the name of their format, a version, and a checksum of all entries."""

__all__ = ["read_record", "read_valid_json", "record_checksum"]

import json
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
    record = read_valid_json(path, missing=f"give a folder that {writer} wrote", damaged=damaged)
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

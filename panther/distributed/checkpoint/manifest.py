"""Read the manifest of a checkpoint, and check it completely before anything relies on it."""

__all__ = ["FORMAT", "MANIFEST", "VERSION", "damage", "places", "read_manifest"]

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from panther.errors import FormatError
from panther.files.records import read_record

MANIFEST = "checkpoint.json"
FORMAT, VERSION = "panther-checkpoint", 2
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_OPTIMIZER = ("states", "settings")
_DEEPEST = 200


class _InvalidError(Exception):
    """An entry of the manifest is not valid; the message is a part of a sentence."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, or raise FormatError unless the rest of the library can rely on it.

    A checksum covers it, it names no file outside of the folder, and the chunks of each tensor cover the tensor.
    """
    path = folder / MANIFEST
    versions = range(VERSION, VERSION + 1)
    manifest = read_record(path, FORMAT, versions, "panther.distributed.checkpoint", "the checkpoint is damaged")
    try:
        _check(manifest)
    except _InvalidError as error:
        raise FormatError(f"{path} is not valid: {error}") from None
    return manifest


def damage(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return a message about a file that is missing or has the wrong size, or None. Files are not read."""
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes and should have {size}"
    return None


def _check(manifest: Mapping[str, Any]) -> None:
    tensors, files = manifest.get("tensors"), manifest.get("files")
    if not isinstance(tensors, dict) or not isinstance(files, dict):
        raise _InvalidError("it does not list its files and tensors")
    for name, size in files.items():
        # A name such as ../x, which Panther never writes, would read a file outside of the folder.
        if not _FILE.fullmatch(name) or not _is_size(size):
            raise _InvalidError(f"it names the file {name!r} of {size!r} bytes")
    stored_bytes: Counter[str] = Counter()
    for name, entry in tensors.items():
        _check_tensor(name, entry, files)
        for chunk in entry["chunks"]:
            stored_bytes[chunk["file"]] += prod(chunk["shape"]) * getattr(torch, entry["dtype"]).itemsize
    for name, num_bytes in stored_bytes.items():
        if num_bytes > files[name]:
            raise _InvalidError(f"its tensors in {name} have {num_bytes:,} bytes, and the file has {files[name]:,}")
    world_size = manifest.get("world_size")
    if not _is_size(world_size) or not world_size or not _is_size(manifest.get("step")):
        raise _InvalidError(f"it is of step {manifest.get('step')!r} and of {world_size!r} ranks")
    if not _is_mapping(manifest.get("modules"), dict) or not _is_mapping(manifest.get("model")):
        raise _InvalidError("'modules' must map names to objects, and 'model' names to values")
    for key in ("random", "per_rank_extra"):
        values = manifest.get(key)
        if not isinstance(values, list) or len(values) != world_size:
            raise _InvalidError(f"{key!r} must have a value for each of {world_size} ranks")
    saved = manifest.get("optimizer")
    if saved is not None and not (_is_mapping(saved) and all(_is_mapping(saved.get(k), dict) for k in _OPTIMIZER)):
        raise _InvalidError("'optimizer' must have states and settings that map names to objects")
    try:
        for key in ("model", "extra", "random", "per_rank_extra", "rank_states", "optimizer"):
            if strangers := [place for place in places(manifest.get(key)) if place not in tensors]:
                raise _InvalidError(f"{key!r} has the tensor {strangers[0]!r}, which is not one of its tensors")
    except (RecursionError, TypeError):
        raise _InvalidError(f"{key!r} is nested too deeply, or names a tensor by an object") from None


def _check_tensor(name: str, entry: Any, files: Mapping[str, Any]) -> None:
    if not isinstance(entry, dict) or not _are_sizes(entry.get("shape")) or not isinstance(entry.get("chunks"), list):
        raise _InvalidError(f"the tensor {name!r} has no shape or no chunks")
    if not isinstance(getattr(torch, str(entry.get("dtype")), None), torch.dtype):
        raise _InvalidError(f"the tensor {name!r} has the dtype {entry.get('dtype')!r}, which torch does not have")
    covered, shape = 0, entry["shape"]
    for chunk in entry["chunks"]:
        if not isinstance(chunk, dict) or chunk.get("file") not in files:
            file = chunk.get("file") if isinstance(chunk, dict) else chunk
            raise _InvalidError(f"the tensor {name!r} names the file {file!r}, which is not one of its files")
        if not isinstance(chunk.get("key"), str) or type(chunk.get("checksum")) is not int:
            raise _InvalidError(f"a chunk of the tensor {name!r} has no key or no checksum")
        box: tuple[Any, Any] = chunk.get("offsets"), chunk.get("shape")
        if not all(_are_sizes(sizes) and len(sizes) == len(shape) for sizes in box):
            raise _InvalidError(f"a chunk of the tensor {name!r} has not the offsets and sizes of its dimensions")
        if any(offset + size > full for offset, size, full in zip(*box, shape, strict=True)):
            raise _InvalidError(f"the chunks of the tensor {name!r} reach beyond its shape {tuple(shape)}")
        covered += prod(chunk["shape"])
    # Entries that no chunk holds would keep what the memory held before.
    if covered != prod(shape):
        raise _InvalidError(f"the chunks of the tensor {name!r} have {covered} of its {prod(shape)} numbers")
    if _overlap([chunk for chunk in entry["chunks"] if prod(chunk["shape"])]):
        raise _InvalidError(f"the chunks of the tensor {name!r} overlap, so that they do not cover it")


def _overlap(chunks: list[dict[str, Any]]) -> bool:
    """Return whether any two boxes overlap; boxes are sorted along one dimension to compare only neighbours."""
    if len(chunks) < 2:
        return False
    begins = np.array([chunk["offsets"] for chunk in chunks], dtype=np.int64)
    ends = begins + np.array([chunk["shape"] for chunk in chunks], dtype=np.int64)
    # The dimension in which most boxes differ leaves the fewest pairs to compare; for shards of one dimension, none.
    dimension = max(range(begins.shape[1]), key=lambda axis: len(set(begins[:, axis].tolist())))
    order = np.argsort(begins[:, dimension], kind="stable")
    begins, ends = begins[order], ends[order]
    for index, end in enumerate(ends):
        last = int(np.searchsorted(begins[:, dimension], end[dimension]))
        later = slice(index + 1, max(last, index + 1))
        if ((begins[later] < end) & (begins[index] < ends[later])).all(axis=1).any():
            return True
    return False


def places(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the names of the tensors in an encoded value; raise RecursionError far below Python's own limit."""
    if depth > _DEEPEST:
        raise RecursionError
    if isinstance(value, dict) and "$tensor" in value:
        yield value["$tensor"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from places(item, depth + 1)


def _is_mapping(value: Any, of: type = object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, of) for item in value.values())


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_size, values))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 61

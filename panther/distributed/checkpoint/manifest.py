"""Read the manifest of a checkpoint, and check it completely before anything relies on it."""

__all__ = ["DEEPEST", "FORMAT", "MANIFEST", "VERSION", "damage", "read_manifest"]

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from panther.errors import FormatError
from panther.files.records import read_record

MANIFEST = "checkpoint.json"
FORMAT, VERSION = "panther-checkpoint", 2
DEEPEST = 200  # largest number of nested containers in a value, far below Python's recursion limit
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_CONTAINERS = ("$tensor", "$tuple", "$dict", "$counter")


class _InvalidError(Exception):
    """An entry of the manifest is not valid; the message is a part of a sentence."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, checked so that the rest of the library can rely on it.

    Types are checked, every tensor that an entry names must be listed, and the chunks of each tensor must cover it
    exactly.

    Raises:
        FormatError: If the manifest is missing or damaged, or has a different format or version.
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
    for name, entry in tensors.items():
        _check_tensor(name, entry, files)
    stored_bytes: Counter[str] = Counter()
    for entry in tensors.values():
        for chunk in entry["chunks"]:
            stored_bytes[chunk["file"]] += prod(chunk["shape"]) * getattr(torch, entry["dtype"]).itemsize
    for name, num_bytes in stored_bytes.items():
        if num_bytes > files[name]:
            raise _InvalidError(f"its tensors in {name} have {num_bytes:,} bytes, and the file has {files[name]:,}")
    world_size = manifest.get("world_size")
    if not _is_size(world_size) or not world_size or not _is_size(manifest.get("step")):
        raise _InvalidError(f"it is of step {manifest.get('step')!r} and of {world_size!r} ranks")
    if not _is_mapping(manifest.get("modules"), dict):
        raise _InvalidError("'modules' must map names to objects")
    for key in ("model", "extra"):
        _check_value(manifest.get(key), key, tensors)
    if not _is_mapping(manifest["model"]) or any(mark in manifest["model"] for mark in _CONTAINERS):
        raise _InvalidError("'model' must map names to values")
    for key in ("random", "per_rank_extra"):
        values = manifest.get(key)
        if not isinstance(values, list) or len(values) != world_size:
            raise _InvalidError(f"{key!r} must have a value for each of {world_size} ranks")
        _check_value(values, key, tensors)
    # Earlier versions saved no rank_states and layouts.
    rank_states, layouts = manifest.get("rank_states", [None]), manifest.get("layouts", {})
    if not isinstance(rank_states, list) or len(rank_states) not in (1, world_size):
        raise _InvalidError(f"'rank_states' must have one value, or one for each of {world_size} ranks")
    _check_value(rank_states, "rank_states", tensors)
    if not _is_mapping(layouts, dict) or not all(isinstance(each.get("like"), str) for each in layouts.values()):
        raise _InvalidError("'layouts' must map names of tensors to names of parameters")
    dims = [each.get("dims") for each in layouts.values()]
    if not all(each is None or _are_sizes([dim or 0 for dim in each]) for each in dims):
        raise _InvalidError("'layouts' must map names of tensors to their sharded dimensions")
    _check_optimizer(manifest.get("optimizer"), tensors)


def _check_optimizer(saved: Any, tensors: Mapping[str, Any]) -> None:
    if saved is None:
        return
    if not isinstance(saved, dict) or not isinstance(saved.get("class"), str):
        raise _InvalidError("'optimizer' must have a class")
    groups = saved.get("groups", [])  # which earlier versions did not save
    if not isinstance(groups, list) or not all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in groups
    ):
        raise _InvalidError("the optimizer's 'groups' must be lists of names")
    for key in ("states", "settings"):
        if not _is_mapping(saved.get(key), dict):
            raise _InvalidError(f"the optimizer's {key!r} must map names to objects")
        for name, value in saved[key].items():
            _check_value(value, f"optimizer.{name}", tensors)


def _check_tensor(name: str, entry: Any, files: Mapping[str, Any]) -> None:
    if not isinstance(entry, dict) or not _are_sizes(entry.get("shape")) or not isinstance(entry.get("chunks"), list):
        raise _InvalidError(f"the tensor {name!r} has no shape or no chunks")
    if not isinstance(getattr(torch, str(entry.get("dtype")), None), torch.dtype):
        raise _InvalidError(f"the tensor {name!r} has the dtype {entry.get('dtype')!r}, which torch does not have")
    for chunk in entry["chunks"]:
        if not isinstance(chunk, dict) or chunk.get("file") not in files:
            file = chunk.get("file") if isinstance(chunk, dict) else chunk
            raise _InvalidError(f"the tensor {name!r} names the file {file!r}, which is not one of its files")
        if not isinstance(chunk.get("key"), str) or type(chunk.get("checksum")) is not int:
            raise _InvalidError(f"a chunk of the tensor {name!r} has no key or no checksum")
        if not _are_sizes(chunk.get("offsets")) or not _are_sizes(chunk.get("shape")):
            raise _InvalidError(f"a chunk of the tensor {name!r} has no offsets or no shape")
    if gap := _gap(entry["shape"], entry["chunks"]):
        raise _InvalidError(f"the chunks of the tensor {name!r} {gap}")


def _gap(shape: list[int], chunks: list[dict[str, Any]]) -> str | None:
    """Return a message if chunks do not cover a tensor exactly once, and otherwise None."""
    if any(len(chunk["offsets"]) != len(shape) or len(chunk["shape"]) != len(shape) for chunk in chunks):
        return f"do not have the {len(shape)} dimensions of its shape"
    # A rank without any part of a tensor may have written an empty chunk.
    chunks = [chunk for chunk in chunks if prod(chunk["shape"])]
    begins = np.array([chunk["offsets"] for chunk in chunks], dtype=np.int64).reshape(len(chunks), len(shape))
    ends = begins + np.array([chunk["shape"] for chunk in chunks], dtype=np.int64).reshape(begins.shape)
    if (ends > np.array(shape, dtype=np.int64)).any():
        return f"reach beyond its shape {tuple(shape)}"
    covered = sum(prod(chunk["shape"]) for chunk in chunks)
    if covered != prod(shape):
        return f"have {covered} of its {prod(shape)} numbers"
    return "overlap" if _overlap(begins, ends) else None


def _overlap(begins: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> bool:
    """Return whether any two boxes overlap; boxes are sorted along one dimension to compare only neighbours."""
    if begins.shape[1] == 0:
        return len(begins) > 1
    # The dimension in which most boxes differ leaves the fewest pairs to compare; for shards of one dimension, none.
    dimension = max(range(begins.shape[1]), key=lambda axis: len(set(begins[:, axis].tolist())))
    order = np.argsort(begins[:, dimension], kind="stable")
    begins, ends = begins[order], ends[order]
    if (ends[:-1, dimension] <= begins[1:, dimension]).all():
        return False
    for index, end in enumerate(ends):
        last = np.searchsorted(begins[:, dimension], end[dimension])
        later = slice(index + 1, max(int(last), index + 1))
        if ((begins[later] < end) & (begins[index] < ends[later])).all(axis=1).any():
            return True
    return False


def _check_value(value: Any, place: str, tensors: Mapping[str, Any], depth: int = 0) -> None:
    """Raise unless a value is a valid encoded value, and its tensors are listed."""
    if depth > DEEPEST:
        raise _InvalidError(f"{place[:60]} is nested too deeply")
    if value is None or isinstance(value, bool | str | int | float):
        return
    if isinstance(value, list):
        for item in value:
            _check_value(item, place, tensors, depth + 1)
        return
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        for key, item in value.items():
            _check_value(item, f"{place}.{key}", tensors, depth + 1)
        return
    mark, inner = marks[0], value[marks[0]]
    if len(value) > 1 or mark not in _CONTAINERS or isinstance(inner, str) != (mark == "$tensor"):
        raise _InvalidError(f"{place} has the entries {', '.join(value)}")
    if mark == "$tensor":
        if inner not in tensors:
            raise _InvalidError(f"{place} is the tensor {inner!r}, which is not one of its tensors")
        return
    if not isinstance(inner, list):
        raise _InvalidError(f"{place} has a {mark} that is not a list")
    _check_value(inner, place, tensors, depth + 1)
    are_pairs = all(isinstance(pair, list) and len(pair) == 2 and _is_key(pair[0]) for pair in inner)
    if mark in ("$dict", "$counter") and not are_pairs:
        raise _InvalidError(f"{place} has a {mark} that is not a list of keys and values")


def _is_key(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.get("$tuple")
        return isinstance(value, list) and all(map(_is_key, value))
    return not isinstance(value, list)


def _is_mapping(value: Any, of: type = object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, of) for item in value.values())


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_size, values))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 61

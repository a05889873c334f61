"""Files of safetensors that are written tensor by tensor and read slice by slice.

The library of that name copies all tensors of a file before it writes them, and maps a file to read it, so that all
pages that were touched count as memory of the process. Here, one tensor at a time is in memory beside the caller's own.
"""

__all__ = ["StoredTensor", "contents_checksum", "read_slice", "stored_checksum", "stored_tensors", "write_file"]

import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from panther.errors import FormatError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BUFFER = 1 << 16  # shorter runs than this are read together with what is between them
_BLOCK = 1 << 22  # bytes that a checksum is taken of at a time


class StoredTensor(NamedTuple):
    """Where a file holds a tensor."""

    path: Path
    start: int
    """Position of its first byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_file(path: Path, tensors: Mapping[str, Tensor], value_of: Callable[[str], Tensor]) -> None:
    """Write a file, and synchronise it with the disk.

    Args:
        path: The file.
        tensors: Tensors by name, whose dtypes and shapes are written first. They need no values.
        value_of: Returns the tensor of a name, which is not held after it is written.

    Raises:
        FormatError: If the format has no name for a dtype.
    """
    # Large numbers first, so that each tensor begins at a multiple of its own size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise FormatError(f"{name!r} is {tensor.dtype}, which a safetensors file cannot hold: cast it")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(_bytes_of(value_of(name)))
        file.flush()
        os.fsync(file.fileno())


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, without reading them.

    Raises:
        FormatError: If it is missing, is not a valid file of safetensors, or holds a dtype that torch does not have.
    """
    try:
        # The library compares header and length of the file; no page of the tensors is touched.
        with safe_open(path, framework="pt"):
            pass
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
    except FileNotFoundError:
        raise FormatError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path} is not a valid safetensors file ({error})") from None
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            raise FormatError(f"{name!r} in {path} has the dtype {entry['dtype']}, which torch does not have")
        found[name] = StoredTensor(path, 8 + size + entry["data_offsets"][0], dtype, tuple(entry["shape"]))
    return found


def read_slice(stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Return a slice of a stored tensor; only its bytes are read, except between runs of less than 64 kB.

    Args:
        stored: The tensor.
        offsets: First index of the slice in each dimension.
        sizes: Shape of the slice.
        out: Where to read it; by itself if that is contiguous memory of the CPU in the stored dtype.

    Raises:
        FormatError: If the file ends before.
    """
    plain = out is not None and out.is_cpu and out.dtype is stored.dtype and out.is_contiguous()
    read: Any = out if plain else torch.empty(tuple(sizes), dtype=stored.dtype)
    shape, size = stored.shape, stored.dtype.itemsize
    # The dimensions from `last` on are read in one run: all after it are full.
    last = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    run = size * prod(sizes[last:])
    begin = stored.start + (size * offsets[last] * strides[last] if shape else 0)
    done, view = 0, _bytes_of(read)
    with io.BufferedReader(io.FileIO(stored.path), _BUFFER) as file:
        for index in product(*(range(o, o + s) for o, s in zip(offsets[:last], sizes[:last], strict=True))):
            file.seek(begin + size * sum(i * stride for i, stride in zip(index, strides, strict=False)))
            if file.readinto(view[done : done + run]) != run:
                raise FormatError(f"{stored.path} is not a valid safetensors file (it ends before its tensors)")
            done += run
    return read if plain or out is None else out.copy_(read)


def contents_checksum(tensor: Tensor, start: int = 0) -> int:
    """Return the CRC-32 of the contents, which takes a second for 4 GB; ``start`` is that of what comes before."""
    return zlib.crc32(_bytes_of(tensor), start)


def stored_checksum(stored: StoredTensor) -> int:
    """Return the CRC-32 of a stored tensor's contents, read a few megabytes at a time."""
    left, found = prod(stored.shape) * stored.dtype.itemsize, 0
    with open(stored.path, "rb") as file:
        file.seek(stored.start)
        while left and (block := file.read(min(left, _BLOCK))):
            left, found = left - len(block), zlib.crc32(block, found)
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

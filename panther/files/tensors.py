"""Files of safetensors that are written tensor by tensor, and read tensor by tensor or slice by slice.

The library of that name copies all tensors of a file before it writes them, and opens a file by its name each time.
Here one tensor at a time is in memory beside the caller's own, and a file is opened once: it may be replaced meanwhile.
"""

__all__ = [
    "MAPPED", "OpenTensor", "StoredTensor", "bytes_of", "contents_checksum", "mapped_copy", "new_tensor",
    "open_tensors", "read_slice", "stored_checksum", "stored_metadata", "stored_tensors", "write_file",
    "write_tensors",
]  # fmt: skip

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from panther.errors import FormatError
from panther.files.reader import check_no_pointer, open_file, parse_json
from panther.files.writer import new_file

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
MAPPED = "mapped-"  # the beginning of the names of files that are mapped
_LONGEST_HEADER = 100_000_000  # bytes, as in the library


class StoredTensor(NamedTuple):
    """The place of a tensor in a file."""

    path: Path
    start: int
    """Position of its first byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OpenTensor:
    """A tensor in an open file, which may have lost its name meanwhile."""

    stored: StoredTensor
    file: BufferedReader

    def read(self) -> Tensor:
        """Return the tensor, in memory of its own on the CPU, or raise FormatError.

        It takes its bytes once, and its address is aligned: at unaligned addresses, products can differ in the last
        bit.
        """
        tensor = new_tensor(self.stored.path, self.stored.shape, self.stored.dtype)
        try:
            self.file.seek(self.stored.start)
            num_bytes = self.file.readinto(bytes_of(tensor))
        except OSError as error:
            raise FormatError(f"{self.stored.path} cannot be read ({error})") from None
        self._check_end(num_bytes)
        return tensor

    def checksum(self, start: int = 0) -> int:
        """Return the CRC-32 of the contents, continued from ``start``, with a few megabytes in memory at a time."""
        num_bytes = 0
        try:
            for block in _blocks(self.file, self.stored):
                num_bytes, start = num_bytes + len(block), zlib.crc32(block, start)
        except OSError as error:
            raise FormatError(f"{self.stored.path} cannot be read ({error})") from None
        self._check_end(num_bytes)
        return start

    def _check_end(self, num_bytes: int) -> None:
        if num_bytes != self.stored.num_bytes:
            raise FormatError(f"{self.stored.path} is not a valid safetensors file (it ends before its tensors)")


def write_file(path: Path, tensors: Mapping[str, Tensor], value_of: Callable[[str], Tensor]) -> None:
    """Write a file, and replace an old one when it is on the disk.

    The dtypes and shapes of ``tensors``, which need no values, are written first. ``value_of`` returns the tensor of a
    name, which is not held after it is written. FormatError says that the format has no name for a dtype.
    """
    with new_file(path) as file:
        write_tensors(file, tensors, value_of)


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    value_of: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the contents of a file to an open one, as :func:`write_file` does, with further metadata."""
    # Large numbers first, so that each tensor begins at a multiple of its own size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise FormatError(f"{name!r} is {tensor.dtype}, which a safetensors file cannot hold: cast it")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in names:
        file.write(bytes_of(value_of(name)))


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, without reading them; raise FormatError if it is missing or not valid."""
    with _opened(path) as file:
        return _described_tensors(file, path)


def stored_metadata(path: Path) -> dict[str, str] | None:
    """Return the metadata of a file; None if it is missing or damaged."""
    try:
        with _opened(path) as file:
            metadata = _read_header(file, path)[0].get("__metadata__")
    except (ValueError, OSError):
        return None
    return metadata if isinstance(metadata, dict) else {}


@contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, OpenTensor]]:
    """Open a file, and yield its tensors, which are not read yet, in the order in which the file holds them.

    They are read from this file although another file takes its name within the block. FormatError says that it is
    missing or not valid.
    """
    with _opened(path) as file:
        stored = sorted(_described_tensors(file, path).items(), key=lambda item: item[1].start)
        yield {name: OpenTensor(place, file) for name, place in stored}


def _opened(path: Path) -> BufferedReader:
    try:
        return open_file(path)
    except FileNotFoundError:
        raise FormatError(f"{path} is missing") from None
    except OSError as error:
        raise FormatError(f"{path} is not a valid safetensors file ({error})") from None


def _described_tensors(file: BinaryIO, path: Path) -> dict[str, StoredTensor]:
    """Return the places of the tensors in an open file. Its header must describe every byte of the file once."""
    try:
        header, begin_of_data, num_bytes = _read_header(file, path)
        header.pop("__metadata__", None)
        tensors, places = {}, []
        for name, entry in header.items():
            dtype_name, shape, begin, end = _described(name, entry)
            if (dtype := _DTYPES.get(dtype_name)) is None:
                raise FormatError(f"{name!r} in {path} has the dtype {dtype_name}, which torch does not have")
            if end - begin != prod(shape) * dtype.itemsize:
                raise ValueError(f"{name!r} has {end - begin} bytes and the shape {shape} of {dtype_name}")
            places.append((begin, end))
            tensors[name] = StoredTensor(path, begin_of_data + begin, dtype, tuple(shape))
        last = 0
        for begin, end in sorted(places):
            if begin != last:
                raise ValueError(f"its tensors overlap or leave bytes between them at byte {min(begin, last)}")
            last = end
        if last != num_bytes:
            raise ValueError(f"its tensors have {last} bytes and it has {num_bytes}")
    except (ValueError, OSError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path} is not a valid safetensors file ({error})") from None
    return tensors


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header, the position of the first tensor, and the number of bytes from there to the file's end."""
    size = os.fstat(file.fileno()).st_size
    check_no_pointer(file, path)
    length = int.from_bytes(file.read(8), "little")
    begin_of_data = 8 + length
    if length > _LONGEST_HEADER or begin_of_data > size:
        raise ValueError(f"its header should have {length} bytes, and the file has {size}")
    header = parse_json(file.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header, begin_of_data, size - begin_of_data


def _described(name: str, entry: Any) -> tuple[str, list[int], int, int]:
    """Return dtype, shape, first byte and the byte after the last one of a tensor, as the header has them."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name!r} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has the dtype {dtype!r}, the shape {shape!r} and the offsets {offsets!r}")
    return dtype, shape, *offsets


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {int} and all(0 <= value < 2**63 for value in values)


def new_tensor(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of the CPU for numbers of a file, or raise FormatError if the memory does not hold it.

    A sparse file can have any size, and a system that promises any memory ends the process when it is used.
    """
    num_bytes = prod(shape) * dtype.itemsize
    try:
        if not hasattr(os, "sysconf") or num_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return torch.empty(shape, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError):  # of the allocator, or for sizes whose product needs more than 64 bits
        pass
    raise FormatError(
        f"{path} has a tensor of shape {shape} and {num_bytes:,} bytes, which the memory does not hold: give "
        "the file that was written, or a machine with more memory"
    )


def read_slice(stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int], out: Tensor | None = None) -> Tensor:
    """Return a slice of a stored tensor; only its bytes are read, except between runs of less than 64 kB.

    ``out`` is where to read it: by itself if that is contiguous memory of the CPU in the stored dtype.
    """
    plain = out is not None and out.is_cpu and out.dtype is stored.dtype and out.is_contiguous()
    read: Any = out if plain else new_tensor(stored.path, tuple(sizes), stored.dtype)
    shape, size = stored.shape, stored.dtype.itemsize
    # The dimensions from `last` on are read in one run: all after it are full.
    last = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    run = size * prod(sizes[last:])
    begin = stored.start + (size * offsets[last] * strides[last] if shape else 0)
    position, view = 0, bytes_of(read)
    with open_file(stored.path, _BUFFER) as file:
        for index in product(*(range(o, o + s) for o, s in zip(offsets[:last], sizes[:last], strict=True))):
            file.seek(begin + size * sum(i * stride for i, stride in zip(index, strides, strict=False)))
            if file.readinto(view[position : position + run]) != run:
                raise FormatError(f"{stored.path} is not a valid safetensors file (it ends before its tensors)")
            position += run
    return read if plain or out is None else out.copy_(read)


def contents_checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the contents, in a second for 4 GB."""
    return zlib.crc32(bytes_of(tensor))


def stored_checksum(stored: StoredTensor) -> int:
    """Return the CRC-32 of a stored tensor's contents, read a few megabytes at a time."""
    checksum = 0
    with open_file(stored.path) as file:
        for block in _blocks(file, stored):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _blocks(file: BufferedReader, stored: StoredTensor) -> Iterator[bytes]:
    """Yield the bytes of a stored tensor, as far as the file has them."""
    left = stored.num_bytes
    file.seek(stored.start)
    while left and (block := file.read(min(left, _BLOCK))):
        left -= len(block)
        yield block


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, in its own memory if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def mapped_copy(tensor: Tensor, folder: Path) -> Tensor:
    """Return a copy of a tensor that is mapped from a file, so that it takes no memory of the process's own.

    The file has no name and no descriptor when this function returns, and its space is free when the copy is freed.
    Writing to the copy copies the pages that are written. A process that is killed leaves at most one file behind,
    whose name begins with ``MAPPED``.
    """
    descriptor, name = tempfile.mkstemp(prefix=MAPPED, dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes_of(tensor))
        flat = torch.from_file(name, shared=False, size=tensor.numel(), dtype=tensor.dtype)
    finally:
        with suppress(PermissionError):  # Windows removes no file that is mapped
            os.unlink(name)
    return flat.view(tensor.shape)

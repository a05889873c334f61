"""Tensors that are kept in files, and mapped into memory: they take none of the process's own until they are written.

A file is read from the disk page by page as its tensors are used, and the system drops the pages where memory is short.
"""

__all__ = ["Spool", "freed_blocks_returned"]

import ctypes
import dataclasses
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from panther._torch import buffers_of, parameters_of, storage_key
from panther.errors import CompressionError
from panther.files.tensors import bytes_of

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES, _LARGEST_HEAP_BYTES = 2**20, 2**25
_ALIGNMENT = 64  # bytes; products with tensors at other addresses can differ in the last bit


class _Place(NamedTuple):
    """The place of a tensor in a file."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


class Spool:
    """A folder of files that hold tensors.

    Args:
        folder: The folder, which belongs to the spool.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, list[_Place]] = {}
        self._number = self._num_bytes = 0
        self._sizes: dict[str, int] = {}

    def write(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Write tensors to a file, which replaces the file of that name."""
        places, offset = [], 0
        path = self._folder / f"{name}.part"
        try:
            with path.open("wb") as file:
                for tensor in tensors:
                    offset += file.write(b"\0" * (-offset % _ALIGNMENT))
                    places.append(_Place(offset, tensor.dtype, tensor.shape))
                    offset += file.write(bytes_of(tensor))
            os.replace(path, self._folder / name)
        except OSError as error:
            raise CompressionError(
                f"{self._folder} cannot take what is kept on disk ({error.strerror or error}; "
                f"{self._num_bytes / 1e9:.3g} GB are there): name a folder of a larger disk"
            ) from error
        self._num_bytes += offset - self._sizes.get(name, 0)
        self._sizes[name] = offset
        self._places[name] = places

    def read(self, name: str) -> list[Tensor]:
        """Return the tensors of a file, which are mapped. Writing to them does not change the file."""
        places = self._places[name]
        if not any(place.shape.numel() for place in places):
            return [torch.empty(place.shape, dtype=place.dtype) for place in places]
        with (self._folder / name).open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return [_tensor_at(pages, place) for place in places]

    def remove(self, name: str) -> None:
        """Remove a file. Tensors that were read from it stay valid."""
        del self._places[name]
        self._num_bytes -= self._sizes.pop(name)
        (self._folder / name).unlink()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def kept(self, value: Any) -> Any:
        """Return the same value with all of its tensors in a file of the spool.

        The value is a tensor, a module, or a dictionary, list, tuple or dataclass of values. Tensors that are shared
        stay shared. Modules are changed in place.
        """
        tensors: dict[Any, Tensor] = {}
        _transformed(value, lambda tensor: tensors.setdefault(_key(tensor), tensor))
        name, self._number = f"kept-{self._number}", self._number + 1
        self.write(name, tensors.values())
        mapped = dict(zip(tensors, self.read(name), strict=True))
        self.remove(name)  # the tensors keep the file open
        return _transformed(value, lambda tensor: mapped[_key(tensor)])


@contextmanager
def freed_blocks_returned() -> Iterator[None]:
    """Give large blocks back to the system as they are freed, within the block, where the C library is glibc.

    Its heap keeps freed blocks of up to 32 MB otherwise, and can be several times as large as what is in it.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    try:
        if set_option is not None:
            set_option(_MMAP_THRESHOLD, _LARGE_BYTES)
        yield
    finally:
        if set_option is not None:  # where glibc's own limit ends up in a process that has freed large blocks
            set_option(_MMAP_THRESHOLD, _LARGEST_HEAP_BYTES)


def _key(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors of the same memory and layout."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _tensor_at(pages: mmap.mmap, place: _Place) -> Tensor:
    if not place.shape.numel():
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(pages, dtype=place.dtype, count=place.shape.numel(), offset=place.offset)
    return flat.view(place.shape)


def _transformed(value: Any, fn: Any) -> Any:
    """Return a value with ``fn`` of each of its tensors in the tensor's place."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            for tensors in (parameters_of(module), buffers_of(module)):
                for name, tensor in tensors.items():
                    if isinstance(tensor, nn.Parameter):
                        tensor.data = fn(tensor.data)
                    elif tensor is not None:
                        tensors[name] = fn(tensor)
        return value
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: _transformed(entry, fn) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_transformed(entry, fn) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _transformed(entry, fn) for name, entry in fields.items()})
    return value

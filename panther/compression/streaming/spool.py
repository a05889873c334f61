"""Values that are kept in files, whose tensors are mapped: they take no memory of the process until they are written.

A file is read from the disk page by page as its tensors are used, and the system drops the pages where memory is short.
Files have names, and a process that takes the place of a killed one finds those of the last :meth:`Spool.commit`.
"""

__all__ = ["Spool", "freed_blocks_returned"]

import ctypes
import io
import json
import os
import pickle
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from panther._process_settings import Block, ProcessSetting
from panther._torch import storage_key
from panther.compression.streaming.values import Decoder, Encoder
from panther.errors import CompressionError, FormatError
from panther.files.reader import file_checksum, open_file, parse_json
from panther.files.signed import read_signed, write_signed
from panther.files.tensors import bytes_of
from panther.files.writer import sync_folder

_Value = TypeVar("_Value")
Pages = npt.NDArray[np.uint8]
"""The tensors of a file, as bytes that are mapped into memory."""

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES, _LARGEST_HEAP_BYTES = 2**20, 2**25
_ALIGNMENT = 64  # bytes; products with tensors at other addresses can differ in the last bit
_END = 8  # bytes at the end of a file, the position at which the tensors end and the value begins

_JOURNAL = re.compile(r"journal-([0-9]{1,9})\.json")
_VALUE = ".value"  # the suffix of the files


class Spool:
    """A folder of named files, each with a value: tensors, and what contains them, as JSON.

    What is written and removed counts from the next :meth:`commit` on: until then, a new process finds the files as
    they were. The journal of a commit is signed, and holds the checksums of all files, which a new process compares
    when it reads a file first.

    Args:
        folder: The folder, which belongs to the spool. What no commit has named is removed from it.

    Attributes:
        references: Objects that values contain and files do not, such as modules of the model, by a name. They must be
            there before a value with them is read.
        notes: What a new process has to know beside the values, as JSON; from the last commit.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.references: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self._number = 0
        self._sizes: dict[str, int] = {}
        self._checksums: dict[str, int] = {}
        names = [(path, _JOURNAL.fullmatch(path.name)) for path in folder.iterdir()]
        journals = {int(match[1]): path for path, match in names if match}
        self._commits = max(journals, default=0)
        if self._commits:
            try:
                journal = read_signed(journals[self._commits])
                self._sizes, self._checksums, self.notes = (journal[key] for key in ("sizes", "checksums", "notes"))
            except (FormatError, OSError, KeyError) as error:
                raise self._damage(f"{error}") from None
        sizes = {path.name: path.lstat().st_size for path, _ in names if _VALUE in path.name}
        expected_sizes = {_file_name(name): size for name, size in self._sizes.items()}
        for name, size in expected_sizes.items():
            if sizes.get(name) != size:
                bytes_there = f"has {sizes[name]}" if name in sizes else "is missing"
                raise self._damage(f"{folder / name} is damaged: it should have {size} bytes, and {bytes_there}")
        for number in journals.keys() - {self._commits}:
            journals[number].unlink()
        for name in sizes.keys() - expected_sizes.keys():
            (folder / name).unlink()
        self._committed, self._unchecked = set(self._sizes), set(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with a prefix."""
        return [name for name in self._sizes if name.startswith(prefix)]

    def write(self, name: str, value: Any) -> None:
        """Write a value to the file of a name, which must be a new name or that of a file without a commit."""

        def write_value(file: "_ValueFile") -> None:
            plain = Encoder(self.references, file.offset_of).encode(value)
            text = json.dumps(plain, separators=(",", ":")).encode()
            end = file.position
            file.write(text)
            file.write(end.to_bytes(_END, "little"))

        self._write(name, write_value)

    def _write(self, name: str, write_contents: Callable[["_ValueFile"], Any]) -> None:
        assert name not in self._committed, name
        path = self._path(name)
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as file:
                write_contents(checked := _ValueFile(file))
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise self._disk_error(error) from error
        self._sizes[name], self._checksums[name] = checked.position, checked.checksum

    def read(self, name: str) -> Any:
        """Return the value of a name, whose tensors are mapped. Writing to them does not change the file."""
        path = self._path(name)
        try:
            is_sound = name not in self._unchecked or file_checksum(path) == self._checksums[name]
            with open_file(path) as file:
                file.seek(-_END, os.SEEK_END)
                end = int.from_bytes(file.read(_END), "little")
                file.seek(end)
                text = file.read()[:-_END]
            if is_sound:
                self._unchecked.discard(name)
                return Decoder(self.references, partial(_tensor_in, _pages(path, end))).decode(
                    parse_json(text.decode())
                )
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise self._damage(f"{path} cannot be read by this process ({type(error).__name__}: {error})") from error
        raise self._damage(f"{path} is damaged: it does not match its checksum")

    def _damage(self, reason: str) -> CompressionError:
        return CompressionError(f"{reason}: remove {self._folder}, and start again from the beginning")

    def remove(self, name: str) -> None:
        """Remove a file, from the next commit on. Values that were read from it stay valid."""
        del self._sizes[name]
        if name not in self._committed:  # otherwise a new process may still need it
            self._path(name).unlink()

    def commit(self) -> None:
        """Make sure that a new process finds everything that is here now, even after a failure of power."""
        try:
            for name in sorted(self._sizes.keys() - self._committed):
                descriptor = os.open(self._path(name), os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            sync_folder(self._folder)
            checksums = {name: self._checksums[name] for name in self._sizes}
            journal = {"sizes": self._sizes, "checksums": checksums, "notes": self.notes}
            write_signed(self._journal(self._commits + 1), journal)
        except OSError as error:
            raise self._disk_error(error) from error
        self._journal(self._commits).unlink(missing_ok=True)
        self._commits += 1
        for name in self._committed - self._sizes.keys():
            self._path(name).unlink()
        self._checksums, self._unchecked = checksums, self._unchecked & self._sizes.keys()
        self._committed = set(self._sizes)

    def kept(self, value: _Value) -> _Value:
        """Return the same value with all of its tensors in a file, which is there as long as they are.

        Tensors that are shared stay shared.
        """
        name, self._number = f"kept-{self._number}", self._number + 1
        structure = io.BytesIO()  # not in the file: layers are not JSON, and no other process may read them
        self._write(name, lambda file: _Pickler(structure, Encoder(self.references, file.offset_of)).dump(value))
        pages = _pages(self._path(name), self._sizes[name])
        structure.seek(0)
        mapped: _Value = _Unpickler(structure, Decoder(self.references, partial(_tensor_in, pages))).load()
        self.remove(name)  # the tensors keep the file
        return mapped

    def _journal(self, number: int) -> Path:
        return self._folder / f"journal-{number}.json"

    def _path(self, name: str) -> Path:
        return self._folder / _file_name(name)

    def _disk_error(self, error: OSError) -> CompressionError:
        return CompressionError(
            f"{self._folder} cannot take what is kept on disk ({error.strerror or error}; "
            f"{sum(self._sizes.values()) / 1e9:.3g} GB are there): free some of the disk and start again, which "
            "continues, or name a folder of a larger disk"
        )


# glibc does not tell its limit, and its own one ends up here in a process that has freed large blocks.
_heap_limit = [_LARGEST_HEAP_BYTES]


def _set_heap_limit(num_bytes: int) -> None:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, num_bytes)
    _heap_limit[0] = num_bytes


_RETURNED = ProcessSetting(lambda: _heap_limit[0], _set_heap_limit, _LARGE_BYTES)


def freed_blocks_returned() -> Block:
    """Give large blocks back to the system as they are freed, within the block, where the C library is glibc.

    Its heap keeps freed blocks of up to 32 MB otherwise, and can be several times as large as what is in it.
    """
    return _RETURNED.held()


def _file_name(name: str) -> str:
    return name + _VALUE


class _ValueFile:
    """A new file, which counts and checks its bytes, and has each tensor once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = self.checksum = 0
        self._places: dict[Any, tuple[int, Tensor]] = {}  # the tensors stay, so that no address is used twice

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.position, self.checksum = self.position + len(data), zlib.crc32(data, self.checksum)

    def offset_of(self, tensor: Tensor) -> int:
        """Return the offset of a tensor, which is written unless it is there already."""
        key = storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._places:
            self.write(b"\0" * (-self.position % _ALIGNMENT))
            self._places[key] = self.position, tensor
            self.write(bytes_of(tensor.detach()))
        return self._places[key][0]


def _pages(path: Path, size: int) -> Pages | None:
    """Return the first bytes of a file, mapped into memory; None if there are none."""
    # The module mmap would hold a descriptor for each file, and a process may have a thousand of them.
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy() if size else None


def _tensor_in(pages: Pages | None, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if pages is None or 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(pages, dtype=dtype, count=torch.Size(shape).numel(), offset=offset).view(shape)


class _Pickler(pickle.Pickler):
    """Pickle a value without its tensors, in the memory of this process."""

    def __init__(self, buffer: io.BytesIO, encoder: Encoder) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._encoder = encoder

    def persistent_id(self, value: Any) -> Any:
        """Return the place of a tensor or of a reference."""
        return self._encoder.place(value)


class _Unpickler(pickle.Unpickler):
    """Read what :class:`_Pickler` has made."""

    def __init__(self, buffer: io.BytesIO, decoder: Decoder) -> None:
        super().__init__(buffer)
        self._decoder = decoder

    def persistent_load(self, place: Any) -> Any:
        """Return the tensor or the object of a place."""
        return self._decoder.decode(place)

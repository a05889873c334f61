"""Values that are kept in files, whose tensors are mapped: they take no memory of the process until they are written.

A file is read from the disk page by page as its tensors are used, and the system drops the pages where memory is short.
Files have names, and a process that takes the place of a killed one finds those of the last :meth:`Spool.commit`.
"""

__all__ = ["BLOCK", "DiskNeeds", "Spool", "check_free", "freed_blocks_returned", "full_disk"]

import ctypes
import io
import json
import os
import pickle
import platform
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from panther._torch import storage_key
from panther.errors import CompressionError
from panther.files.tensors import bytes_of
from panther.files.writer import sync_folder, write_json

_Value = TypeVar("_Value")
Pages = npt.NDArray[np.uint8]
"""The tensors of a file, as bytes that are mapped into memory."""

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES, _LARGEST_HEAP_BYTES = 2**20, 2**25
_ALIGNMENT = 64  # bytes; products with tensors at other addresses can differ in the last bit
_END = 8  # bytes at the end of a file, the position at which the tensors end and the value begins

_JOURNAL = "journal-"  # the beginning of the name of a file, before the number of the commit
BLOCK = 2**24  # bytes of a file that are sent at a time
_VALUE = ".value"  # the suffix of the files


class Spool:
    """A folder of named files, each with a value: tensors, and whatever of Python contains them.

    The values are pickled, without their tensors, so that the folder must belong to the user. What is written and
    removed counts from the next :meth:`commit` on: until then, a new process finds the files as they were.

    With several ranks, each has a folder of its own, and all commit at the same points of their work: a new process
    finds the last commit that all ranks have made.

    Args:
        folder: The folder, which belongs to the spool. What no commit has named is removed from it.
        least: Returns the smallest of the numbers that the ranks give it.

    Attributes:
        references: Objects that values contain and files do not, such as modules of the model, by a name. They must be
            there before a value with them is read.
        notes: What a new process has to know beside the values, as JSON; from the last commit.
    """

    def __init__(self, folder: Path, least: Callable[[int], int] = int) -> None:
        self._folder, self._least = folder, least
        self.references: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self._number = 0
        self._sizes: dict[str, int] = {}
        self._removed_bytes = 0  # of files that the next commit removes
        self._mapped_bytes = 0  # of files that are removed, and whose tensors are in use
        journals = {int(path.stem.removeprefix(_JOURNAL)): path for path in folder.glob(f"{_JOURNAL}*.json")}
        self._commits = least(max(journals, default=0))
        if self._commits:
            journal = json.loads(journals[self._commits].read_text(encoding="utf-8"))
            self._sizes, self.notes = journal["sizes"], journal["notes"]
        for number in journals.keys() - {self._commits}:
            journals[number].unlink()
        sizes = {path.name: path.stat().st_size for path in folder.glob(f"*{_VALUE}*")}
        expected_sizes = {_file_name(name): size for name, size in self._sizes.items()}
        for name, size in expected_sizes.items():
            if sizes.get(name) != size:
                raise CompressionError(
                    f"{folder / name} should have {size} bytes, and {'has ' if name in sizes else 'is missing'}"
                    f"{sizes.get(name, '')}: remove {folder}, and start again from the beginning"
                )
        for name in sizes.keys() - expected_sizes.keys():
            (folder / name).unlink()
        self._committed = set(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with a prefix."""
        return [name for name in self._sizes if name.startswith(prefix)]

    @property
    def num_bytes(self) -> int:
        """Return the bytes that all files take on the disk, with removed files whose bytes are not free yet."""
        return sum(self._sizes.values()) + self._removed_bytes + self._mapped_bytes

    def size_of(self, prefix: str) -> int:
        """Return the bytes of the files whose names begin with a prefix."""
        return sum(self._sizes[name] for name in self.names(prefix))

    def needs(self, num_bytes: int) -> "DiskNeeds":
        """Return what the folder needs if its files will take ``num_bytes``, and what its disk has."""
        disk = f"{platform.node()} {self._folder.stat().st_dev}"
        return DiskNeeds(disk, f"{self._folder}", num_bytes, self.num_bytes, shutil.disk_usage(self._folder).free)

    def write(self, name: str, value: Any) -> None:
        """Write a value to the file of a name, which must be a new name or that of a file without a commit."""
        references = {id(each): key for key, each in self.references.items()}

        def write_value(file: BinaryIO) -> None:
            pickled = _Pickler.dumps(file, value, references)
            end = file.tell()
            file.write(pickled)
            file.write(end.to_bytes(_END, "little"))

        self._write(name, write_value)

    def _write(self, name: str, write_contents: Callable[[BinaryIO], Any]) -> None:
        assert name not in self._committed, name
        path = self._path(name)
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as file:
                write_contents(file)
                size = file.tell()
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise self._disk_error(error) from error
        self._sizes[name] = size

    def read(self, name: str) -> Any:
        """Return the value of a name, whose tensors are mapped. Writing to them does not change the file."""
        return self._read(name)[0]

    def _read(self, name: str) -> tuple[Any, Pages | None]:
        """Return the value of a name, and the mapped pages of its tensors; None if it has no tensors."""
        path = self._path(name)
        with path.open("rb") as file:
            file.seek(-_END, os.SEEK_END)
            end = int.from_bytes(file.read(_END), "little")
            # The module mmap would hold a descriptor for each file, and a process may have a thousand of them.
            pages = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8).numpy() if end else None
            file.seek(end)
            return _Unpickler(file, pages, self.references).load(), pages

    def remove(self, name: str) -> None:
        """Remove a file, from the next commit on. Values that were read from it stay valid."""
        size = self._sizes.pop(name)
        if name in self._committed:
            self._removed_bytes += size
        else:
            self._path(name).unlink()

    def recover(self, name: str) -> bool:
        """Take back the removal of a file, if no commit has come since; return whether the file is there."""
        if name not in self._sizes and name in self._committed:
            self._sizes[name] = size = self._path(name).stat().st_size
            self._removed_bytes -= size
        return name in self._sizes

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
            write_json(self._journal(self._commits + 1), {"sizes": self._sizes, "notes": self.notes})
        except OSError as error:
            raise self._disk_error(error) from error
        self._least(0)  # only what no rank needs any more is removed
        self._journal(self._commits).unlink(missing_ok=True)
        self._commits += 1
        for name in self._committed - self._sizes.keys():
            self._path(name).unlink()
        self._committed, self._removed_bytes = set(self._sizes), 0

    def kept(self, value: _Value) -> _Value:
        """Return the same value with all of its tensors in a file, which is there as long as they are.

        Tensors that are shared stay shared.
        """
        name, self._number = f"kept-{self._number}", self._number + 1
        self.write(name, value)
        mapped: _Value
        mapped, pages = self._read(name)
        if pages is not None:
            self._mapped_bytes += self._sizes[name]
            weakref.finalize(pages, self._unmap, self._sizes[name]).atexit = False
        self.remove(name)  # the tensors keep the file
        return mapped

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file."""
        with self._path(name).open("rb") as file:
            while block := file.read(BLOCK):
                yield block

    def receive(self, name: str, blocks: Iterable[Any]) -> None:
        """Write the contents of a file, as another spool has it, whose references have the same names."""
        self._write(name, lambda file: [file.write(block) for block in blocks])

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return self._sizes[name]

    def _journal(self, number: int) -> Path:
        return self._folder / f"{_JOURNAL}{number}.json"

    def _unmap(self, size: int) -> None:
        self._mapped_bytes -= size

    def _path(self, name: str) -> Path:
        return self._folder / _file_name(name)

    def _disk_error(self, error: OSError) -> CompressionError:
        return CompressionError(
            f"{self._folder} cannot take what is kept on disk ({error.strerror or error}; {self.num_bytes / 1e9:.3g} "
            "GB are there): free some of the disk and start again, which continues, or name a folder of a larger disk"
        )


class DiskNeeds(NamedTuple):
    """The bytes that a folder needs, the bytes that are there, and the bytes that its disk has free."""

    disk: str
    folder: str
    needed: int
    present: int
    free: int


def full_disk(folders: Sequence[DiskNeeds]) -> DiskNeeds | None:
    """Return a folder whose disk has less free than what the folders of all ranks on it need in addition, if any."""
    for each in folders:
        ranks = [other for other in folders if other.disk == each.disk]
        if sum(rank.needed - rank.present for rank in ranks) > each.free:
            return each
    return None


def check_free(folders: Sequence[DiskNeeds]) -> None:
    """Raise CompressionError if a disk has less free than what the folders of all ranks on it need in addition."""
    if (full := full_disk(folders)) is not None:
        num_ranks = sum(each.disk == full.disk for each in folders)
        count = f", as each of {num_ranks} ranks does" if num_ranks > 1 else ""
        raise CompressionError(
            f"what is kept on disk needs {full.needed:,} bytes in {full.folder}{count}, where {full.present:,} are, "
            f"and the disk has {full.free:,} free: free some of it, name a folder of a larger disk, or give fewer or "
            "shorter batches"
        )


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


def _file_name(name: str) -> str:
    return name + _VALUE


class _Pickler(pickle.Pickler):
    """Pickle a value, and write its tensors to the file; a tensor is pickled as its place there."""

    def __init__(self, buffer: Any, file: BinaryIO, references: Mapping[int, str]) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._file, self._references = file, references
        self._places: dict[Any, tuple[int, Tensor]] = {}  # the tensors stay, so that no address is used twice

    @classmethod
    def dumps(cls, file: BinaryIO, value: Any, references: Mapping[int, str]) -> bytes:
        """Write the tensors of a value, and return the pickled value."""
        buffer = io.BytesIO()
        cls(buffer, file, references).dump(value)
        return buffer.getvalue()

    def persistent_id(self, value: Any) -> Any:
        """Return the place of a tensor, or the name of a reference."""
        if (name := self._references.get(id(value))) is not None:
            return "reference", name
        if not isinstance(value, Tensor):
            return None
        kind = ("parameter", value.requires_grad) if isinstance(value, nn.Parameter) else ("tensor", False)
        return *kind, self._offset(value), value.dtype, tuple(value.shape)

    def _offset(self, tensor: Tensor) -> int:
        """Return the offset of a tensor in the file, where it is written unless it is there already."""
        key = storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._places:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            self._places[key] = self._file.tell(), tensor
            self._file.write(bytes_of(tensor.detach()))
        return self._places[key][0]


class _Unpickler(pickle.Unpickler):
    """Unpickle a value whose tensors are in mapped pages."""

    def __init__(self, file: BinaryIO, pages: Pages | None, references: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._pages, self._references = pages, references
        self._tensors: dict[Any, Tensor] = {}

    def persistent_load(self, place: Any) -> Any:
        """Return the tensor of a place, or the object of a reference."""
        if place[0] == "reference":
            return self._references[place[1]]
        if place not in self._tensors:
            kind, requires_grad, offset, dtype, shape = place
            numel = torch.Size(shape).numel()
            tensor = torch.empty(shape, dtype=dtype)
            if numel:
                assert self._pages is not None
                tensor = torch.frombuffer(self._pages, dtype=dtype, count=numel, offset=offset).view(shape)
            self._tensors[place] = nn.Parameter(tensor, requires_grad) if kind == "parameter" else tensor
        return self._tensors[place]

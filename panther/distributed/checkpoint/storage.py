"""Write and read the tensors of a checkpoint by torch's DCP: one safetensors file per rank, and a manifest.

Nothing is pickled, and every chunk of a tensor has a checksum, so that damaged files are refused and no file is
executed.
"""

__all__ = [
    "Chunk", "TensorReader", "empty", "placed", "read_tensors", "reader_of", "tensor_reader", "write_tensors",
]  # fmt: skip

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from panther._process_settings import ignored_warnings
from panther._torch import local_offsets
from panther._version import __version__
from panther.distributed.checkpoint.manifest import FORMAT, MANIFEST, VERSION
from panther.distributed.comm.agreement import common_error
from panther.distributed.comm.mesh import get_world_size
from panther.distributed.comm.ranks import Group, in_process_group
from panther.errors import CheckpointError, FormatError, PantherError
from panther.files import write_json
from panther.files.records import record_checksum
from panther.files.tensors import (
    StoredTensor,
    contents_checksum,
    new_tensor,
    read_slice,
    stored_checksum,
    stored_tensors,
    write_file,
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], group: Group, failure: str
) -> None:
    """Write this rank's tensors, and a manifest with the ``header``. All ranks must call it.

    Every rank raises the errors of all ranks, after the words ``failure``.
    """
    # Copies of a buffer such as BatchNorm's may differ between ranks, and DDP continues with the first rank's copy.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    with _errors_of_all_ranks(failure, get_world_size(group)):
        dcp_save(dict(tensors), storage_writer=_Writer(folder, header), planner=planner, **_dcp_ranks(group))


def read_tensors(
    reader: StorageReader, targets: dict[str, Tensor], group: Group = None, *, alone: bool = False
) -> None:
    """Read tensors into ``targets``, on all ranks, which raise the same error, or ``alone`` on one rank."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)  # states are flat already, and lists are in the manifest
    ranks = {"no_dist": True} if alone else _dcp_ranks(group)
    with _errors_of_all_ranks("", 1 if alone else get_world_size(group)):
        dcp_load(targets, storage_reader=reader, planner=planner, **ranks)


def _dcp_ranks(group: Group) -> dict[str, Any]:
    return {"process_group": group} if in_process_group() else {"no_dist": True}


@contextmanager
def _errors_of_all_ranks(failure: str, world: int) -> Iterator[None]:
    """Convert DCP's exception, which holds the errors of all ranks, into an error with a single sentence."""
    try:
        with ignored_warnings("torch.distributed is disabled"):  # true for a single process
            yield
    except CheckpointException as error:
        failed = {rank: _class_and_text(cause, writes=bool(failure)) for rank, (cause, _) in error.failures.items()}
        combined = common_error(failed, world)
        raise type(combined)(f"{failure}{combined}") from None


def _class_and_text(error: BaseException, writes: bool) -> tuple[type[Exception], str]:
    if isinstance(error, PantherError):
        return type(error), str(error)
    if isinstance(error, OSError) and not writes:
        return FormatError, f"{error}: the checkpoint cannot be read"
    if isinstance(error, OSError):
        advice = "make room there, or name another directory" if error.errno in _FULL else "name another directory"
        return CheckpointError, f"{error}: {advice}"
    return CheckpointError, f"{type(error).__name__}: {error}"


class _UnusedHooks:
    """Empty implementations of the steps of DCP's protocol that a folder does not need that is written or read once."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None: ...

    set_up_storage_reader = set_up_storage_writer

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # DCP calls this to choose a storage by a path, which is never done here


class _Writer(_UnusedHooks, StorageWriter):
    """A writer of this rank's chunks; the first rank also writes the manifest, which includes ``header``."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder, self.header = folder, header

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file with the chunks that the plan assigns to this rank."""
        file = f"rank-{plan.storage_data:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        items = {}
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                raise FormatError(f"{item.index.fqn!r} is not a tensor")
            # DCP returns a view of the tensor.
            resolved = planner.resolve_data(item)
            assert isinstance(resolved, Tensor)
            # A file may have more than one chunk of a tensor, so that the key contains the offsets.
            key = f"{item.index.fqn} at {','.join(map(str, item.index.offset or ()))}"
            tensors[key], items[key] = resolved.detach().resolve_conj().resolve_neg(), item
        results = []

        def value_of(key: str) -> Tensor:
            tensor = tensors[key].cpu()
            stored = {"file": file, "key": key, "checksum": contents_checksum(tensor)}
            results.append(WriteResult(items[key].index, tensor.nbytes, stored))
            return tensor

        if tensors:
            write_file(self.folder / file, tensors, value_of)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest with the places of all chunks, which the ranks have reported."""
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for name, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [
                {"offsets": list(x.offsets), "shape": list(x.sizes), **places[MetadataIndex(name, x.offsets)]}
                for x in saved.chunks
            ]
            dtype = str(saved.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(saved.size), "chunks": chunks}
        files = {path.name: path.stat().st_size for path in sorted(self.folder.glob("*.safetensors"))}
        versions = {"format": FORMAT, "format_version": VERSION, "panther_version": __version__}
        manifest = {**versions, **self.header, "files": files, "tensors": tensors}
        # The checksum is of the sorted entries, so that reformatting the file does not count as damage.
        manifest["checksum"] = record_checksum(manifest)
        write_json(self.folder / MANIFEST, manifest, indent=None)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Store the rank in each plan, so that each rank writes a separate file."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]


class Chunk(NamedTuple):
    """A chunk of a tensor, which a file holds under the name ``key``."""

    path: Path
    key: str
    checksum: int | None = None
    """The checksum of the chunk; None if the file has none."""
    kind: tuple[torch.dtype, tuple[int, ...]] | None = None
    """The dtype and the shape that the chunk must have in the file; None does not check them."""
    constant: int | None = None
    """The value of all entries of a chunk that is in no file; None for a chunk in a file."""


class TensorReader(_UnusedHooks, StorageReader):
    """A reader of slices of tensors in files of safetensors, which checks the chunks that contain the slices."""

    def __init__(self, metadata: Metadata, chunks: Mapping[MetadataIndex, Chunk]) -> None:
        self.metadata, self.chunks = metadata, chunks
        self._files: dict[Path, dict[str, StoredTensor]] = {}
        self._checked: set[Chunk] = set()

    def read_metadata(self, *args: Any) -> Metadata:
        """Return shapes, dtypes and chunks of the tensors."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read slice by slice, directly into the target if possible."""
        for item in plan.items:
            chunk = self.chunks[item.storage_index]
            stored = self._checked_chunk(chunk) if chunk.constant is None else None
            target = planner.resolve_tensor(item).detach()
            if stored is None:
                target.fill_(chunk.constant or 0)
            else:
                read_slice(stored, item.storage_offsets, item.lengths, target)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _checked_chunk(self, chunk: Chunk) -> StoredTensor:
        """Return the place of a chunk after checking it, so that damaged values never reach a tensor of the model."""
        path = chunk.path
        try:
            if path not in self._files:
                self._files[path] = stored_tensors(path)
            stored = self._files[path][chunk.key]
        except KeyError:
            raise FormatError(f"{path} is damaged: it lacks {chunk.key!r}") from None
        except FormatError as error:
            raise FormatError(f"{error}: the checkpoint is damaged") from None
        if chunk.kind not in (None, (stored.dtype, stored.shape)):
            raise FormatError(
                f"{path} is damaged: {chunk.key!r} is {stored.dtype}, {stored.shape} and should be "
                f"{', '.join(map(str, chunk.kind))}"
            )
        if chunk.checksum is not None and chunk not in self._checked:
            if stored_checksum(stored) != chunk.checksum:
                raise FormatError(f"{path} is damaged: {chunk.key!r} does not match its checksum")
            self._checked.add(chunk)
        return stored


def tensor_reader(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int], Sequence[tuple[Sequence[int], Sequence[int], Chunk]]]],
) -> TensorReader:
    """Return the reader of tensors, given their dtypes, their shapes, and the offsets and shapes of their chunks."""
    metadata: dict[str, Any] = {}
    chunks: dict[MetadataIndex, Chunk] = {}
    for name, (dtype, shape, parts) in tensors.items():
        places = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in parts]
        metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), places)
        chunks |= {MetadataIndex(name, offsets): chunk for offsets, _, chunk in parts}
    return TensorReader(Metadata(metadata), chunks)


def reader_of(folder: Path, manifest: Mapping[str, Any]) -> TensorReader:
    """Return the reader of a checkpoint."""
    tensors = {}
    for name, entry in manifest["tensors"].items():
        dtype, parts = getattr(torch, entry["dtype"]), []
        for chunk in entry["chunks"]:
            kind = dtype, tuple(chunk["shape"])
            stored = Chunk(folder / chunk["file"], chunk["key"], chunk["checksum"], kind)
            parts.append((chunk["offsets"], chunk["shape"], stored))
        tensors[name] = dtype, entry["shape"], parts
    return tensor_reader(tensors)


def placed(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the offset of this rank's shard in the full tensor, and the shard."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach()
    return local_offsets(tensor), tensor.to_local().detach()


def empty(entry: Mapping[str, Any], device: str = "cpu") -> Tensor:
    """Return an uninitialised tensor for an entry of the manifest; raise FormatError if the memory does not hold it."""
    shape, dtype = entry["shape"], getattr(torch, entry["dtype"])
    if device != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return new_tensor(Path(MANIFEST), tuple(shape), dtype)

"""Write and read the tensors of a checkpoint by torch's DCP: one safetensors file per rank, and a manifest.

Nothing is pickled, and every chunk of a tensor has a checksum, so that damaged files are refused and no file is
executed.
"""

__all__ = ["empty", "placed", "read_tensors", "reader_of", "write_tensors"]

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from panther._process_settings import ignored_warnings
from panther._torch import local_offsets
from panther._version import __version__
from panther.distributed.checkpoint._reader import Chunk, TensorReader, UnusedHooks
from panther.distributed.checkpoint.manifest import FORMAT, MANIFEST, VERSION
from panther.distributed.comm.agreement import common_error
from panther.distributed.comm.mesh import get_world_size
from panther.distributed.comm.ranks import Group, in_process_group
from panther.errors import CheckpointError, FormatError, PantherError
from panther.files import write_json
from panther.files.records import record_checksum
from panther.files.tensors import contents_checksum, new_tensor, write_file

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], group: Group, failure: str
) -> None:
    """Write this rank's tensors, and a manifest with the ``header``. All ranks must call it.

    Raises:
        CheckpointError: On every rank, with the errors of all ranks after the words ``failure``.
    """
    # Copies of a buffer such as BatchNorm's may differ between ranks, and DDP continues with the first rank's copy.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    with _errors_of_all_ranks(failure, get_world_size(group)):
        dcp_save(dict(tensors), storage_writer=_Writer(folder, header), planner=planner, **_where(group))


def read_tensors(
    reader: StorageReader, targets: dict[str, Tensor], group: Group = None, *, alone: bool = False
) -> None:
    """Read tensors into ``targets``, on all ranks at the same time, or with ``alone`` on one rank.

    Raises:
        FormatError: On every rank, if a file is missing or damaged.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)  # states are flat already, and lists are in the manifest
    where = {"no_dist": True} if alone else _where(group)
    with _errors_of_all_ranks("", 1 if alone else get_world_size(group)):
        dcp_load(targets, storage_reader=reader, planner=planner, **where)


def _where(group: Group) -> dict[str, Any]:
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


class _Writer(UnusedHooks, StorageWriter):
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


def reader_of(folder: Path, manifest: Mapping[str, Any]) -> TensorReader:
    """Return the reader of a checkpoint."""
    tensors: dict[str, Any] = {}
    chunks = {}
    for name, entry in manifest["tensors"].items():
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, entry["dtype"])),
            torch.Size(entry["shape"]),
            [
                ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"]))
                for chunk in entry["chunks"]
            ],
        )
        for chunk in entry["chunks"]:
            index = MetadataIndex(name, chunk["offsets"])
            kind = getattr(torch, entry["dtype"]), tuple(chunk["shape"])
            chunks[index] = Chunk(folder / chunk["file"], chunk["key"], chunk["checksum"], kind)
    return TensorReader(Metadata(tensors), chunks)


def placed(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the offset of this rank's shard in the full tensor, and the shard."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach()
    return local_offsets(tensor), tensor.to_local().detach()


def empty(entry: Mapping[str, Any], device: str = "cpu") -> Tensor:
    """Return an uninitialised tensor with the shape and dtype of an entry of the manifest.

    Raises:
        FormatError: If the memory does not hold it.
    """
    shape, dtype = entry["shape"], getattr(torch, entry["dtype"])
    if device != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return new_tensor(Path(MANIFEST), tuple(shape), dtype)

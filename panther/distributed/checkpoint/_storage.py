"""The folder of a checkpoint, which torch's DCP writes and reads here: one safetensors file per rank, and a manifest.

Nothing is pickled, and every chunk of a tensor has a checksum, so that a damaged or foreign file is refused and never
executed. A folder is written under a name that ends in ``.tmp``, and renamed once it is completely on the disk.
"""

__all__ = [
    "MANIFEST", "Reader", "Writer", "checksum", "damage", "folders", "placed", "publish", "read_manifest",
    "tensor_entries",
]  # fmt: skip

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

from panther._version import __version__
from panther.errors import FormatError
from panther.nn.io import read_record

MANIFEST = "checkpoint.json"
_FORMAT, _VERSION = "panther-checkpoint", 1
_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def folders(directory: Path) -> list[Path]:
    """Return the complete checkpoints of a directory by step, and those of one step in the order of writing."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if (match := _FOLDER.fullmatch(path.name)) and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found)]


def publish(temporary: Path, final: Path) -> None:
    """Give a finished folder its name, such that after a crash of the machine all of it is there or nothing."""
    _sync_folder(temporary)
    temporary.rename(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    # A renamed or new file is safe only once its folder is synchronised too.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class _Stored:
    """Where a chunk of a tensor is stored."""

    file: str
    key: str
    checksum: int


class _UnusedHooks:
    """The steps of DCP's protocol for which a folder that is written or read once has nothing to do."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    set_up_storage_reader = set_up_storage_writer

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: DCP asks this to choose a storage by a path, which is never done here."""
        return False


class Writer(_UnusedHooks, StorageWriter):
    """Writes this rank's chunks; the first rank also writes the manifest, which includes ``header``."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self.folder, self.header = folder, header

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file with the chunks that the plan assigns to this rank."""
        file = f"rank-{plan.storage_data:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        memories: set[int] = set()
        results = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                raise FormatError(f"{item.index.fqn!r} is not a tensor")
            # DCP gives a view of the tensor; a file needs contiguous memory on the CPU.
            resolved = planner.resolve_data(item)
            assert isinstance(resolved, Tensor)
            tensor = resolved.detach().resolve_conj().resolve_neg().cpu().contiguous()
            memory = tensor.untyped_storage()
            # safetensors refuses tensors that share memory, and would write all of a storage that is larger.
            if memory.nbytes() != tensor.nbytes or memory.data_ptr() in memories:
                tensor = tensor.clone()
            memories.add(memory.data_ptr())
            # A file may have several chunks of a tensor, which their offsets tell apart.
            key = f"{item.index.fqn} at {','.join(map(str, item.index.offset or ()))}"
            tensors[key] = tensor
            results.append(WriteResult(item.index, tensor.nbytes, _Stored(file, key, checksum(tensor))))
        if tensors:
            save_file(tensors, self.folder / file)
            with open(self.folder / file, "rb") as written:
                os.fsync(written.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest with the place of each chunk, which all ranks have reported."""
        places = {result.index: result for of_rank in results for result in of_rank}
        tensors = {}
        for name, saved in metadata.state_dict_metadata.items():
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [
                {"offsets": list(chunk.offsets), "shape": list(chunk.sizes)}
                | asdict(places[MetadataIndex(name, chunk.offsets)].storage_data)
                for chunk in saved.chunks
            ]
            dtype = str(saved.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(saved.size), "chunks": chunks}
        files = {path.name: path.stat().st_size for path in sorted(self.folder.glob("*.safetensors"))}
        manifest = {
            "format": _FORMAT,
            "format_version": _VERSION,
            "panther_version": __version__,
            **self.header,
            "files": files,
            "tensors": tensors,
        }
        # Over the sorted entries, so that reformatting the file does not count as damage.
        manifest["checksum"] = zlib.crc32(_canonical(manifest))
        with open(self.folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each plan its rank's number, so that each rank writes a file of its own."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]


class Reader(_UnusedHooks, StorageReader):
    """Reads the chunks that a rank asks for, and checks each."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.tensors = manifest["tensors"]
        self.places = {
            MetadataIndex(name, chunk["offsets"]): chunk
            for name, entry in self.tensors.items()
            for chunk in entry["chunks"]
        }

    def read_metadata(self, *args: Any) -> Metadata:
        """Return shapes, dtypes and chunks of the tensors from the manifest."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, entry["dtype"])),
                    torch.Size(entry["shape"]),
                    [
                        ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"]))
                        for chunk in entry["chunks"]
                    ],
                )
                for name, entry in self.tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, check and copy chunks, file by file."""
        by_file: dict[str, dict[str, list[Any]]] = {}
        checksums = {}
        for item in plan.items:
            chunk = self.places[item.storage_index]
            by_file.setdefault(chunk["file"], {}).setdefault(chunk["key"], []).append(item)
            checksums[chunk["file"], chunk["key"]] = chunk["checksum"]
        for file, by_key in by_file.items():
            path = self.folder / file
            try:
                # Memory-mapped: of a large file only the chunks that are asked for are read.
                with safe_open(path, framework="pt") as opened:
                    for key, items in by_key.items():
                        tensor = opened.get_tensor(key)
                        # Before it is copied, so that damage never reaches a tensor of the model.
                        if checksum(tensor) != checksums[file, key]:
                            raise FormatError(f"{path} is damaged: {key!r} does not match its checksum")
                        for item in items:
                            part = tensor
                            for dim, (offset, length) in enumerate(
                                zip(item.storage_offsets, item.lengths, strict=True)
                            ):
                                part = part.narrow(dim, offset, length)
                            target = planner.resolve_tensor(item).detach()
                            target.copy_(part)
                            planner.commit_tensor(item, target)
            except FileNotFoundError:
                raise FormatError(f"{path} is missing: the checkpoint is damaged") from None
            except (SafetensorError, OSError) as error:
                raise FormatError(f"{path} is damaged: it is not a valid safetensors file ({error})") from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, checked so that the rest of the library can rely on it.

    Raises:
        FormatError: If it is missing, foreign, of another version, or damaged.
    """
    path = folder / MANIFEST
    manifest = read_record(path, _FORMAT, _VERSION, "panther.distributed.checkpoint", "the checkpoint is damaged")
    checksum = manifest.pop("checksum", None)
    if checksum != zlib.crc32(_canonical(manifest)):
        raise FormatError(f"{path} does not match its checksum: the checkpoint is damaged")
    if wrong := _unsound(manifest):
        raise FormatError(f"{path} is not valid: {wrong}")
    return manifest


def damage(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Name a file that is missing or has the wrong size, without reading it; None if there is none."""
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes and should have {size}"
    return None


def tensor_entries(manifest: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """Return the entries of the tensors whose names have the prefix, by the rest of the name."""
    return {name[len(prefix) :]: entry for name, entry in manifest["tensors"].items() if name.startswith(prefix)}


def _unsound(manifest: Mapping[str, Any]) -> str | None:
    """Describe the error in a manifest that :func:`save` did not write, such as a file outside of the folder."""
    files, tensors = manifest.get("files"), manifest.get("tensors")
    if not isinstance(files, dict) or not isinstance(tensors, dict):
        return "'files' and 'tensors' must be objects"
    for name in files:
        # A name such as ../x would read outside of the folder.
        if not re.fullmatch(r"rank-\d{5,}\.safetensors", name):
            return f"it names the file {name!r}"
    for name, entry in tensors.items():
        try:
            if not isinstance(getattr(torch, entry["dtype"]), torch.dtype):
                return f"tensor {name!r} has dtype {entry['dtype']!r}"
            # Chunks of a tensor do not overlap, so equal counts mean that they cover it.
            covered = sum(math.prod(chunk["shape"]) for chunk in entry["chunks"])
            if covered != math.prod(entry["shape"]):
                return f"the chunks of tensor {name!r} do not cover it"
            if any(chunk["file"] not in files for chunk in entry["chunks"]):
                return f"tensor {name!r} is in a file that 'files' does not list"
            for chunk in entry["chunks"]:
                sizes = zip(chunk["offsets"], chunk["shape"], entry["shape"], strict=True)
                if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in sizes):
                    return f"a chunk of tensor {name!r} is outside of it"
        except (KeyError, TypeError, ValueError, AttributeError):
            return f"the entry of tensor {name!r} is incomplete"
    return None


def _canonical(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


def placed(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the offset of this rank's shard in the whole tensor, and the shard."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach()
    # Private module of torch, but what DCP itself places DTensors by.
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tensor.to_local().detach()


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the contents."""
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

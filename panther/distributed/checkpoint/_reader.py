"""Read slices of tensors from files of safetensors, as a storage of torch's DCP; each rank reads its shards."""

__all__ = ["Chunk", "TensorReader", "UnusedHooks"]

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from panther.errors import FormatError
from panther.files.tensors import StoredTensor, read_slice, stored_checksum, stored_tensors


class UnusedHooks:
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


class TensorReader(UnusedHooks, StorageReader):
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

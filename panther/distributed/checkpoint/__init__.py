"""Checkpoints of a training run: written by all ranks at once, and read in any other layout.

A directory has one folder for each saved step, ``step-00000100``. Tensors are in safetensors files, one a rank, under
the names of the whole model, cut as the ranks had them; torch's DCP (torch.distributed.checkpoint) puts the parts
together for whoever reads them. A folder gets its name when all of it is on the disk, so a process that is killed
leaves the checkpoints before it as they were. All ranks see the same directory.
"""

__all__ = [
    "LoadedCheckpoint",
    "PendingSave",
    "async_save",
    "checkpoints",
    "export",
    "latest",
    "load",
    "prune",
    "restore_architecture",
    "save",
]  # fmt: skip

from panther.distributed.checkpoint._api import (
    LoadedCheckpoint,
    PendingSave,
    async_save,
    checkpoints,
    export,
    latest,
    load,
    prune,
    restore_architecture,
    save,
)

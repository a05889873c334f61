"""Checkpoints of a training run: written by all ranks in parallel, and readable in any layout.

A directory has one folder for each saved step, such as ``step-00000100``. Tensors are in one safetensors file per rank,
under the names of the full model, with the sharding of the ranks; torch's DCP (torch.distributed.checkpoint) assembles
them for a reader with a different layout. A folder gets its name when it is completely on the disk, so that a killed
process does not damage earlier checkpoints. All ranks must see the same directory.
"""

from ._folders import checkpoints, latest
from ._load import LoadedCheckpoint, export, load, restore_architecture
from ._save import PendingSave, async_save, save

__all__ = [
    "LoadedCheckpoint",
    "PendingSave",
    "async_save",
    "checkpoints",
    "export",
    "latest",
    "load",
    "restore_architecture",
    "save",
]

"""Checkpoints of a training run: written by all ranks in parallel, and readable in any layout.

A directory has one folder for each saved step, such as ``step-00000100``. Tensors are in one safetensors file per rank,
under the names of the full model, with the sharding of the ranks; torch's DCP (torch.distributed.checkpoint) assembles
them for a reader with a different layout. A folder gets its name when it is completely on the disk, so that a killed
process does not damage earlier checkpoints. All ranks must see the same directory.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._load import LoadedCheckpoint, export, load, restore_architecture
    from ._save import PendingSave, async_save, save
    from .folders import checkpoints, latest

# PEP 562: torch's DCP takes a quarter of a second to import, and a run without checkpoints does not need it.
_HOMES = {
    "_load": ("LoadedCheckpoint", "export", "load", "restore_architecture"),
    "_save": ("PendingSave", "async_save", "save"),
    "folders": ("checkpoints", "latest"),
}

__all__ = [
    "LoadedCheckpoint", "PendingSave", "async_save", "checkpoints", "export", "latest", "load",
    "restore_architecture", "save",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"{__name__} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

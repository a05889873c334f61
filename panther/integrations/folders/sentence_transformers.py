"""Folders of sentence-transformers: a model of transformers among further modules, which modules.json lists."""

__all__ = ["loader_of", "model_folder", "module_folders"]

import json
from pathlib import Path

_MODULES, _CONFIG = "modules.json", "config_sentence_transformers.json"
_CLASS = "SentenceTransformer"


def module_folders(folder: Path) -> set[str]:
    """Return the names of the sub-folders of modules; empty without a modules.json that can be read."""
    return {path.split("/")[0] for path in _paths(folder) if path}


def model_folder(folder: Path) -> Path:
    """Return the folder of the transformers model in a folder of sentence-transformers; of another, the folder itself.

    The model is the first module. Its files are in the folder, or in a sub-folder such as ``0_Transformer``.
    """
    paths = _paths(folder)
    if not paths or (folder / "config.json").is_file():
        return folder
    inner = folder / paths[0]
    return inner if (inner / "config.json").is_file() and inner.parent == folder else folder


def loader_of(folder: Path) -> str | None:
    """Return the name of the class of sentence-transformers that loads a folder; None without a modules.json."""
    if not _paths(folder):
        return None
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        return str(config.get("model_type", _CLASS))
    except (OSError, ValueError, AttributeError):  # folders of the first versions have no such file
        return _CLASS


def _paths(folder: Path) -> list[str]:
    try:
        modules = json.loads((folder / _MODULES).read_text(encoding="utf-8"))
        return [str(module["path"]) for module in modules]
    except (OSError, ValueError, KeyError, TypeError):
        return []

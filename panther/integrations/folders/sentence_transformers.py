"""Folders of sentence-transformers: a model of transformers among further modules, which modules.json lists."""

__all__ = ["loader_of", "model_folder", "module_folders"]

from pathlib import Path, PurePosixPath

from panther.errors import FormatError
from panther.files.reader import check_inside, is_plain_name, read_json

_MODULES, _CONFIG = "modules.json", "config_sentence_transformers.json"
_CLASS = "SentenceTransformer"


def module_folders(folder: Path) -> set[str]:
    """Return the names of the sub-folders of modules; empty without a modules.json."""
    return {path[0] for path in _paths(folder) if path}


def model_folder(folder: Path) -> Path:
    """Return the folder of the transformers model in a folder of sentence-transformers; of another, the folder itself.

    The model is the first module. Its files are in the folder, or in a sub-folder such as ``0_Transformer``.
    """
    paths = _paths(folder)
    if not paths or len(paths[0]) != 1 or (folder / "config.json").is_file():
        return folder
    inner = folder / paths[0][0]
    return inner if (inner / "config.json").is_file() else folder


def loader_of(folder: Path) -> str | None:
    """Return the name of the class of sentence-transformers that loads a folder; None without a modules.json."""
    if not _paths(folder):
        return None
    try:
        name = read_json(folder / _CONFIG).get("model_type", _CLASS)
    except (OSError, ValueError, AttributeError):  # folders of the first versions have no such file
        return _CLASS
    return name if isinstance(name, str) and name.isidentifier() else _CLASS


def _paths(folder: Path) -> list[tuple[str, ...]]:
    """Return the path of each module in a folder, as the names of folders inside of each other."""
    file = folder / _MODULES
    try:
        modules = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise FormatError(f"{file} cannot be read as JSON ({error}): copy or write it again") from None
    try:
        paths = [PurePosixPath(module["path"]).parts for module in modules]
    except (KeyError, TypeError):  # of a different program
        return []
    for path in paths:
        if not all(map(is_plain_name, path)):
            raise FormatError(
                f"{file} names the folder {'/'.join(path)!r:.60}, and may name only folders inside {folder}: write "
                "the name of a folder there, such as '1_Pooling'"
            )
        if path:
            check_inside(folder.joinpath(*path), folder)
    return paths

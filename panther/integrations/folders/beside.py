"""Copy what lies beside the weights of a folder of transformers."""

__all__ = ["check_beside", "copy_beside"]

import fnmatch
import os
from collections.abc import Iterator
from pathlib import Path

from panther.errors import FormatError
from panther.files import copy_file
from panther.files.reader import check_inside, describe_kind
from panther.files.weights import PICKLES
from panther.integrations.folders.sentence_transformers import model_folder, module_folders

_NOT_COPIED = (*PICKLES, ".safetensors", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".py")
# Files that only training needs, which a compressed model does not continue, and weights in formats of other programs.
_LEFT_OUT = (
    ".*", "__pycache__", "trainer_state.json", "optimizer*", "scheduler*", "scaler*", "rng_state*", "events.out.*",
    "latest", "checkpoint-*", "global_step*", "runs", "logs", "wandb", "onnx", "openvino", "coreml", "original",
)  # fmt: skip


def copy_beside(folder: Path, out: Path) -> None:
    """Copy the files that the model needs beside its weights, such as the tokenizer and chat templates.

    Weights, config.json, code and files that only training reads are left out; config.json is written with the weights,
    so that a folder without weights does not look like a model. The folders of further modules of sentence-transformers
    are copied completely. A link to a file is copied as the file; :func:`check_beside` says what is refused.
    """
    for path, target in _files(folder, out):
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_file(path, target)


def check_beside(folder: Path, out: Path) -> None:
    """Raise FormatError if :func:`copy_beside` will refuse to copy a file, before anything is written.

    It refuses a link that leaves the folder, because the result, which people publish, would have what it leads to; and
    a linked folder or a special file among the files of a module, which would not be complete.
    """
    for _ in _files(folder, out):
        pass


def _files(folder: Path, out: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files to copy and where to."""
    inner, modules, not_read = model_folder(folder), module_folders(folder), os.path.realpath(out)
    waiting = [(folder, False)]
    while waiting:
        directory, is_module = waiting.pop()
        for path in sorted(directory.iterdir()):
            target = out / path.relative_to(folder)
            is_left_out = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _LEFT_OUT)
            if (is_left_out and not is_module) or os.path.realpath(path) == not_read:
                continue
            if path.is_dir() and not path.is_symlink():
                waiting.append((path, is_module or (directory == folder and path != inner and path.name in modules)))
            elif path.is_file() and (is_module or (_is_copied(path, inner) and not target.exists())):
                check_inside(path, folder)
                yield path, target
            elif is_module and not path.is_file():
                kind = describe_kind(path.lstat().st_mode)
                raise FormatError(
                    f"{path} is {kind}, and of a module only files are copied, and links to files: put a copy of the "
                    "file or the folder there, or remove it"
                )


def _is_copied(path: Path, inner: Path) -> bool:
    """Return whether a file is needed beside the weights of the model in the folder ``inner``."""
    is_weights = path.suffix in _NOT_COPIED or path.name.endswith(".index.json")
    return not is_weights and path != inner / "config.json"

"""Copy what lies beside the weights of a folder of transformers."""

__all__ = ["copy_beside"]

import fnmatch
import shutil
from collections.abc import Collection
from pathlib import Path

from panther.files import copy_file
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

    Weights, config.json, code and files that only training reads are left out. The folders that sentence-transformers
    puts beside the model are copied completely, because they contain further modules with weights. The model itself may
    be in a sub-folder. config.json is written with the weights, so that a folder without weights does not look like a
    model.
    """
    inner, unread = model_folder(folder), {out.resolve()}
    modules = module_folders(folder)
    if inner == folder:
        _copy(folder, out, modules, unread, leave="config.json")
    else:
        _copy(folder, out, modules - {inner.name}, unread | {inner.resolve()})
        _copy(inner, out / inner.name, (), unread, leave="config.json")


def _copy(folder: Path, out: Path, modules: Collection[str], unread: Collection[Path], leave: str = "") -> None:
    """Copy the files of a folder and of its sub-folders, except for the folders ``unread``.

    Sub-folders named in ``modules`` are copied completely. The file named ``leave`` is left out of this folder, but not
    of its sub-folders.
    """
    for path in sorted(folder.iterdir()):
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _LEFT_OUT) or path.resolve() in unread:
            continue
        target = out / path.name
        if path.is_dir() and not path.is_symlink():
            if path.name in modules:
                shutil.copytree(path, target, copy_function=copy_file, dirs_exist_ok=True)
            else:
                _copy(path, target, (), unread)
            continue
        is_weights = path.suffix in _NOT_COPIED or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name != leave and not target.exists():
            out.mkdir(parents=True, exist_ok=True)
            copy_file(path, target)

"""``panther tree``: the modules of a model, a compressed folder or a checkpoint, with parameters, bytes and forms."""

__all__ = ["add_parser", "run"]

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther.cli._arguments import add_option, non_negative
from panther.cli._user_function import call, current_folder_importable, names_function, wrong_return
from panther.errors import FormatError, PantherError
from panther.files import read_json

if TYPE_CHECKING:
    from panther.inspect import ModuleTree

_FLOATING = ("F", "BF", "C")  # begins of safetensors' floating and complex dtypes
_KINDS = "a folder of transformers, one that pr.save_compressed wrote, a checkpoint of Panther's Trainer"


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "tree", description="Show a model's modules with parameters, bytes, and what is sketched or quantized."
    )
    text = f"{_KINDS}, or module:function, which returns a model. Only the headers of files are read"
    parser.add_argument("model", metavar="MODEL", help=text)
    add_option(parser, "--depth", non_negative, "levels below the model to list; all if it is left out")
    parser.add_argument("--compare", metavar="OTHER", help="a second model: show the modules that are different in it")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the sizes, and print the table of a model or the differences between two models."""
    with current_folder_importable():
        module_tree: Any = _read(args.model, args.depth)
        if args.compare is not None:
            module_tree = module_tree.compare(_read(args.compare, args.depth))
    print(json.dumps(module_tree.to_dict(), indent=1) if args.json else module_tree)
    return 0


def _read(model: str, depth: int | None) -> "ModuleTree":
    from torch import nn

    from panther.inspect import tree

    folder = Path(model)
    if folder.is_dir():
        return _read_folder(folder, depth)
    if not names_function(model):
        raise PantherError(f"{model} is not a folder, and not module:function: give {_KINDS}, or a function")
    returned = call(model)
    module = returned[0] if isinstance(returned, tuple) and returned else returned
    if not isinstance(module, nn.Module):
        raise wrong_return(model, module, "an nn.Module")
    return tree(module, depth)


def _read_folder(folder: Path, depth: int | None) -> "ModuleTree":
    """Return the tree of a folder's files: no weight is read, and no class of the model is needed."""
    from panther.distributed.checkpoint.folders import folder_of
    from panther.distributed.checkpoint.manifest import MANIFEST
    from panther.files.weights import weight_files
    from panther.inspect import tree_of_tensors
    from panther.nn.io import INFERENCE_MANIFEST, inference_manifest, weights_path

    files = sorted(folder.glob("*.safetensors"))
    if (folder / MANIFEST).exists() or (not files and any(folder.glob("step-*"))):
        return _read_checkpoint(folder_of(folder), depth)
    if not files:
        raise PantherError(f"{folder} holds no .safetensors file and no checkpoint: give {_KINDS}")
    tensors: dict[str, tuple[tuple[int, ...], int, bool]] = {}
    if (folder / INFERENCE_MANIFEST).is_file():
        files = [weights_path(folder, inference_manifest(folder))]
    else:
        files = weight_files(folder)
    for file in files:
        for name, entry in _header(file).items():
            begin, end = entry["data_offsets"]
            tensors[name] = (tuple(entry["shape"]), end - begin, entry["dtype"].startswith(_FLOATING))
    return tree_of_tensors(tensors, _records(folder), depth)


def _read_checkpoint(folder: Path, depth: int | None) -> "ModuleTree":
    from panther.distributed.checkpoint.manifest import read_manifest
    from panther.distributed.checkpoint.storage import empty
    from panther.inspect import tree_of_tensors

    manifest = read_manifest(folder)
    tensors: dict[str, tuple[tuple[int, ...], int, bool]] = {}
    for name, entry in manifest["tensors"].items():
        if name.startswith("model."):
            item = empty(entry | {"shape": []})
            shape = tuple(entry["shape"])
            nbytes = math.prod(shape) * item.itemsize
            tensors[name.removeprefix("model.")] = (shape, nbytes, item.is_floating_point())
    return tree_of_tensors(tensors, manifest["modules"], depth)


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: the dtype, shape and place of each tensor."""
    from panther.files.tensors import read_header

    try:
        header = read_header(file)
        header.pop("__metadata__", None)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if not (0 <= begin <= end and isinstance(entry["dtype"], str) and isinstance(entry["shape"], list)):
                raise ValueError
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PantherError(f"{file} is not a valid safetensors file: copy or write it again") from None
    return header


def _records(folder: Path) -> dict[str, Any]:
    """Return the record of each compressed module, from panther.json or config.json."""
    for name, keys in (("panther.json", ("modules",)), ("config.json", ("quantization_config", "modules"))):
        try:
            records: Any = read_json(folder / name)
            for key in keys:
                records = records.get(key) or {}
            if records:
                return {name: spec for name, spec in records.items() if "alias_of" not in spec}
        except (OSError, ValueError, AttributeError, TypeError):
            continue
    return {}

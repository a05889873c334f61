"""``panther tree``: the modules of a model, a compressed folder or a checkpoint, with parameters, bytes and forms."""

__all__ = ["add_parser", "run"]

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther.cli._arguments import add_option, non_negative
from panther.cli._user_function import current_folder_importable, model_and_batches, names_function
from panther.errors import PantherError
from panther.files import read_json

if TYPE_CHECKING:
    from panther.inspect import ModuleTree

_KINDS = "a folder of transformers, one that pr.save_compressed wrote, a checkpoint of Panther's Trainer"


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "tree", description="Show a model's modules with parameters, bytes, and what is sketched or quantized."
    )
    help_text = f"{_KINDS}, or module:function, which returns a model. Only the headers of files are read"
    parser.add_argument("model", metavar="MODEL", help=help_text)
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
    from panther.inspect import tree

    if Path(model).is_dir():
        return _read_folder(Path(model), depth)
    if not names_function(model):
        raise PantherError(f"{model} is not a folder, and not module:function: give {_KINDS}, or a function")
    return tree(model_and_batches(model, "an nn.Module")[0], depth)


def _read_folder(folder: Path, depth: int | None) -> "ModuleTree":
    """Return the tree of a folder's files: no weight is read, and no class of the model is needed."""
    from panther.distributed.checkpoint.folders import folder_of
    from panther.distributed.checkpoint.manifest import MANIFEST
    from panther.files.tensors import stored_tensors
    from panther.files.weights import weight_files
    from panther.inspect import tree_of_tensors
    from panther.nn.io import INFERENCE_MANIFEST, inference_manifest, weights_path

    has_weights = any(folder.glob("*.safetensors"))
    if (folder / MANIFEST).exists() or (not has_weights and any(folder.glob("step-*"))):
        return _read_checkpoint(folder_of(folder), depth)
    if not has_weights:
        raise PantherError(f"{folder} holds no .safetensors file and no checkpoint: give {_KINDS}")
    if (folder / INFERENCE_MANIFEST).is_file():
        manifest = inference_manifest(folder)
        paths, records = [weights_path(folder, manifest)], manifest["modules"]
    else:
        paths, records = weight_files(folder), _records_of_config(folder)
    tensors = {
        name: (stored.shape, stored.num_bytes, stored.dtype.is_floating_point or stored.dtype.is_complex)
        for path in paths
        for name, stored in stored_tensors(path).items()
    }
    return tree_of_tensors(
        tensors, {name: record for name, record in records.items() if "alias_of" not in record}, depth
    )


def _read_checkpoint(folder: Path, depth: int | None) -> "ModuleTree":
    from panther.distributed.checkpoint.manifest import read_manifest
    from panther.distributed.checkpoint.storage import empty
    from panther.inspect import tree_of_tensors

    manifest = read_manifest(folder)
    tensors: dict[str, tuple[tuple[int, ...], int, bool]] = {}
    for name, entry in manifest["tensors"].items():
        if name.startswith("model."):
            item, shape = empty(entry | {"shape": []}), tuple(entry["shape"])
            tensors[name.removeprefix("model.")] = shape, math.prod(shape) * item.itemsize, item.is_floating_point()
    return tree_of_tensors(tensors, manifest["modules"], depth)


def _records_of_config(folder: Path) -> dict[str, Any]:
    """Return the record of each compressed module in the config.json of a folder of transformers."""
    try:
        records = read_json(folder / "config.json")["quantization_config"]["modules"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return records if isinstance(records, dict) else {}

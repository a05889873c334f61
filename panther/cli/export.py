"""``panther export``: a folder with a model, compressed or not, as an ONNX file, a torch program or plain tensors."""

__all__ = ["add_parser", "run"]

import argparse
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther._text import counted
from panther.cli._arguments import check_folder
from panther.cli._user_function import call, current_folder_importable, explained, names_function, wrong_return
from panther.errors import PantherError, require_extra
from panther.files import new_file, write_json

if TYPE_CHECKING:
    from torch import nn

_MOST_ERROR = 1e-4  # relative, of a float32 file
_MORE_ERROR = 4.0  # times the error that the model itself has in its dtype, for files of half precision
_SAMPLE = "give --sample module:function, which returns a mapping of the forward's arguments to tensors"


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser("export", description="Write a model for other programs. Batch and length may change.")
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="what panther compress wrote, or save_pretrained of transformers; or what pr.save_compressed wrote, with "
        "--model",
    )
    text = "onnx: model.onnx; torch: model.pt2 of torch.export; linears: safetensors with plain layers alone"
    parser.add_argument("--to", choices=("onnx", "torch", "linears"), required=True, help=text)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the result, new or empty")
    text = "module:function, which returns the architecture, where the folder has no config.json"
    parser.add_argument("--model", metavar="FUNCTION", help=text)
    text = "module:function, which returns inputs by name (default: tokens or an image, by config.json)"
    parser.add_argument("--sample", metavar="FUNCTION", help=text)
    text = "dtype of the weights (default: as they were saved)"
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, export, and print the files."""
    folder = Path(args.folder)
    if not folder.is_dir() and names_function(args.folder):
        raise PantherError(
            f"{folder} is a function, and export reads a folder: save the model by panther.save_compressed(model, "
            f"folder), and write panther export FOLDER --model {folder}"
        )
    if not folder.is_dir():
        raise PantherError(f"{folder} is not a folder: give one that holds a model (nothing is downloaded)")
    out = check_folder(args.out)
    if out.is_dir() and any(out.iterdir()):
        raise PantherError(f"--out {out} is not empty, and might hold another model: give a new folder, or clear it")
    if args.to == "onnx":
        for module in ("onnx", "onnxscript"):
            require_extra(module, "onnx")
    with current_folder_importable(), _empty_after_an_error(out):
        _export(args, _load(folder, args.model).eval(), out)
    for path in sorted(out.iterdir()):
        print(f"{path}  {path.stat().st_size:,} bytes")
    return 0


@contextmanager
def _empty_after_an_error(out: Path) -> Iterator[None]:
    """Remove what was written if an error ends the export: such files are not to be used, and keep the next try off."""
    existed = out.is_dir()
    try:
        yield
    except BaseException:
        for path in out.iterdir() if out.is_dir() else ():
            path.unlink()
        if out.is_dir() and not existed:
            out.rmdir()
        raise


def _export(args: argparse.Namespace, model: Any, out: Path) -> None:
    """Write the model in the form that was asked for."""
    import torch

    if args.dtype is not None:
        model = model.to(getattr(torch, args.dtype))
    if args.to == "linears":
        _write_linears(model, out)
        return
    sample = _sample(model, args.sample)
    given = f"those of --sample {args.sample}" if args.sample else "tokens or an image of its sizes"
    with explained(f"{type(model).__name__} does not run on its inputs, {given}"), torch.no_grad():
        model(**sample)
    for module in model.modules():  # a module may have its own configuration, as the decoder of T5 has
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # a cache is an output that other programs cannot hand back
    with explained(f"{type(model).__name__} cannot be exported"):
        _write_program(model, sample, args.to, out)
    if args.to == "onnx":
        _compare(model, sample, out / "model.onnx")


def _load(folder: Path, function: str | None) -> "nn.Module":
    import torch

    import panther as pr

    if function is not None:
        made = call(function)
        model = made[0] if isinstance(made, tuple) and made else made
        if not isinstance(model, torch.nn.Module):
            raise wrong_return(function, made, "an nn.Module, or a pair of one and a list of batches")
        return pr.load_compressed(folder, model)
    if not (folder / "config.json").is_file():
        raise PantherError(
            f"{folder} holds no config.json: give --model module:function, which builds the architecture"
        )
    from panther.cli._transformers import quietly

    with quietly(f"{folder} cannot be loaded"):
        return pr.from_pretrained(folder)


def _sample(model: Any, function: str | None) -> dict[str, Any]:
    """Return inputs by name: those of a function, or tokens or an image of the config's sizes."""
    import torch

    from panther.cli._transformers import sample_inputs

    if function is None:
        sample = sample_inputs(model, 2, 7, _SAMPLE)
        dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in sample.items()}
    made = call(function)
    if not isinstance(made, dict) or not all(isinstance(value, torch.Tensor) for value in made.values()):
        raise wrong_return(function, made, "a mapping of the forward's arguments to tensors")
    return made


def _write_program(model: Any, sample: dict[str, Any], kind: str, out: Path) -> None:
    """Export with a batch that may change, and a length where an input is a matrix of integers."""
    import torch

    dynamic = torch.export.Dim.DYNAMIC
    shapes = {
        name: {0: dynamic} | ({1: dynamic} if tensor.dim() == 2 and not tensor.is_floating_point() else {})
        for name, tensor in sample.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch's own modules
        program = torch.export.export(model, (), sample, dynamic_shapes=shapes)
        if kind == "torch":
            with new_file(out / "model.pt2") as file:
                torch.export.save(program, file)
        else:
            _check_operators(type(model).__name__, program)
            before = logging.root.manager.disable
            logging.disable(logging.WARNING)  # it would name optional packages of torch that are not installed
            try:
                torch.onnx.export(program, (), str(out / "model.onnx"), dynamo=True, verbose=False)
            finally:
                logging.disable(before)


def _check_operators(kind: str, program: Any) -> None:
    """Raise if a program contains operators of Panther, as that of linear attention does: ONNX has no form for them."""
    import torch

    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    targets = (node.target for graph in graphs for node in graph.nodes)
    names = sorted({str(target) for target in targets if getattr(target, "namespace", "") == "panther"})
    if names:
        raise PantherError(
            f"{kind} contains {', '.join(names)}, of linear attention, and ONNX has no such operator: use --to torch, "
            "or export the model with softmax attention"
        )


def _compare(model: Any, sample: dict[str, Any], path: Path) -> None:
    """Run the file by onnxruntime, if there is one, and print how far its first output is from the model's.

    A file of half precision is compared with the model in float32, from which the model's own output in that precision
    is as far as its rounding is. The model is in float32 afterwards.
    """
    import torch

    if find_spec("onnxruntime") is None:
        print("not run: onnxruntime is not installed (pip install onnxruntime), so nothing was compared")
        return
    with torch.no_grad():
        own_output = _first_output(model(**sample))
    if own_output.dtype is torch.bfloat16:
        print(
            "not compared: onnxruntime has no kernels for bfloat16 on CPUs (--dtype float32 writes a file that is "
            "compared)"
        )
        return
    runtime: Any = require_extra("onnxruntime", "onnx")
    arrays = {name: tensor.numpy() for name, tensor in sample.items()}
    with explained(f"onnxruntime does not run {path}"):
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (file_output, *_) = session.run(None, {entry.name: arrays[entry.name] for entry in session.get_inputs()})
    reference, limit = own_output, _MOST_ERROR
    if own_output.dtype is torch.float16:
        wide = {name: x.float() if x.is_floating_point() else x for name, x in sample.items()}
        with torch.no_grad():
            reference = _first_output(model.float()(**wide))
        own_error = _distance(own_output, reference)
        limit = max(_MORE_ERROR * own_error, _MORE_ERROR * torch.finfo(torch.float16).eps)
    error = _distance(torch.from_numpy(file_output), reference)
    if not error <= limit:
        raise PantherError(
            f"{path} gives other outputs than the model, with a relative difference of {error:.1e}, more than "
            f"{limit:.1e}: nothing was kept, write --to torch"
        )
    compared = "the model's output" if reference is own_output else "the output of the model in float32"
    print(f"onnxruntime gives {compared}, with a relative difference of {error:.1e}")


def _first_output(output: Any) -> Any:
    import torch

    return output if isinstance(output, torch.Tensor) else next(iter(getattr(output, "values", lambda: output)()))


def _distance(output: Any, reference: Any) -> float:
    import torch

    difference = torch.linalg.vector_norm(output.double() - reference.double())
    return float(difference / torch.linalg.vector_norm(reference.double()))


def _write_linears(model: "nn.Module", out: Path) -> None:
    """Write the tensors of plain layers alone, and which layers became a pair."""
    import panther as pr

    report = pr.to_linears_(model)
    if report.skipped:
        name, reason = report.skipped[0]
        raise PantherError(
            f"{counted(len(report.skipped), 'layer')} cannot be plain, the first of them {name!r}: {reason}"
        )
    pr.save_compressed(model, out)
    (out / "panther.json").unlink()  # what is left is plain, and made to be read without Panther
    record = {layer.name: layer.became for layer in report.replaced}
    write_json(out / "layers.json", record)

"""``panther export``: a folder with a model, compressed or not, as an ONNX file, a torch program or plain tensors."""

__all__ = ["add_parser", "run"]

import argparse
import logging
import shutil
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

_MAX_ERROR = 1e-4  # relative error of a file in float32
_MAX_ERROR_RATIO = 4.0  # error of a file in float16, divided by the error of the model itself in float16
# What a file without config.json beside it says about a folder, and what to do about it.
_FOREIGN_FOLDERS = {
    "adapter_config.json": "an adapter of PEFT: load it with its base, call merge_and_unload(), and save the model",
    "model_index.json": "a pipeline of diffusers: give one of its models, with --model module:function",
    "saved_model.pb": "a model of TensorFlow: build it in torch first",
    "*.gguf": "a model of llama.cpp: load it by transformers' from_pretrained(..., gguf_file=...) and save the model",
    "*.onnx": "a model in ONNX already: export the folder that it was made of",
    "*.pt2": "a program of torch.export already: export the folder that it was made of",
}
_SAMPLE = "give --sample module:function, which returns a mapping of the forward's arguments to tensors"


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser("export", description="Write a model for other programs. Batch and length may change.")
    parser.add_argument(
        "model_path",
        metavar="MODEL",
        help="a folder that panther compress wrote, or save_pretrained of transformers; or one that pr.save_compressed "
        "wrote, with --model; or module:function, which returns a model",
    )
    text = (
        "onnx: model.onnx; torch: model.pt2 of torch.export; linears: safetensors with plain layers alone; "
        "compressed-tensors: a folder with quantized layers, for programs without Panther"
    )
    parser.add_argument("--to", choices=("onnx", "torch", "linears", "compressed-tensors"), required=True, help=text)
    text = "program that will read a folder of compressed-tensors (default: %(default)s)"
    parser.add_argument("--reader", choices=("transformers", "vllm"), default="transformers", help=text)
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
    folder = Path(args.model_path)
    is_function = names_function(args.model_path)
    if is_function and args.model is not None:
        raise PantherError(f"{folder} and --model {args.model} both return a model: give one of them")
    if not folder.is_dir() and not is_function:
        raise PantherError(
            f"{folder} is not a folder, and not module:function: give one that holds a model (nothing is downloaded), "
            "or a function"
        )
    out = check_folder(args.out)
    if out.is_dir() and any(out.iterdir()):
        raise PantherError(f"--out {out} is not empty, and might hold another model: give a new folder, or clear it")
    if args.to == "onnx":
        for module in ("onnx", "onnxscript"):
            require_extra(module, "onnx")
    with current_folder_importable(), _empty_after_an_error(out):
        model = _model_of(args.model_path) if is_function else _load(folder, args.model)
        _export(args, model.eval(), out)
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        print(f"{path}  {path.stat().st_size:,} bytes")
    return 0


@contextmanager
def _empty_after_an_error(out: Path) -> Iterator[None]:
    """Remove the files of an export that failed: they are incomplete, and the next export needs an empty folder."""
    existed = out.is_dir()
    try:
        yield
    except BaseException:
        for path in out.iterdir() if out.is_dir() else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if out.is_dir() and not existed:
            out.rmdir()
        raise


def _export(args: argparse.Namespace, model: Any, out: Path) -> None:
    """Write the model in the format ``args.to``."""
    import torch

    if args.dtype is not None:
        model = model.to(getattr(torch, args.dtype))
    if args.to == "linears":
        _write_linears(model, out)
        return
    if args.to == "compressed-tensors":
        _write_compressed_tensors(model, Path(args.model_path), out, args.reader)
        return
    sample = _sample(model, args.sample)
    inputs = f"which --sample {args.sample} returns" if args.sample else "tokens or an image of its sizes"
    with explained(f"{type(model).__name__} does not run on its inputs, {inputs}"), torch.no_grad():
        model(**sample)
    for module in model.modules():  # a module may have its own configuration, as the decoder of T5 has
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # other programs cannot pass the cache back to the model
    with explained(f"{type(model).__name__} cannot be exported"):
        _write_program(model, sample, args.to, out)
    if args.to == "onnx":
        _compare(model, sample, out / "model.onnx")


def _model_of(function: str) -> "nn.Module":
    """Return the model that a function returns alone or with batches."""
    import torch

    returned = call(function)
    model = returned[0] if isinstance(returned, tuple) and returned else returned
    if not isinstance(model, torch.nn.Module):
        raise wrong_return(function, returned, "an nn.Module, or a pair of one and a list of batches")
    return model


def _load(folder: Path, function: str | None) -> "nn.Module":
    import panther as pr

    if function is not None:
        return pr.load_compressed(folder, _model_of(function))
    if not (folder / "config.json").is_file():
        for pattern, fix in _FOREIGN_FOLDERS.items():
            if any(folder.glob(pattern)):
                raise PantherError(f"{folder} holds {pattern} and no config.json, so it is {fix}")
        raise PantherError(
            f"{folder} holds no config.json: give --model module:function, which builds the architecture"
        )
    from panther.cli._transformers import quietly

    with quietly(f"{folder} cannot be loaded"):
        return pr.from_pretrained(folder)


def _sample(model: Any, function: str | None) -> dict[str, Any]:
    """Return inputs by name: from a function, or else tokens or an image of the sizes in the model's config."""
    import torch

    from panther.cli._transformers import sample_inputs

    if function is None:
        sample = sample_inputs(model, 2, 7, _SAMPLE)
        dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in sample.items()}
    inputs = call(function)
    if not isinstance(inputs, dict) or not all(isinstance(value, torch.Tensor) for value in inputs.values()):
        raise wrong_return(function, inputs, "a mapping of the forward's arguments to tensors")
    return inputs


def _write_program(model: Any, sample: dict[str, Any], kind: str, out: Path) -> None:
    """Export the model with a batch size that may change; the second size of an integer matrix may change as well."""
    import torch

    dynamic = torch.export.Dim.DYNAMIC
    shapes = {
        name: {0: dynamic} | ({1: dynamic} if tensor.dim() == 2 and not tensor.is_floating_point() else {})
        for name, tensor in sample.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own modules warn
        program = torch.export.export(model, (), sample, dynamic_shapes=shapes)
        if kind == "torch":
            with new_file(out / "model.pt2") as file:
                torch.export.save(program, file)
        else:
            _check_operators(type(model).__name__, program)
            before = logging.root.manager.disable
            logging.disable(logging.WARNING)  # torch would list its optional packages that are missing
            try:
                torch.onnx.export(program, (), str(out / "model.onnx"), dynamo=True, verbose=False)
            finally:
                logging.disable(before)


def _check_operators(kind: str, program: Any) -> None:
    """Raise if a program contains operators of Panther, which ONNX lacks. Linear attention uses such operators."""
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
    """Run the file with onnxruntime, if it is installed, and print how much its first output differs from the model's.

    A file in half precision is compared with the model in float32. The limit is then a multiple of the rounding error
    that the model's own output has in half precision. The model is in float32 afterwards.
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
    reference, limit = own_output, _MAX_ERROR
    if own_output.dtype is torch.float16:
        wide = {name: x.float() if x.is_floating_point() else x for name, x in sample.items()}
        with torch.no_grad():
            reference = _first_output(model.float()(**wide))
        own_error = _distance(own_output, reference)
        limit = max(_MAX_ERROR_RATIO * own_error, _MAX_ERROR_RATIO * torch.finfo(torch.float16).eps)
    error = _distance(torch.from_numpy(file_output), reference)
    if not error <= limit:
        raise PantherError(
            f"{path} gives a different output than the model, with a relative difference of {error:.1e}, more than "
            f"{limit:.1e}, and was removed: use --to torch"
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
    """Replace sketched and compressed layers by plain linear layers; write the tensors and what each layer became."""
    import panther as pr

    attention = (pr.nn.RandMultiHeadAttention, pr.nn.LearnedLinearAttention)
    for name, module in model.named_modules():
        if isinstance(module, attention):
            raise PantherError(
                f"layer {name!r} is linear attention, which no plain layer computes: use --to torch, or export the "
                "model with softmax attention"
            )
    report = pr.to_linears_(model)
    if report.skipped:
        name, reason = report.skipped[0]
        raise PantherError(
            f"{counted(len(report.skipped), 'layer')} cannot be plain, the first of them {name!r}: {reason}"
        )
    pr.save_compressed(model, out)
    (out / "panther.json").unlink()  # all layers are plain, to be read without Panther
    record = {layer.name: layer.became for layer in report.replaced}
    write_json(out / "layers.json", record)


def _write_compressed_tensors(model: "nn.Module", folder: Path, out: Path, reader: str) -> None:
    """Write packed codes in the format compressed-tensors, with the tokenizer and other files of the folder."""
    from collections import Counter

    from panther.integrations.compressed_tensors import write_compressed_tensors
    from panther.integrations.compressed_tensors.adapter import ADAPTER_FOLDER
    from panther.integrations.folders.beside import copy_beside

    with explained(f"{type(model).__name__} cannot be exported"):
        schemes = write_compressed_tensors(model, out, reader=reader)
    if folder.is_dir():
        copy_beside(folder, out)
    for name in ("panther.json", "README.md"):  # they describe the folder with Panther's layers
        (out / name).unlink(missing_ok=True)
    for scheme, count in sorted(Counter(schemes.values()).items(), reverse=True):
        groups = f"groups of {scheme.group_size}" if scheme.group_size else "entire rows"
        print(f"{counted(count, 'layer')} of {scheme.bits} bits in {groups}, equal to the model's number by number")
    base_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    if (out / ADAPTER_FOLDER).is_dir():
        adapter_bytes = sum(path.stat().st_size for path in (out / ADAPTER_FOLDER).glob("*.safetensors"))
        print(f"base {base_bytes:,} bytes, adapter {adapter_bytes:,} bytes, together {base_bytes + adapter_bytes:,}")
        print(f"{out / ADAPTER_FOLDER} holds corrections: load them with PEFT, after the first forward of the model")
    else:
        print(f"base {base_bytes:,} bytes, no adapter")

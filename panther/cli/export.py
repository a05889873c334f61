"""``panther export``: a folder with a model, compressed or not, as an ONNX file, a torch program or plain tensors."""

__all__ = ["add_parser", "run"]

import argparse
import io
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther._text import counted
from panther.cli._arguments import check_files, check_new_folder
from panther.cli._user_function import (
    call,
    current_folder_importable,
    explained,
    model_and_batches,
    names_function,
    wrong_return,
)  # fmt: skip
from panther.errors import PantherError, require_extra
from panther.files import new_file, write_json
from panther.files.folder import removed_after_an_error
from panther.integrations.folders.beside import check_beside, copy_beside

if TYPE_CHECKING:
    from torch import nn

# What a file without config.json beside it says about a folder, and what to do about it.
_FOREIGN_FOLDERS = {
    "adapter_config.json": "an adapter of PEFT: load it with its base, call merge_and_unload(), and save the model",
    "model_index.json": "a pipeline of diffusers: give one of its models, with --model module:function",
    "saved_model.pb": "a model of TensorFlow: build it in torch first",
    "*.gguf": "a model of llama.cpp: load it by transformers' from_pretrained(..., gguf_file=...) and save the model",
    "*.onnx": "a model in ONNX already: export the folder that it was made of",
    "*.pt2": "a program of torch.export already: export the folder that it was made of",
}
_OPTIONS_OF_TARGETS = {"activations": ("onnx",), "sample": ("onnx", "torch"), "reader": ("compressed-tensors",)}
_SAMPLE = "give --sample module:function, which returns a mapping of the forward's arguments to tensors"


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    usage, summary = "panther export MODEL --to TARGET --out PATH [options]", "Write a model for other programs."
    parser = commands.add_parser("export", usage=usage, description=f"{summary} Batch and length may change.")
    parser.add_argument(
        "model_path",
        metavar="MODEL",
        help="a folder that panther compress wrote, or save_pretrained of transformers; or one that pr.save_compressed "
        "wrote, with --model; or module:function, which returns a model",
    )
    summary = (
        "onnx: model.onnx; torch: model.pt2 of torch.export; linears: safetensors with plain layers alone; "
        "compressed-tensors: a folder with quantized layers, for programs without Panther; gguf: a file for llama.cpp"
    )
    targets = ("onnx", "torch", "linears", "compressed-tensors", "gguf")
    parser.add_argument("--to", choices=targets, required=True, help=summary)
    summary = "program that will read a folder of compressed-tensors (default: transformers)"
    parser.add_argument("--reader", choices=("transformers", "vllm"), help=summary)
    summary = "folder for the result, new or empty; for gguf a new file"
    parser.add_argument("--out", required=True, metavar="PATH", help=summary)
    summary = "module:function, which returns the architecture, where the folder has no config.json"
    parser.add_argument("--model", metavar="FUNCTION", help=summary)
    summary = "module:function, which returns inputs by name (default: tokens or an image, by config.json)"
    parser.add_argument("--sample", metavar="FUNCTION", help=summary)
    summary = "dtype of the weights (default: as they were saved)"
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help=summary)
    summary = (
        "int8: onnxruntime rounds the inputs of quantized layers to 8 bits, which is faster and changes outputs by "
        "some percent (default: as the layers do)"
    )
    parser.add_argument("--activations", choices=("int8",), help=summary)
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
    out = _new_file(args.out) if args.to == "gguf" else check_new_folder(args.out)
    if folder.is_dir() and args.to in ("onnx", "compressed-tensors"):
        check_beside(folder, out)
    if args.to == "onnx":
        for module in ("onnx", "onnxscript"):
            require_extra(module, "onnx")
    if args.to == "gguf":
        require_extra("gguf", "gguf")
    for name, targets in _OPTIONS_OF_TARGETS.items():
        if getattr(args, name) is not None and args.to not in targets:
            raise PantherError(f"--{name} is for --to {' and '.join(targets)}, not for --to {args.to}: leave it out")
    with current_folder_importable(), removed_after_an_error(out):
        model = model_and_batches(args.model_path)[0] if is_function else _load(folder, args.model)
        _export(args, model.eval(), out)
    for path in sorted(path for path in (out, *out.rglob("*")) if path.is_file()):
        print(f"{path}  {path.stat().st_size:,} bytes")
    return 0


def _new_file(path: str) -> Path:
    """Return the path of a file of ``--out``, or raise PantherError if it exists or cannot be written."""
    check_files(out=path)
    if Path(path).exists():
        raise PantherError(f"--out {path} exists, and might hold another model: name a new file, or remove it")
    return Path(path)


def _export(args: argparse.Namespace, model: Any, out: Path) -> None:
    """Write the model in the format ``args.to``."""
    import torch

    from panther.cli._transformers import sample_inputs

    if args.dtype is not None:
        model = model.to(getattr(torch, args.dtype))
    if args.to == "linears":
        _write_linears(model, out)
        return
    if args.to == "compressed-tensors":
        _write_compressed_tensors(model, Path(args.model_path), out, args.reader or "transformers")
        return
    if args.to == "gguf":
        _write_gguf(model, Path(args.model_path), out)
        return
    names = _input_names(Path(args.model_path), model, args.to) if args.sample is None else None
    sample = _sample(model, args.sample, names)
    inputs = f"which --sample {args.sample} returns" if args.sample else "tokens or an image of its sizes"
    with explained(f"{type(model).__name__} does not run on its inputs, {inputs}"), torch.no_grad():
        model(**sample)
    for module in model.modules():  # a module may have its own configuration, as the decoder of T5 has
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False  # other programs cannot pass the cache back to the model
    if args.to == "torch":
        with explained(f"{type(model).__name__} cannot be exported"):
            _write_program(model, sample, out / "model.pt2")
        return
    samples = [sample, {name: x[:1] for name, x in sample.items()}]
    if args.sample is None:
        samples[1] = _cast(sample_inputs(model, 1, 5, _SAMPLE, names), model)
    _write_onnx(args, model, samples, out)


def _load(folder: Path, function: str | None) -> "nn.Module":
    import panther as pr

    if function is not None:
        return pr.load_compressed(folder, model_and_batches(function)[0])
    if not (folder / "config.json").is_file():
        for pattern, fix in _FOREIGN_FOLDERS.items():
            if any(folder.glob(pattern)):
                raise PantherError(f"{folder} holds {pattern} and no config.json, so it is {fix}")
        raise PantherError(f"{folder} holds no config.json: give --model module:function, which builds the model")
    from panther.cli._transformers import quietly

    with quietly(f"{folder} cannot be loaded"):
        return pr.from_pretrained(folder)


def _input_names(folder: Path, model: Any, target: str) -> list[str] | None:
    """Return the inputs that the folder's tokenizer makes, in its order; None if they are not known."""
    from panther.cli._transformers import load_tokenizer

    if getattr(model, "main_input_name", None) != "input_ids":
        return None
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None:
        return list(tokenizer.model_input_names)
    if target == "onnx" and folder.is_dir():
        print(
            f"{folder} holds no tokenizer, so the inputs are input_ids and attention_mask: save the tokenizer there "
            "with tokenizer.save_pretrained, or give --sample, for others"
        )
    return None


def _sample(model: Any, function: str | None, names: list[str] | None) -> dict[str, Any]:
    """Return inputs by name: from a function, or else tokens or an image of the sizes in the model's config."""
    import torch

    from panther.cli._transformers import sample_inputs

    if function is None:
        return _cast(sample_inputs(model, 2, 7, _SAMPLE, names), model)
    inputs = call(function)
    if not isinstance(inputs, dict) or not all(isinstance(value, torch.Tensor) for value in inputs.values()):
        raise wrong_return(function, inputs, "a mapping of the forward's arguments to tensors")
    return inputs


def _cast(sample: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return inputs with floating numbers in the dtype of the model."""
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in sample.items()}


def _write_program(model: Any, sample: dict[str, Any], path: Path) -> None:
    """Write model.pt2; the batch size may change, and the second size of an integer matrix."""
    import torch

    model.state_dict()  # This refuses codes that other code damaged, which a traced forward does not check.
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {
        name: {0: dynamic} | ({1: dynamic} if tensor.dim() == 2 and not tensor.is_floating_point() else {})
        for name, tensor in sample.items()
    }
    # In memory first, because torch writes archives in C++, which aborts the process if a file raises on a full disk.
    content = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own modules warn
        torch.export.save(torch.export.export(model, (), sample, dynamic_shapes=shapes), content)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        file.write(content.getbuffer())


def _write_onnx(args: argparse.Namespace, model: Any, samples: list[dict[str, Any]], out: Path) -> None:
    """Write model.onnx, compare it with the model, and copy the tokenizer."""
    from panther.cli._transformers import has_tokenizer
    from panther.integrations.onnx import compare_onnx, write_onnx
    from panther.nn.protocol import compressed_layers

    if args.activations is not None:
        layers: list[Any] = [layer for _, layer in compressed_layers(model) if getattr(layer, "bits", None)]
        # Layers that can round their inputs have the setting, and other layers have the None of their class.
        layers = [layer for layer in layers if "activations" in vars(layer)]
        if not layers:
            raise PantherError(f"{args.model_path} holds no quantized linear layer: leave --activations out")
        for layer in layers:
            layer.activations = args.activations
    path = out / "model.onnx"
    with explained(f"{type(model).__name__} cannot be exported"):
        write_onnx(model, path, samples[0])
    if find_spec("onnxruntime") is None:
        print("not run: onnxruntime is not installed (pip install onnxruntime), so nothing was compared")
    else:
        with explained(f"onnxruntime does not run {path}"):
            agreement = compare_onnx(model, path, samples)
        if agreement is None:
            print(
                "not compared: onnxruntime has no kernels for bfloat16 on CPUs (--dtype float32 writes a file that is "
                "compared)"
            )
        elif not agreement.is_close:
            raise PantherError(
                f"{path} gives different outputs than the model, with a relative difference of {agreement.error:.1e}, "
                f"more than {agreement.limit:.1e}, and was removed: use --to torch"
            )
        else:
            print(
                f"onnxruntime gives {agreement.reference}, with a relative difference of {agreement.error:.1e}, at "
                f"batch sizes {' and '.join(str(len(next(iter(sample.values())))) for sample in samples)}"
            )
    if has_tokenizer(Path(args.model_path)):
        copy_beside(Path(args.model_path), out)
        _remove_descriptions(out)


def _remove_descriptions(out: Path) -> None:
    """Remove copies of files that describe the folder with Panther's layers."""
    for name in ("panther.json", "README.md"):
        (out / name).unlink(missing_ok=True)


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
    write_json(out / "layers.json", {layer.name: layer.became for layer in report.replaced})


def _write_compressed_tensors(model: "nn.Module", folder: Path, out: Path, reader: str) -> None:
    """Write packed codes in the format compressed-tensors, with the tokenizer and other files of the folder."""
    from collections import Counter

    from panther.integrations.compressed_tensors import write_compressed_tensors
    from panther.integrations.compressed_tensors.writer import ADAPTER_FOLDER

    with explained(f"{type(model).__name__} cannot be exported"):
        schemes = write_compressed_tensors(model, out, reader=reader)
    if folder.is_dir():
        copy_beside(folder, out)
    _remove_descriptions(out)
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


def _write_gguf(model: "nn.Module", folder: Path, out: Path) -> None:
    """Write a file for llama.cpp, with the tokenizer of the folder."""
    from collections import Counter

    from panther.cli._transformers import load_tokenizer
    from panther.integrations.gguf import write_gguf

    tokenizer = load_tokenizer(folder) if folder.is_dir() else None
    if tokenizer is None:
        print(f"{folder} holds no tokenizer, so the file has no vocabulary: programs take the numbers of tokens only")
    with explained(f"{type(model).__name__} cannot be exported"):
        types = write_gguf(model, out, tokenizer=tokenizer)
    for name, count in sorted(Counter(types.values()).items()):
        print(f"{counted(count, 'layer')} in blocks of {name}, with the codes of the model")

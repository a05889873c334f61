"""``panther compress``: :func:`panther.compress` for a folder of transformers, or a model that a function returns."""

__all__ = ["add_parser", "run"]

import argparse
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import panther as pr
from panther.cli._arguments import add_option, check_folder, note, positive, positive_float, seed, whole_number
from panther.cli._signals import raise_if_ended
from panther.cli._user_function import call, current_folder_importable, names_function, wrong_return
from panther.errors import NumericalWarning, PantherError, PerformanceWarning, require_extra
from panther.integrations.folders.beside import check_beside, copy_beside
from panther.integrations.folders.sentence_transformers import loader_of, model_folder

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

_log = logging.getLogger(__name__)
_METHODS = ("two_sided", "activation", "svd", "random")
_CALIBRATED = ("two_sided", "activation")
_UNIT = 5  # one of five batches is held out for checks


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "compress",
        description="Replace a model's dense layers by smaller ones with nearly the same output, and save the result.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder of transformers with safetensors, or module:function, which returns a model, or a model and "
        "batches to calibrate it on",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    add_option(size, "--budget", _fraction, "share of the eligible layers' bytes to keep, such as 0.5", metavar="SHARE")
    add_option(size, "--bits", positive_float, "bits of an eligible weight on average, such as 4.25", metavar="BITS")
    add_option(size, "--max-bytes", positive, "bytes that the whole model may take")
    add_option(size, "--max-error", positive_float, "relative error that the output may have, such as 0.1", metavar="X")
    add_option(size, "--speedup", positive_float, "how many times as fast the model is to be, such as 1.5", metavar="X")
    add_option(size, "--max-latency-ms", positive_float, "milliseconds that a batch may take", metavar="MS")
    texts = "a text file, one sample a line, or module:function, which returns batches"
    add_option(parser, "--calibration", str, texts, metavar="TEXT")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the result, new or empty")
    text = (
        "what layers may become: dense, low_rank, interpolative, int8_low_rank, int8 to int2, int4+low_rank "
        "(default: the first three, and int8 to int2)"
    )
    parser.add_argument("--forms", nargs="+", metavar="FORM", help=text)
    parser.add_argument(
        "--activations", choices=("int8",), help="round inputs of quantized linear layers, to multiply integers"
    )
    text = "fit what this program reads in the format compressed-tensors, for panther export"
    parser.add_argument("--reader", choices=("transformers", "vllm"), help=text)
    parser.add_argument(
        "--allow-slower", action=argparse.BooleanOptionalAction,
        help="whether layers may get slower (default: only if --forms is given, or if much is lost otherwise)",
    )  # fmt: skip
    parser.add_argument("--method", choices=_METHODS, default=_METHODS[0], help="how to fit (default: %(default)s)")
    parser.add_argument(
        "--allocate", choices=("global", "uniform"), help="how to share the budget (default: by method)"
    )
    parser.add_argument(
        "--sequential", action="store_true", help="fit each layer to the output of the compressed ones before it"
    )
    add_option(parser, "--heal", positive, "steps of distillation afterwards", metavar="STEPS")
    for flag, rule in (("--include", "only"), ("--exclude", "not")):
        text = f"{rule} layers with such a name, as in '*.attention.*'"
        parser.add_argument(flag, nargs="+", action="extend", metavar="GLOB", help=text)
    text = "hold one block of the model in memory at a time, and the rest on disk in --out or --scratch; for a folder"
    parser.add_argument("--stream", action="store_true", help=text)
    text = "with --stream: modules that run as blocks, as in 'layers.*' (default: by the model's structure)"
    parser.add_argument("--blocks", nargs="+", action="extend", metavar="GLOB", help=text)
    add_option(parser, "--scratch", str, "with --stream: an existing folder for what is kept meanwhile", metavar="DIR")
    text = "with --stream: bytes that each process may keep there (default: what the disk has free)"
    add_option(parser, "--max-disk-bytes", positive, text)
    add_option(parser, "--seed", seed, "seed of random fits and of healing", 0)
    add_option(parser, "--max-length", whole_number(2), "tokens of a sample", 128)
    add_option(parser, "--batch-size", positive, "samples of a batch", 16)
    add_option(parser, "--report", str, "write the report as JSON as well", metavar="FILE")
    add_option(parser, "--plot", str, "draw it, to a .svg, .png or .pdf", metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, compress, save, and say how to load the result."""
    _check_inputs(args)
    out = check_folder(args.out)
    _check_outputs(args, out)
    with current_folder_importable():
        model, calibration, imports, load = _load(args)
        report = _compress(args, model, calibration)
    if os.environ.get("RANK", "0") != "0":
        return 0
    model_out = _model_out(args)
    raise_if_ended()
    try:
        if not args.stream:
            _log.info("writing to %s", out)
        if Path(args.model).is_dir() and not args.stream:
            from panther.integrations.transformers import write_model_card

            out.mkdir(parents=True, exist_ok=True)
            copy_beside(Path(args.model), out)
            write_model_card(model, report, model_out, settings=_settings(args))
        if not args.stream:
            pr.save_compressed(model, model_out)  # last, so that a folder with a model also has its tokenizer
        if args.report:
            report.to_json(args.report)
        if args.plot:
            report.plot(args.plot)
    except OSError as error:
        raise OSError(f"{error.filename or out} cannot be written: {error.strerror or error}") from None
    print(report)
    print(f"\n{out} holds the result. To load it:")
    if Path(args.model).is_dir():
        print(
            "import panther, transformers  # without panther, transformers fills compressed layers with random numbers"
        )
        print(f"model = transformers.{type(model).__name__}.from_pretrained({str(model_out)!r})")
        if (loader := loader_of(out)) is not None:
            print("or, with the further modules of the folder:")
            print("import panther, sentence_transformers")
            print(f"model = sentence_transformers.{loader}({str(out)!r})")
        print("or, with checksums verified:")
    print(f"import panther as pr{imports}")
    print(f"model = {load}")
    return 0


def _check_inputs(args: argparse.Namespace) -> None:
    """Raise if the model or its calibration batches cannot be loaded; this takes no time, and loading takes seconds."""
    is_folder, calibration = Path(args.model).is_dir(), args.calibration
    for option, value in (("--scratch", args.scratch), ("--max-disk-bytes", args.max_disk_bytes)):
        if value is not None and not args.stream:
            raise PantherError(
                f"{option} is for --stream, which keeps what is large on disk: add --stream, or leave it out"
            )
    if args.blocks and not args.stream:
        raise PantherError("--blocks is for --stream, which runs a model block by block: add --stream, or leave it out")
    if is_folder:
        check_beside(Path(args.model), Path(args.out))
    if args.stream:
        _check_streamed(args)
    elif _num_ranks() > 1:
        raise PantherError(f"one process compresses a model in memory, and {_num_ranks()} are started: add --stream")
    if not is_folder and not names_function(args.model):
        raise PantherError(
            f"{args.model} is not a folder, and not of the form module:function: give one of the two (nothing is "
            "downloaded)"
        )
    if is_folder:
        _check_calibrated(args, calibration)
    if calibration is None or names_function(calibration):
        return
    if not Path(calibration).is_file():
        raise PantherError(
            f"--calibration {calibration} is not a file, and not of the form module:function: give one of the two"
        )
    if not is_folder:
        raise PantherError(
            f"--calibration {calibration} is a text, and only a folder of transformers comes with a tokenizer: give "
            "module:function, which returns batches"
        )


def _check_streamed(args: argparse.Namespace) -> None:
    """Raise if an option needs the whole model in memory."""
    if not Path(args.model).is_dir():
        raise PantherError(f"--stream reads the blocks of a folder of transformers, and {args.model} is not a folder")
    names = ("max_error", "speedup", "max_latency_ms", "heal", "sequential")
    if option := next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name)), None):
        raise PantherError(f"{option} needs the whole model in memory: leave it out, or leave out --stream")
    if args.method not in _CALIBRATED:
        raise PantherError(f"--method {args.method} needs no batches, and so no blocks: leave out --stream")


def _check_calibrated(args: argparse.Namespace, calibration: Any) -> None:
    """Raise if an option needs calibration batches and there are none."""
    names = ("max_error", "speedup", "max_latency_ms", "heal")
    option = next((f"--{name.replace('_', '-')}" for name in names if getattr(args, name)), None)
    if args.allow_slower is False:
        option = option or "--no-allow-slower"
    if args.method in _CALIBRATED:
        option = option or f"--method {args.method}"
    if calibration is None and option:
        raise PantherError(
            f"{option} needs --calibration, a text file or module:function: to compress without it, use --method svd "
            "with --budget"
        )


def _check_outputs(args: argparse.Namespace, out: Path) -> None:
    """Raise before the work if the results cannot be written, or if --out already contains files."""
    if out.is_dir() and any(out.iterdir()) and not args.stream:  # which continues a run that was killed
        raise PantherError(f"--out {out} is not empty, and might hold another model: give a new folder, or clear it")
    for flag, path in (("--report", args.report), ("--plot", args.plot)):
        if path is None:
            continue
        parent = Path(path).parent
        if not parent.is_dir() or not os.access(parent, os.W_OK) or Path(path).is_dir():
            raise PantherError(
                f"{flag} {path} cannot be written: name a file in an existing folder that you may write to"
            )
    if args.plot:
        file_types = require_extra("matplotlib.figure", "demo").Figure().canvas.get_supported_filetypes()
        if Path(args.plot).suffix.removeprefix(".").lower() not in file_types:
            suffixes = ", ".join(f".{suffix}" for suffix in sorted(file_types))
            raise PantherError(f"--plot {args.plot} must end in one of {suffixes}")


def _load(args: argparse.Namespace) -> "tuple[nn.Module, Any, str, str]":
    """Return the model, its calibration batches, and the Python that imports and loads the result."""
    from torch import nn  # here, so that `panther --help` loads no torch

    folder, calibration = Path(args.model), None
    if folder.is_dir():
        from panther.cli import _transformers

        folder = model_folder(folder)
        model = (_transformers.empty_model if args.stream else _transformers.load_model)(folder)
        imports, load = "", f"pr.from_pretrained({str(_model_out(args))!r})"
    else:
        returned = call(args.model)
        model, calibration = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(model, nn.Module):
            raise wrong_return(args.model, returned, "an nn.Module, or a pair of one and a list of batches")
        module, _, function = args.model.partition(":")
        built = f"{function}(){'' if returned is model else '[0]'}"
        imports, load = (
            f"; from {module} import {function}",
            f"pr.load_compressed({str(Path(args.out))!r}, {built}).eval()",
        )
    if args.calibration is not None:
        if names_function(args.calibration):
            calibration = call(args.calibration)
        else:  # a text, which only a folder can have
            calibration = _transformers.text_batches(
                folder, Path(args.calibration), model, args.max_length, args.batch_size
            )
    _check_calibrated(args, calibration)
    return model, calibration, imports, load


def _compress(args: argparse.Namespace, model: "nn.Module", calibration: Any) -> "pr.CompressionReport":
    """Compress the model in place, or its folder, and print each warning as a note of one line."""
    sizes = ("bits", "max_bytes", "max_error", "speedup", "max_latency_ms")
    names: tuple[str, ...] = (
        *sizes,
        "activations",
        "reader",
        "allow_slower",
        "include",
        "exclude",
        "method",
        "allocate",
        "sequential",
        "seed",
    )
    if args.stream:
        names = ("bits", "max_bytes", "activations", "reader", "include", "exclude", "method", "allocate", "seed")
    options = {name: getattr(args, name) for name in names}
    if args.forms is not None:
        options["forms"] = args.forms
    heal = None if args.heal is None else pr.HealConfig(max_steps=args.heal)
    with warnings.catch_warnings():
        warnings.simplefilter("always", PerformanceWarning)
        warnings.simplefilter("ignore", NumericalWarning)  # the report contains these
        warnings.showwarning = lambda message, *_, **__: note(message)
        try:
            if args.stream:
                with _joined_ranks() as group:
                    if group is not None:
                        calibration = _share_of_batches(calibration, group.rank(), group.size())
                    options |= {"budget": args.budget, "calibration": calibration, "scratch_dir": args.scratch}
                    options |= {"blocks": args.blocks, "max_disk_bytes": args.max_disk_bytes}
                    return pr.compress_folder(args.model, args.out, group=group, **options)
            return pr.compress(model, args.budget, calibration, heal=heal, **options)
        except PantherError:
            raise
        except ValueError as error:  # two options exclude each other
            raise PantherError(str(error)) from error


def _model_out(args: argparse.Namespace) -> Path:
    """Return the folder of the model in ``--out``: a folder of sentence-transformers can have it in a sub-folder."""
    folder = Path(args.model)
    return Path(args.out) / (model_folder(folder).relative_to(folder) if folder.is_dir() else "")


def _settings(args: argparse.Namespace) -> str:
    """Return the options that set the target size, error or speed, as on the command line."""
    sizes = ("budget", "bits", "max_bytes", "max_error", "speedup", "max_latency_ms")
    return ", ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in sizes if getattr(args, name))


def _fraction(text: str) -> float:
    value = positive_float(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} must be at most 1, which keeps everything")
    return value


def _num_ranks() -> int:
    """Return the number of ranks that torchrun or ``panther launch`` has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def _joined_ranks() -> "Iterator[dist.ProcessGroup | None]":
    """Yield the group of all ranks, or None if there is one process."""
    if _num_ranks() == 1:
        yield None
        return
    import torch.distributed as dist

    from panther.distributed import init, shutdown

    init()
    try:
        yield dist.group.WORLD
    finally:
        shutdown()


def _share_of_batches(batches: Any, rank: int, count: int) -> Sequence[Any]:
    """Return the batches of a rank, in fives, so that the ranks hold out the batches that one process does.

    Raises:
        PantherError: If there are too few.
    """
    batches = list(batches)
    fives = [batches[start : start + _UNIT] for start in range(0, len(batches), _UNIT)]
    if len(fives) > 1 and len(fives[-1]) < _UNIT:
        fives[-2:] = [[*fives[-2], *fives[-1]]]
    if len(fives) < count:
        raise PantherError(
            f"{len(batches)} batches are too few for {count} ranks, because each rank needs {_UNIT}: start fewer "
            "ranks, or make smaller batches"
        )
    return [batch for five in fives[rank * len(fives) // count : (rank + 1) * len(fives) // count] for batch in five]

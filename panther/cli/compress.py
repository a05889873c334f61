"""``panther compress``: :func:`panther.compress` for a folder of transformers, or a model that a function returns."""

__all__ = ["add_parser", "run"]

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import panther as pr
from panther.cli._arguments import (
    add_option,
    check_files,
    check_folder,
    check_new_folder,
    performance_noted,
    positive,
    whole_number,
)  # fmt: skip
from panther.cli._options import add_old_spelling, add_settings, flag_of, given_settings, settings_explained
from panther.cli._user_function import call, current_folder_importable, model_and_batches, names_function
from panther.errors import PantherError
from panther.integrations.folders.beside import check_beside, copy_beside
from panther.integrations.folders.sentence_transformers import loader_of, model_folder

if TYPE_CHECKING:
    from torch import nn

_log = logging.getLogger(__name__)
_CONFIG = "compression.config:CompressConfig"
_FOLDER = "integrations.folders.compress:compress_folder"
_SIZES = ("budget", "bits", "max_bytes", "max_error", "speedup", "max_latency_ms")
_FORMS = (
    "forms", "include", "exclude", "allow_slower", "group_size", "symmetric", "activations", "rank_multiple", "reader",
)  # fmt: skip
_STREAMED = ("scratch_dir",)


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "compress",
        usage="panther compress MODEL --bits N --calibration TEXT --out DIR [options]",
        description="Replace a model's layers by smaller ones with nearly the same output, and save the result.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder of transformers with safetensors, or module:function, which returns a model, or a model and "
        "batches to calibrate it on",
    )
    documentation = ("compression:compress",)
    size = parser.add_argument_group("size, one of").add_mutually_exclusive_group(required=True)
    add_settings(size, _CONFIG, *_SIZES, described_in=documentation)
    data = parser.add_argument_group("data")
    help_text = "a text file, one sample a line, or module:function, which returns batches"
    add_option(data, "--calibration", str, help_text, metavar="TEXT")
    add_option(data, "--max-length", whole_number(2), "tokens of a sample", 128)
    add_option(data, "--batch-size", positive, "samples of a batch", 16)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the result, new or empty")
    # --reader implies the format, the setting "target".
    add_settings(parser.add_argument_group("forms"), _CONFIG, *_FORMS, described_in=documentation)
    advanced = parser.add_argument_group("advanced")
    add_settings(advanced, _CONFIG, described_in=documentation, without=(*_SIZES, *_FORMS, "target"), seed=0)
    help_text = "steps of distillation afterwards"
    advanced.add_argument("--heal", dest="heal_steps", type=positive, metavar="STEPS", help=help_text)
    help_text = "hold one block of the model in memory at a time, and the rest on disk in --out or --scratch-dir"
    parser.add_argument("--stream", action="store_true", help=f"{help_text}; for a folder")
    add_settings(parser.add_argument_group("with --stream"), _FOLDER, *_STREAMED)
    add_old_spelling(parser, "--scratch", "--scratch-dir")
    add_option(parser, "--report", str, "write the report as JSON as well", metavar="FILE")
    add_option(parser, "--plot", str, "draw it, to a .svg, .png or .pdf", metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, compress, save, and say how to load the result."""
    _check_inputs(args)
    out = check_folder(args.out) if args.stream else check_new_folder(args.out)  # a killed run is continued there
    _check_outputs(args)
    with current_folder_importable():
        model, calibration, imports, load = _load(args)
        report = _compress(args, model, calibration)
    model_out = _model_out(args)
    try:
        if not args.stream:
            _log.info("writing to %s", out)
        if Path(args.model).is_dir() and not args.stream:
            from panther.integrations.transformers import write_model_card

            out.mkdir(parents=True, exist_ok=True)
            copy_beside(Path(args.model), out)
            write_model_card(model, report, model_out, settings=_size(args))
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
    """Raise if the settings, the model or its batches cannot be used; this takes no time, and loading takes seconds."""
    is_folder, calibration = Path(args.model).is_dir(), args.calibration
    if not args.stream and (name := next((name for name in _STREAMED if name in args), None)):
        raise PantherError(
            f"{flag_of(name)} is for --stream, which runs a model block by block: add --stream, or leave it out"
        )
    if is_folder:
        check_beside(Path(args.model), Path(args.out))
    if args.stream and not is_folder:
        raise PantherError(f"--stream reads the blocks of a folder of transformers, and {args.model} is not a folder")
    if _num_ranks() > 1:
        raise PantherError(f"one process compresses a model, and {_num_ranks()} are started: start one, without launch")
    if not is_folder and not names_function(args.model):
        raise PantherError(
            f"{args.model} is not a folder, and not of the form module:function: give one of the two (nothing is "
            "downloaded)"
        )
    from panther.compression.config import CompressConfig  # here, so that `panther compress --help` loads no torch

    with settings_explained():  # A function may return batches with the model.
        CompressConfig(**_settings(args, calibration if is_folder else args.model))
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


def _settings(args: argparse.Namespace, calibration: Any) -> dict[str, Any]:
    """Return the given settings of a CompressConfig, with calibration batches."""
    heal = {} if args.heal_steps is None else {"heal": pr.HealConfig(max_steps=args.heal_steps)}
    return given_settings(args, _CONFIG) | {"calibration": calibration} | heal


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise before the work if the report or the plot cannot be written."""
    check_files(report=args.report, plot=args.plot)
    if args.plot:
        from panther.tuning.result import check_plot

        check_plot(args.plot)


def _load(args: argparse.Namespace) -> "tuple[nn.Module, Any, str, str]":
    """Return the model, its calibration batches, and the Python that imports and loads the result."""
    folder, calibration = Path(args.model), None
    if folder.is_dir():
        from panther.cli import _transformers

        folder = model_folder(folder)
        model = (_transformers.empty_model if args.stream else _transformers.load_model)(folder)
        imports, load = "", f"pr.from_pretrained({str(_model_out(args))!r})"
    else:
        model, calibration, is_pair = model_and_batches(args.model)
        module, _, function = args.model.partition(":")
        built = f"{function}(){'[0]' if is_pair else ''}"
        imports = f"; from {module} import {function}"
        load = f"pr.load_compressed({str(Path(args.out))!r}, {built}).eval()"
    if args.calibration is not None and names_function(args.calibration):
        calibration = call(args.calibration)
    elif args.calibration is not None:  # a text, which only a folder can have
        text = Path(args.calibration)
        calibration = _transformers.text_batches(folder, text, model, args.max_length, args.batch_size)
    return model, calibration, imports, load


def _compress(args: argparse.Namespace, model: "nn.Module", calibration: Any) -> "pr.CompressionReport":
    """Compress the model in place, or its folder, and print each warning as a note of one line."""
    settings = _settings(args, calibration)
    with performance_noted(), settings_explained():
        if not args.stream:
            return pr.compress(model, **settings)
        settings |= given_settings(args, _FOLDER, *_STREAMED)
        return pr.compress_folder(args.model, args.out, **settings)


def _model_out(args: argparse.Namespace) -> Path:
    """Return the folder of the model in ``--out``: a folder of sentence-transformers can have it in a sub-folder."""
    folder = Path(args.model)
    return Path(args.out) / (model_folder(folder).relative_to(folder) if folder.is_dir() else "")


def _size(args: argparse.Namespace) -> str:
    """Return the option that sets the target size, error or speed, as on the command line."""
    return next(f"{flag_of(name)} {getattr(args, name)}" for name in _SIZES if name in args)


def _num_ranks() -> int:
    """Return the number of ranks that torchrun or ``panther launch`` has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1

"""``panther compress``: :func:`panther.compress` for a folder of transformers, or a model that a function returns."""

__all__ = ["add_parser", "run"]

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import panther as pr
from panther.cli._arguments import check_file, check_folder, positive, positive_float, seed
from panther.cli._user_function import call, current_folder_importable, names_function
from panther.errors import NumericalWarning, PantherError, PerformanceWarning, require_extra

if TYPE_CHECKING:
    from torch import nn

_METHODS = ("two_sided", "activation", "svd", "random")
_CALIBRATED = ("two_sided", "activation")


@dataclass
class _Source:
    """A model, its calibration batches, and the code that builds its architecture."""

    model: "nn.Module"
    calibration: Any
    imports: str
    rebuild: Callable[[Path], str]
    copy: Callable[[Path], None]


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "compress",
        description="Replace a model's dense layers by low-rank ones with nearly the same output, and save the result.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder of transformers with safetensors, or module:function, which returns a model, or a model and "
        "batches to calibrate it on",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--budget", type=_fraction, help="share of the eligible layers' bytes to keep, such as 0.5")
    size.add_argument("--max-bytes", type=positive, metavar="N", help="bytes that the whole model may take")
    size.add_argument(
        "--max-error", type=positive_float, metavar="X", help="relative error that the output may have, such as 0.1"
    )
    parser.add_argument(
        "--calibration",
        metavar="TEXT",
        help="a text file, one sample a line, or module:function, which returns batches",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the result, new or empty")
    parser.add_argument("--method", choices=_METHODS, default=_METHODS[0], help="how to fit (default: %(default)s)")
    parser.add_argument(
        "--allocate", choices=("global", "uniform"), help="how to share the budget (default: by method)"
    )
    parser.add_argument(
        "--sequential", action="store_true", help="fit each layer to the output of the compressed ones before it"
    )
    parser.add_argument("--heal", type=positive, metavar="STEPS", help="steps of distillation afterwards")
    for flag, rule in (("--include", "only"), ("--exclude", "not")):
        parser.add_argument(
            flag,
            nargs="+",
            action="extend",
            metavar="GLOB",
            help=f"{rule} layers with such a name, as in '*.attention.*'",
        )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--max-length", type=_length, default=128, metavar="N", help="tokens of a sample (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=16, metavar="N", help="samples of a batch (default: %(default)s)"
    )
    parser.add_argument("--report", metavar="FILE", help="write the report as JSON as well")
    parser.add_argument("--plot", metavar="FILE", help="draw it, to a .svg, .png or .pdf")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, compress, save, and say how to load the result."""
    _check_out(args.out)
    _check_plot(args.plot)
    _check_calibration(args)
    with current_folder_importable():
        source = _source(args)
        if source.calibration is None:
            _refuse_without_calibration(args)
        out = check_folder(args.out)
        for flag, path in (("--report", args.report), ("--plot", args.plot)):
            check_file(path, flag)
        report = _compress(args, source)
    try:
        pr.save_compressed(source.model, out)
        source.copy(out)
        if args.report:
            report.to_json(args.report)
        if args.plot:
            report.plot(args.plot)
    except OSError as error:
        raise PantherError(f"{error.filename or out} cannot be written: {error.strerror or error}") from None
    print(report)
    print(f"\n{out} holds the result. To load it:")
    print(f"import panther as pr{source.imports}")
    print(f"model = pr.load_compressed({str(out)!r}, {source.rebuild(out)}).eval()")
    return 0


def _compress(args: argparse.Namespace, source: _Source) -> "pr.CompressionReport":
    """Compress in place; warnings become notes, a line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PerformanceWarning)
        warnings.simplefilter("ignore", NumericalWarning)  # the report has it
        try:
            report = pr.compress(
                source.model,
                args.budget,
                source.calibration,
                max_bytes=args.max_bytes,
                max_error=args.max_error,
                include=args.include,
                exclude=args.exclude,
                method=args.method,
                allocate=args.allocate,
                sequential=args.sequential,
                heal=None if args.heal is None else pr.HealConfig(max_steps=args.heal),
                seed=args.seed,
            )
        except PantherError:
            raise
        except ValueError as error:  # options that exclude each other
            raise PantherError(str(error)) from error
    for warning in caught:
        if issubclass(warning.category, PerformanceWarning):
            print(f"panther: note: {warning.message}", file=sys.stderr)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return report


def _check_calibration(args: argparse.Namespace) -> None:
    """Raise before a model is loaded, which takes seconds, if there will be nothing to calibrate it on."""
    folder, given = Path(args.model).is_dir(), args.calibration
    if not folder and not names_function(args.model):
        raise PantherError(
            f"{args.model} is not a folder, and not of the form module:function: give one of the two (nothing is "
            "downloaded)"
        )
    if given is None:
        if folder:
            _refuse_without_calibration(args)
    elif not names_function(given):
        if not Path(given).is_file():
            raise PantherError(
                f"--calibration {given} is not a file, and not of the form module:function: give one of the two"
            )
        if not folder:
            raise PantherError(
                f"--calibration {given} is a text, and only a folder of transformers comes with a tokenizer: give "
                "module:function, which returns batches"
            )


def _refuse_without_calibration(args: argparse.Namespace) -> None:
    if args.method in _CALIBRATED or args.max_error or args.heal:
        asker = "--max-error" if args.max_error else "--heal" if args.heal else f"--method {args.method}"
        raise PantherError(
            f"{asker} needs --calibration, a text file or module:function: without it there is --method svd with "
            "--budget"
        )


def _source(args: argparse.Namespace) -> _Source:
    from torch import nn  # here, so that `panther --help` loads no torch

    folder = Path(args.model)
    if folder.is_dir():
        from panther.cli import _transformers

        model = _transformers.load_model(folder)
        tokenizer = None
        if args.calibration is None or names_function(args.calibration):
            calibration = _batches(args.calibration)
        else:
            tokenizer = _transformers.load_tokenizer(folder)
            calibration = _transformers.text_batches(
                Path(args.calibration), model, tokenizer, args.max_length, args.batch_size
            )
        return _Source(
            model,
            calibration,
            ", transformers",
            lambda out: _transformers.expression(model, out),
            lambda out: _transformers.copy_beside(folder, out, tokenizer),
        )
    made = call(args.model)
    model, calibration = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise PantherError(
            f"{args.model} returns a value of type {type(made).__name__}: it must return an nn.Module, or a "
            "pair of one and a list of batches"
        )
    module, _, function = args.model.partition(":")
    return _Source(
        model,
        calibration if args.calibration is None else _batches(args.calibration),
        f"; from {module} import {function}",
        lambda out: f"{function}(){'' if made is model else '[0]'}",
        lambda out: None,
    )


def _batches(spec: str | None) -> Any:
    return None if spec is None else call(spec)


def _check_out(out: str) -> None:
    """Raise rather than put a model among the files of another."""
    folder = Path(out)
    if out and folder.is_dir() and any(folder.iterdir()):
        raise PantherError(f"--out {out} is not empty, and might hold another model: give a new folder, or clear it")


def _check_plot(path: str | None) -> None:
    if path is None:
        return
    known = require_extra("matplotlib.figure", "demo").Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in known:
        raise PantherError(f"--plot {path} must end in one of {', '.join('.' + suffix for suffix in sorted(known))}")


def _fraction(text: str) -> float:
    value = positive_float(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} must be at most 1, which keeps everything")
    return value


def _length(text: str) -> int:
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} must be at least 2")
    return value

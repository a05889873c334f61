"""``panther advise``: :func:`panther.plan_parallelism` for a module:function or a transformer of a known size."""

__all__ = ["SEQUENCE", "SIZES", "VOCABULARY", "add_parser", "run"]

import argparse
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from panther._text import counted
from panther.cli._arguments import add_option, check_folder, note, positive
from panther.cli._options import add_old_spelling, add_settings, given_settings, settings_explained
from panther.cli._user_function import (
    current_folder_importable,
    explained,
    model_and_batches,
    names_function,
    wrong_return,
)  # fmt: skip
from panther.errors import PantherError

# Table 2.1 of T. Brown et al., "Language models are few-shot learners", 2020, arXiv:2005.14165: layers, hidden, heads.
SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 16),
    "1.3b": (24, 2048, 16),
    "2.7b": (32, 2560, 32),
    "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "175b": (96, 12288, 96),
}
VOCABULARY = 50257
SEQUENCE = 2048
_UNITS = {"": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SHOWN = 10
_CLUSTER = "distributed.advisor.cluster:ClusterSpec"
_PLAN = "distributed.advisor.plan:plan_parallelism"
_TRAINING = "train.config:TrainConfig"
_FLAGS = {"gpus": "--world-size"}  # of other commands, which mean the same
_DEVICES = ("h100-80gb", "a100-80gb", "h200", "cpu")


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser(
        "advise",
        usage="panther advise MODEL --world-size N [--device KIND] [options]",
        description="Predict memory, bytes sent and time of every way to train a model on a cluster, and rank them.",
    )
    models = (
        f"transformer/SIZE, one of {', '.join(SIZES)}; a folder of transformers, compressed or not; or "
        "module:function, which returns a model and a batch"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=models)
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help=argparse.SUPPRESS)
    # Measuring starts this many processes, and a plan has as many ranks.
    add_settings(parser, _CLUSTER, "gpus", flags=_FLAGS)
    add_old_spelling(parser, "--gpus", "--world-size")
    help_text = "measure this machine with --world-size processes, or as a rank of a running job, and write the file"
    parser.add_argument("--measure", metavar="FILE", help=help_text)
    parser.add_argument("--cluster", metavar="FILE", help="plan with the speeds of a file that --measure wrote")
    add_option(parser, "--memory", _memory, "memory of a device, as 80GB (default: --device's)", metavar="BYTES")
    parser.add_argument("--device", choices=_DEVICES, help=f"kind of device (default: {_DEVICES[0]})")
    add_settings(parser, _CLUSTER, "gpus_per_node", "efficiency")
    add_option(parser, "--batch", positive, "samples per step, over all ranks (default: one for each device)")
    add_settings(parser, _PLAN, "objective")
    add_option(parser, "--sketch", positive, "sketch size of a transformer's linear layers", metavar="R")
    add_option(parser, "--sequence", positive, "tokens per sample", SEQUENCE)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, with parameters in float32")
    add_settings(parser, _TRAINING, "activation_checkpointing")
    parser.add_argument("--json", action="store_true", help="print all options as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and print the table; return 0 if at least one layout fits into the memory."""
    from panther.distributed import plan_parallelism

    if args.model is not None and args.model_option not in (None, args.model):
        raise PantherError(f"{args.model} and --model {args.model_option} both name a model: give one of them")
    args.model = args.model or args.model_option
    if args.measure is not None:
        first = _measure(args.measure, vars(args).get("gpus"))
        if args.model is None or not first:
            return 0
    if args.model is None:
        raise PantherError("MODEL is missing: name a model to plan for, or only measure with --measure FILE")
    with settings_explained():
        cluster = _cluster(args)
        settings = {"batch": args.batch or cluster.gpus} | given_settings(args, _PLAN, "objective")
        plan = plan_parallelism(_stats(args), cluster, **settings)
    print(json.dumps(plan.to_dict(), indent=2) if args.json else _text(plan))
    return 0 if plan.best.fits else 1


def _cluster(args: argparse.Namespace) -> Any:
    """Return the cluster that --cluster, --measure or else --device describes, with the changes of other options."""
    from panther.distributed import ClusterSpec

    changes = given_settings(args, _CLUSTER, "efficiency", "gpus_per_node")
    changes |= {} if args.memory is None else {"memory_bytes": args.memory}
    file, gpus = args.cluster or args.measure, vars(args).get("gpus")
    if file is None:
        if gpus is None:
            raise PantherError("--world-size is missing: give the number of devices")
        return ClusterSpec.preset(args.device or _DEVICES[0], gpus, **changes)
    if args.device is not None:
        raise PantherError(f"--device {args.device} and {file} both give speeds: use one of them")
    try:
        return ClusterSpec.load(file, gpus, **changes)
    except OSError as error:
        raise PantherError(f"{file} cannot be read ({error.strerror}): write it with --measure {file}") from None


def _measure(file: str, processes: int | None) -> bool:
    """Measure over the ranks of this job, or over processes started here; return whether this is rank 0."""
    from panther.distributed import ClusterSpec, get_rank, init, launch, shutdown

    check_folder(str(Path(file).parent), "--measure")
    if "RANK" in os.environ:  # set by torchrun and panther launch
        init()
        try:
            cluster, first = ClusterSpec.measure(), get_rank() == 0
        finally:
            shutdown()
    else:
        cluster, first = launch(ClusterSpec.measure, nproc=processes or _devices_here())[0], True
    if first:
        cluster.save(file)
        note(f"the speeds of {counted(cluster.gpus, 'device')} are in {file}")
    return first


def _devices_here() -> int:
    import torch

    return torch.cuda.device_count() or os.cpu_count() or 1


def _text(plan: Any) -> str:
    hidden = len(plan.options) - _SHOWN
    more = [f"{hidden} more options are not shown: --json prints all"] if hidden > 0 else []
    return "\n".join([plan.table(_SHOWN), "", plan.explain(_SHOWN), *more, *plan.remarks()])


def _stats(args: argparse.Namespace) -> Any:
    from panther.distributed import ModelStats

    options = given_settings(args, _TRAINING, "activation_checkpointing")
    options["mixed_precision"] = "bf16" if args.bf16 else None
    kind, _, size = args.model.lower().partition("/")
    if kind == "transformer":
        if size not in SIZES:
            raise PantherError(f"--model {args.model} is unknown: {_nearest(size)}use one of {', '.join(SIZES)}")
        layers, hidden, heads = SIZES[size]
        return ModelStats.transformer(
            hidden=hidden,
            layers=layers,
            heads=heads,
            vocab=VOCABULARY,
            sequence=args.sequence,
            sketch=args.sketch,
            **options,
        )
    folder = Path(args.model)
    if not folder.is_dir() and not names_function(args.model):
        raise PantherError(
            f"--model {args.model} is not a folder, and neither transformer/SIZE nor module:function: use for example "
            "transformer/1.3b"
        )
    if args.sketch is not None:
        raise PantherError("--sketch is for transformer/SIZE: let the function return a model with sketched layers")
    if folder.is_dir():
        return _stats_of_folder(folder, args.sequence, options)
    with current_folder_importable():
        expected = "an nn.Module and a batch, the arguments of its forward"
        model, batch, _ = model_and_batches(args.model, expected)
        if batch is None:
            raise wrong_return(args.model, model, expected)
        with explained(f"{args.model}: the model does not run on its batch"):
            return ModelStats.of(model, batch, **options)


def _nearest(size: str) -> str:
    """Return a question with the size that is nearest to a number of parameters, 6.7b for 8b."""
    if not re.fullmatch(r"\d+(\.\d+)?[mb]", size) or not (parameters := _parameters(size)):
        return ""
    nearest_size = min(SIZES, key=lambda name: abs(math.log(_parameters(name) / parameters)))
    return f"did you mean transformer/{nearest_size}? Or "


def _parameters(size: str) -> float:
    return float(size[:-1]) * (1e9 if size[-1] == "b" else 1e6)


def _stats_of_folder(folder: Path, sequence: int, options: dict[str, Any]) -> Any:
    """Measure the model that config.json describes, without its weights."""
    from panther.cli._transformers import empty_model, sample_inputs, usable_positions
    from panther.distributed import ModelStats

    if not (folder / "config.json").is_file():
        raise PantherError(f"{folder} holds no config.json: give a folder that save_pretrained of transformers wrote")
    model = empty_model(folder)
    length = min(sequence, usable_positions(model) or sequence)
    fix = "give module:function, which returns a model and a batch"
    sample: dict[str, Any] = dict(sample_inputs(model, 1, length, fix))
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # training keeps no cache
    with explained(f"{folder}: the model does not run on a sample"):
        return ModelStats.of(model, sample, **options)


def _memory(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes: write it as 80GB or 85899345920")
    value = float(match[1]) * _UNITS[match[2].lower()]
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1 byte")
    return value

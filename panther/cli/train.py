"""``panther train``: a model and data that functions return, trained by the Trainer on one or several processes."""

__all__ = ["add_parser", "read_config", "run"]

import argparse
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panther._setting_names import near_name
from panther.cli._arguments import add_option, check_folder, non_negative, positive
from panther.cli._user_function import call, current_folder_importable, find, names_function, wrong_return
from panther.errors import ConfigError, PantherError

_FUNCTIONS = ("model", "data", "loss_fn", "loss_weight", "optimizer", "scheduler", "metrics")
_PROCESSES = ("--nproc-per-node", "--gpus-per-node", "--num-gpus", "--num-processes")
_LAUNCHER_FLAGS = ("--script", *_PROCESSES, "--nnodes", "--num-nodes", "--backend", "--address")
_HELP = """\
settings are key=value: model, data, loss_fn, loss_weight, optimizer, scheduler,
metrics, and those of panther.train.TrainConfig.

  model=module:function    returns an nn.Module; also without model=, as
                           panther train module:function data=...
  data=module:function     returns a DataLoader or Dataset to train on, or a
                           pair of it and one to validate on
  loss_fn=cross_entropy    a function of torch.nn.functional, or
                           module:function; none if the model returns the loss
  loss_weight=mask         a key or index of the batch whose sum a batch
                           counts, or module:function of the batch
  optimizer=AdamW          a class of torch.optim, or module:function of the
                           parameters
  scheduler=module:function
                           makes a scheduler of the optimizer
  metrics=module:function  returns a mapping of names to functions of output
                           and target
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser("train", epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_option(parser, "--config", str, "TOML or JSON file with settings", metavar="FILE")
    add_option(parser, "--nproc", positive, "processes of this machine", 1)
    add_option(parser, "--max-restarts", non_negative, "restarts after a crash", 0)
    add_option(parser, "--export", str, "folder to write the trained model to, for inference", metavar="FOLDER")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="MODEL|key=value",
        help="the model's function, and settings that replace those of the file",
    )
    for flag in _LAUNCHER_FLAGS:  # the error about them shows the command to use instead
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the settings, train, and print the last record."""
    _refuse_launchers_options(args)
    command_line_settings = _settings_of(args.settings)
    settings = read_config(args.config)[0] if args.config else {}
    # epochs and max_steps exclude each other, so each of them on the command line also replaces the other in the file.
    for name, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
        if command_line_settings.get(name) is not None and other not in command_line_settings:
            settings.pop(other, None)
    settings |= command_line_settings
    functions = {name: settings.pop(name) for name in _FUNCTIONS if name in settings}
    for name in ("model", "data"):
        if name not in functions:
            raise PantherError(f"{name} is missing: add {name}=module:function")
    with current_folder_importable():
        _check(functions, settings)
        if args.export is not None:
            check_folder(args.export, "--export")
        if settings.get("checkpoint_dir") is not None:
            check_folder(settings["checkpoint_dir"], "checkpoint_dir")
        started = "RANK" in os.environ  # torchrun or panther launch sets it
        if not started and (args.nproc > 1 or args.max_restarts):
            return _launch(args, settings.get("checkpoint_dir"))
        last = _train(functions, settings, args.export)
    texts = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in last.items()]
    if texts:
        print("  ".join(texts))
    return 0


def _refuse_launchers_options(args: argparse.Namespace) -> None:
    """Raise if a script or options of other launchers are given; the error shows the command to use instead."""
    flags = {
        flag: value for flag in _LAUNCHER_FLAGS if (value := getattr(args, flag[2:].replace("-", "_"))) is not None
    }
    script = flags.get("--script") or next((text for text in args.settings if text.endswith(".py")), None)
    if script is None or "=" in script:
        if flags:
            processes = next((flags[flag] for flag in _PROCESSES if flag in flags), "N")
            raise PantherError(
                f"{next(iter(flags))} is not an option of panther train: write --nproc {processes} for processes of "
                "this machine, or panther launch ... -m panther train ... for several"
            )
        return
    options = ["--nproc-per-node", next((flags[flag] for flag in _PROCESSES if flag in flags), str(args.nproc))]
    if (nodes := flags.get("--nnodes") or flags.get("--num-nodes")) is not None:
        address = (flags.get("--address") or "HOST:PORT").rpartition("//")[2]
        options += ["--nnodes", nodes, "--rdzv-endpoint", address]
    if flags.get("--backend") in ("gloo", "nccl"):
        options += ["--backend", flags["--backend"]]
    line = " ".join(["panther launch", *options, script, *_arguments_of_script(args.argv, script)])
    raise PantherError(f"panther train takes functions that return a model and data, and no script: use {line}")


def _arguments_of_script(argv: list[str], script: str) -> list[str]:
    """Return the arguments of the command line without the command, the script and the options of launchers."""
    arguments, texts = [], iter(argv)
    for text in texts:
        flag, equals, _ = text.partition("=")
        if flag in ("--nproc", *_LAUNCHER_FLAGS):
            if not equals:
                next(texts, None)
        elif text not in ("train", script):
            arguments.append(text)
    return arguments


def _launch(args: argparse.Namespace, directory: str | None) -> int:
    """Start this command on several processes, or with restarts; their logs go beside the checkpoints."""
    from panther.cli.launch import start
    from panther.distributed import LaunchConfig

    logs = LaunchConfig.log_dir if directory is None else Path(directory) / "logs"
    config = LaunchConfig(nproc_per_node=args.nproc, max_restarts=args.max_restarts, module=True, log_dir=logs)
    options = [] if args.config is None else ["--config", args.config]
    options += [] if args.export is None else ["--export", args.export]
    return start([*config.arguments(), "panther", "train", *options, *args.settings], name="train")


def read_config(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a TOML or JSON file, and its table ``launch``, which is for ``panther init``."""
    from panther.train.config import read_settings

    settings = read_settings(path)
    launch, inner = settings.pop("launch", {}), settings.pop("train", {})
    for name, table in (("launch", launch), ("train", inner)):
        if not isinstance(table, dict):
            raise ConfigError(f"{name!r} in {path} must be a table")
    return settings | inner, launch


def _settings_of(texts: list[str]) -> dict[str, Any]:
    """Return the settings of the command line."""
    from panther.train.config import asks_for_text

    settings = {}
    for item in texts:
        key, equals, text = item.partition("=")
        if not equals and names_function(item) and "model" not in settings:
            key, text = "model", item
        elif not equals or not key:
            raise PantherError(f"{item!r} is not a setting: write key=value")
        settings[key] = (None if text in ("null", "None") else text) if asks_for_text(key) else _value(text)
    return settings


def _value(text: str) -> Any:
    """Return a number, truth value, null or list that is written as in JSON or Python, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _check(functions: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise for errors that can be found before processes start."""
    from panther.train import TrainConfig

    for key in settings:
        # These names are short, so that one wrong letter changes more of them than of the names of settings.
        spelled = difflib.get_close_matches(key, (*_FUNCTIONS, "train", "launch"), 1, cutoff=0.7)
        if (near := near_name(key, _FUNCTIONS) or next(iter(spelled), None)) is not None:
            raise ConfigError(f"{key!r} is not a setting: did you mean {near!r}?")
    TrainConfig(**settings)
    for name, function in functions.items():
        if name in ("loss_fn", "optimizer"):
            _find_in_torch(name, function)
        elif name == "loss_weight":
            _find_weight(function)
        elif names_function(str(function)):
            find(function)
        else:
            raise PantherError(f"{name}={function} must be of the form module:function")


def _find_in_torch(setting: str, name: Any) -> Any:
    """Return the function or class for ``loss_fn`` or ``optimizer``, of torch or as module:function."""
    from torch import optim
    from torch.nn import functional

    if name is None:
        return None
    if names_function(str(name)):
        return find(name)
    if setting == "loss_fn":
        attribute = getattr(functional, str(name), None)
        valid, expected = callable(attribute), "a function of torch.nn.functional: use cross_entropy"
    else:
        attribute = getattr(optim, str(name), None)
        valid = isinstance(attribute, type) and issubclass(attribute, optim.Optimizer)
        expected = "an optimizer of torch.optim: use AdamW, SGD"
    if not valid:
        raise PantherError(f"{setting}={name} is not {expected}, or module:function")
    return attribute


def _find_weight(value: Any) -> Any:
    """Return the function that ``loss_weight`` names, or the key or index of a batch."""
    return find(value) if isinstance(value, str) and names_function(value) else value


def _train(functions: Mapping[str, Any], settings: Mapping[str, Any], export: str | None) -> dict[str, Any]:
    """Train in one process; return the last record on the first rank, and nothing on others."""
    import torch
    from torch import nn

    from panther.distributed import get_rank
    from panther.train import TrainConfig, Trainer
    from panther.train.coordination import join_process_group

    config = TrainConfig(**settings)
    torch.manual_seed(config.seed)
    model, data = call(functions["model"]), call(functions["data"])
    if not isinstance(model, nn.Module):
        raise wrong_return(functions["model"], model, "an nn.Module")
    train, validation = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
    metrics = call(functions["metrics"]) if "metrics" in functions else None
    if "metrics" in functions and not isinstance(metrics, Mapping):
        raise wrong_return(functions["metrics"], metrics, "a mapping of names to functions of output and target")
    loss_fn, optimizer = (_find_in_torch(name, functions.get(name)) for name in ("loss_fn", "optimizer"))
    join_process_group(config.timeout_s)
    options = {"metrics": metrics, "loss_weight": _find_weight(functions.get("loss_weight"))}
    options["scheduler"] = find(functions["scheduler"]) if "scheduler" in functions else None
    trainer = Trainer(model, optimizer, loss_fn, config, **options)
    history = trainer.fit(train, validation)
    if export is not None:
        trainer.export(export)
    return history.last if get_rank() == 0 else {}

"""``panther train``: a model and data that functions return, trained by the Trainer on one or several processes."""

__all__ = ["add_parser", "new_spelling", "read_config", "run"]

import argparse
import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther._hints import near_name
from panther.cli import _options
from panther.cli._arguments import add_option, check_folder
from panther.cli._user_function import call, current_folder_importable, find, names_function, wrong_return
from panther.errors import ConfigError, PantherError

if TYPE_CHECKING:
    from panther.train import TrainConfig

_CONFIG, _LAUNCH = "train.config:TrainConfig", "distributed.launcher.config:LaunchConfig"
_LAUNCH_SETTINGS = ("nproc_per_node", "max_restarts")
_FUNCTIONS = {
    "model": "module:function, which returns an nn.Module",
    "data": "module:function, which returns a DataLoader or Dataset, or a pair of them to train and to validate on",
    "loss_fn": "a function of torch.nn.functional, or module:function; none if the model returns the loss",
    "loss_weight": "a key or index of the batch whose sum a batch counts, or module:function of the batch",
    "optimizer": "a class of torch.optim, or module:function of the parameters",
    "scheduler": "module:function, which makes a scheduler of the optimizer",
    "metrics": "module:function, which returns a mapping of names to functions of output and target",
}


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    # An abbreviated name of a setting would be taken for another setting, such as --epoch for --epochs.
    usage = "panther train [MODEL] [--config FILE] [--data NAME] [options]"
    summary = "Train the model that a function returns, on one process or several, and write it to a folder."
    parser = commands.add_parser("train", usage=usage, description=summary, allow_abbrev=False)
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=_FUNCTIONS["model"])
    parser.add_argument("--model", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_option(parser, "--config", str, "TOML or JSON file with settings and functions", metavar="FILE")
    _options.add_settings(parser, _LAUNCH, *_LAUNCH_SETTINGS)
    _options.add_old_spelling(parser, "--nproc", "--nproc-per-node")
    add_option(parser, "--export", str, "folder to write the trained model to, for inference", metavar="FOLDER")
    functions = parser.add_argument_group("functions, in place of the file's")
    for name, help_text in list(_FUNCTIONS.items())[1:]:
        options: Any = {"type": _options.value_of, "default": argparse.SUPPRESS, "metavar": "NAME", "help": help_text}
        functions.add_argument(_options.flag_of(name), **options)
    settings = parser.add_argument_group("settings of panther.train.TrainConfig, in place of the file's")
    _options.add_settings(settings, _CONFIG)
    parser.set_defaults(run=run, owner="TrainConfig")


def new_spelling(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Return arguments with options in place of settings in the old form ``key=value``, and print a note about them."""
    actions = parser._option_string_actions
    arguments, replaced = list[str](), dict[str, str]()
    for preceding, argument in zip(["", *argv], argv, strict=False):
        name, equals, value = argument.partition("=")
        if equals and name.isidentifier() and (preceding not in actions or actions[preceding].nargs == 0):
            flag = _options.flag_of(name)
            is_bool = flag in actions and actions[flag].nargs == 0
            option = flag if value.lower() == "true" else f"--no-{flag[2:]}"
            replaced[argument] = option if is_bool else f"{flag}={value}"
        arguments.append(replaced.get(argument, argument))
    if replaced:
        _options.note_old_spelling(" ".join(replaced), " ".join(replaced.values()))
    return arguments


def run(args: argparse.Namespace) -> int:
    """Read the settings, train, and print the last record."""
    command_line_settings = _options.given_settings(args, _CONFIG) | _options.given_settings(args, "", *_FUNCTIONS)
    settings = read_config(args.config)[0] if args.config else {}
    # epochs and max_steps exclude each other, so each of them on the command line also replaces the other in the file.
    for name, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
        if command_line_settings.get(name) is not None and other not in command_line_settings:
            settings.pop(other, None)
    settings |= command_line_settings
    functions = {name: settings.pop(name) for name in _FUNCTIONS if name in settings}
    if str(functions.get("model")).endswith(".py"):
        raise PantherError(f"{functions['model']} is a script, which panther launch starts: give module:function")
    for name in ("model", "data"):
        if name not in functions:
            raise PantherError(f"{name} is missing: add {'' if name == 'model' else '--data '}module:function")
    with current_folder_importable():
        with _options.settings_explained():
            config = _checked(functions, settings)
        if args.export is not None:
            check_folder(args.export, "--export")
        if config.checkpoint_dir is not None:
            check_folder(config.checkpoint_dir, "checkpoint_dir")
        started = "RANK" in os.environ  # torchrun or panther launch sets it
        if not started and (status := _launch(args, config.checkpoint_dir)) is not None:
            return status
        last = _train(functions, config, args.export)
    texts = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in last.items()]
    if texts:
        print("  ".join(texts))
    return 0


def _launch(args: argparse.Namespace, directory: str | None) -> int | None:
    """Start this command on several processes, or with restarts, and return its exit status.

    None says that neither is asked for. The logs go beside the checkpoints.
    """
    from panther.cli.launch import start
    from panther.distributed import LaunchConfig

    with _options.settings_explained():
        config = LaunchConfig(**_options.given_settings(args, _LAUNCH, *_LAUNCH_SETTINGS))
    if config == LaunchConfig():
        return None
    logs = LaunchConfig.log_dir if directory is None else Path(directory) / "logs"
    arguments = replace(config, module=True, log_dir=logs).arguments()
    return start([*arguments, "panther", *args.argv], name="train")


def read_config(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a TOML or JSON file, and its table ``launch``, which is for ``panther init``."""
    from panther.train.config import read_settings

    settings = read_settings(path)
    launch, inner = settings.pop("launch", {}), settings.pop("train", {})
    for name, table in (("launch", launch), ("train", inner)):
        if not isinstance(table, dict):
            raise ConfigError(f"{name!r} in {path} must be a table")
    return settings | inner, launch


def _checked(functions: Mapping[str, Any], settings: Mapping[str, Any]) -> "TrainConfig":
    """Return the configuration. Raise for errors that can be found before processes start."""
    from panther.train import TrainConfig

    for key in (key for key in settings if key not in TrainConfig.__dataclass_fields__):
        # These names are short, so that one wrong letter changes more of them than of the names of settings.
        spelled = difflib.get_close_matches(key, (*_FUNCTIONS, "train", "launch"), 1, cutoff=0.7)
        if (near := near_name(key, _FUNCTIONS) or next(iter(spelled), None)) is not None:
            raise ConfigError(f"{key!r} is not a setting: did you mean {near!r}?")
    config = TrainConfig(**settings)
    for name, function in functions.items():
        if name in ("loss_fn", "optimizer"):
            _find_in_torch(name, function)
        elif name == "loss_weight":
            _find_weight(function)
        elif names_function(str(function)):
            find(function)
        else:
            raise PantherError(f"{name}={function} must be of the form module:function")
    return config


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


def _train(functions: Mapping[str, Any], config: "TrainConfig", export: str | None) -> dict[str, Any]:
    """Train in one process; return the last record on the first rank, and nothing on others."""
    import torch
    from torch import nn

    from panther.distributed import get_rank
    from panther.train import Trainer
    from panther.train.coordination import join_process_group

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

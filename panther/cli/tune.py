"""``panther tune``: :func:`panther.tune` of a configuration file, whose functions return the model, metric and data."""

__all__ = ["add_parser", "run"]

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther._hints import name_hint
from panther.cli._arguments import check_files, check_new_folder, performance_noted
from panther.cli._options import add_old_spelling, add_settings, given_settings
from panther.cli._user_function import call, current_folder_importable, find, model_and_batches, names_function
from panther.errors import ConfigError, PantherError
from panther.integrations.folders.beside import check_beside, copy_beside

if TYPE_CHECKING:
    from torch import nn

_CONFIG = "tuning.config:TuneConfig"
_FUNCTIONS = ("model", "evaluate", "calibration")
_ABOUT = """\
Find the smallest version of a trained model that satisfies a bound on a
metric of yours. For example, tune.toml names functions of a file work.py:

  model = "work:net"             # returns a trained nn.Module, or a pair of
                                 # one and batches; or a folder of transformers
  evaluate = "work:accuracy"     # takes a model, and returns its metric
  calibration = "work:batches"   # returns unlabelled batches
  constraint = ">= 99 %"         # of the metric of the unchanged model

and panther tune tune.toml --out small writes the best model.
"""
_HELP = """\
The options are also settings of the file, with underscores. Only the file
has space, sampler, pruner, storage and heal, arguments of panther.tune.
The table [space] has settings for each glob of names, or the text "auto":

  [space]
  "encoder.*" = "auto"
  "head" = { bits = [8, 4] }
  "proj" = { rank = { int = [8, 64], step = 8 } }
  # all layers of a class, with the same settings
  "joint:type:Linear" = { share = { float = [0.1, 0.9] } }
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    usage, form = "panther tune CONFIG [MODEL] --out DIR [options]", argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("tune", usage=usage, description=_ABOUT, epilog=_HELP, formatter_class=form)
    parser.add_argument("config", metavar="CONFIG", help="TOML or JSON file with settings")
    help_text = "module:function, or a folder of transformers, in place of the model in the file"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=help_text)
    parser.add_argument("--out", metavar="DIR", help="folder for the best model, new or empty")
    parser.add_argument("--report", metavar="FILE", help="write all trials as JSON")
    add_old_spelling(parser, "--json", "--report")
    parser.add_argument("--plot", metavar="FILE", help="draw them, to a .svg, .png or .pdf")
    settings = parser.add_argument_group("settings, in place of the file's")
    add_settings(settings, _CONFIG, described_in=("tuning:tune", "compression:compress"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search, print the table, and write the files that the options name."""
    from panther.train.config import read_settings

    settings = read_settings(args.config) | given_settings(args, _CONFIG)
    if args.model is not None:
        settings["model"] = args.model
    out = None if args.out is None else check_new_folder(args.out)
    check_files(report=args.report, plot=args.plot)
    if args.plot is not None:
        from panther.tuning.result import check_plot

        check_plot(args.plot)
    model = settings.get("model")
    folder = Path(model) if isinstance(model, str) and Path(model).is_dir() else None
    if folder is not None and out is not None:
        check_beside(folder, out)
    with current_folder_importable():
        result = _search(settings, args.config)
        print(result)
        if out is not None:
            import panther as pr

            if folder is not None:
                copy_beside(folder, out)
            pr.save_compressed(result.model, out)  # last, so that a folder with a model also has its tokenizer
    if args.report is not None:
        result.to_json(args.report)
    if args.plot is not None:
        result.plot(args.plot)
    return 0


def _search(settings: dict[str, Any], path: str) -> Any:
    import panther as pr

    _check(settings, path)
    functions = {name: settings.pop(name) for name in _FUNCTIONS if name in settings}
    for name in ("objective", "constraint", "catch"):
        if name in settings:
            settings[name] = _functions_of(settings[name])
    evaluate = find(functions["evaluate"])
    model, calibration = _load(functions)
    if isinstance(settings.get("space"), Mapping):
        settings["space"] = {_key(name): setting for name, setting in settings["space"].items()}
    with performance_noted():
        try:
            return pr.tune(model, evaluate, calibration, **settings)
        except PantherError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _check(settings: Mapping[str, Any], path: str) -> None:
    """Raise for names that are not settings, and for missing functions."""
    from panther.tuning.config import TuneConfig

    fields = [name for name in TuneConfig.__dataclass_fields__ if not name.endswith("_fn")]
    for name in settings:
        if name not in ("model", *fields):
            raise ConfigError(f"{name!r} in {path} is not a setting: {name_hint(name, ['model', *fields])}")
    for name in ("model", "evaluate"):
        if name not in settings:
            raise PantherError(f'{name} is missing in {path}: add {name} = "module:function"')
    if not isinstance(settings["model"], str):
        raise PantherError(f"model = {settings['model']!r} in {path} must be a text: a folder, or module:function")
    for name in ("evaluate", "calibration"):
        if name in settings and not names_function(str(settings[name])):
            raise PantherError(f"{name} = {settings[name]!r} in {path} must be of the form module:function")


def _functions_of(setting: Any) -> Any:
    """Return the function that a setting names, or the functions of a list; return any other setting unchanged."""
    if isinstance(setting, list):
        return [_functions_of(text) for text in setting]
    return find(setting) if isinstance(setting, str) and names_function(setting) else setting


def _load(functions: Mapping[str, str]) -> "tuple[nn.Module, Any]":
    """Return the model, and its calibration batches or None."""
    source, calibration = functions["model"], None
    if Path(source).is_dir():
        from panther.cli import _transformers

        model: Any = _transformers.load_model(Path(source))
    elif names_function(source):
        model, calibration, _ = model_and_batches(source)
    else:
        raise PantherError(f"model = {source!r} is not a folder, and not of the form module:function: give one of them")
    if "calibration" in functions:
        calibration = call(functions["calibration"])
    return model, calibration


def _key(name: str) -> Any:
    """Return the key of a space: a class is written as ``type:Linear``, and joint settings as ``joint:GLOB``."""
    from panther.tuning import Group

    match = re.fullmatch(r"(joint:)?(type:)?(.*)", name)
    assert match is not None
    if not (match[1] or match[2]):
        return name
    return Group(type=match[3], joint=bool(match[1])) if match[2] else Group(match[3], joint=True)

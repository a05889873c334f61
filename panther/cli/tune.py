"""``panther tune``: :func:`panther.tune` of a configuration file, whose functions return the model, metric and data."""

__all__ = ["add_parser", "run"]

import argparse
import inspect
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther._setting_names import name_hint
from panther.cli._arguments import check_folder, note
from panther.cli._user_function import call, current_folder_importable, explained, find, names_function, wrong_return
from panther.errors import ConfigError, NumericalWarning, PantherError, PerformanceWarning
from panther.integrations.folders.beside import check_beside, copy_beside

if TYPE_CHECKING:
    from torch import nn

_FUNCTIONS = ("model", "evaluate", "calibration")
_HELP = """\
The file is TOML or JSON. Its settings are:

  model = "module:function"        returns an nn.Module, or a pair of one and
                                   batches; or a folder of transformers
  evaluate = "module:function"     a function of a model that returns its
                                   metric
  calibration = "module:function"  returns batches, unless the model's
                                   function does

objective and constraint can be functions too, in the same form, and catch
names exceptions in it ("torch:OutOfMemoryError"). The other settings are the
arguments of panther.tune: trials, forms, seed, parallel, storage, ... The
table [space] has a table of settings for each glob of names, or the text
"auto":

  [space]
  "encoder.*" = "auto"
  "head" = { bits = [8, 4] }
  "proj" = { rank = { int = [8, 64], step = 8 } }
  # all layers of a class, with the same settings
  "joint:type:Linear" = { share = { float = [0.1, 0.9] } }
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand to an argparse subparsers object."""
    parser = commands.add_parser("tune", epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="TOML or JSON file with settings")
    text = "module:function, or a folder of transformers, in place of the model in the file"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--out", metavar="DIR", help="folder for the best model, new or empty")
    parser.add_argument("--json", metavar="FILE", help="write all trials as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw them, to a .svg, .png or .pdf")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search, print the table, and write the files that the options name."""
    from panther.train.config import read_settings

    settings = read_settings(args.config)
    if args.model is not None:
        settings = {**settings, "model": args.model}
    out = None if args.out is None else check_folder(args.out)
    if out is not None and out.is_dir() and any(out.iterdir()):
        raise PantherError(f"--out {out} is not empty, and might hold another model: give a new folder, or clear it")
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise PantherError(f"{flag} {path} cannot be written: name a file in an existing folder")
    if args.plot is not None:
        from panther.tuning.result import check_plot

        check_plot(args.plot)
    model = settings.get("model")
    folder = Path(model) if isinstance(model, str) and Path(model).is_dir() else None
    if folder is not None and out is not None:
        check_beside(folder, out)
    with current_folder_importable():
        result = _search(dict(settings), args.config)
        print(result)
        if out is not None:
            import panther as pr

            if folder is not None:
                copy_beside(folder, out)
            pr.save_compressed(result.model, out)  # last, so that a folder with a model also has its tokenizer
    if args.json is not None:
        result.to_json(args.json)
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
    with warnings.catch_warnings():
        warnings.simplefilter("always", PerformanceWarning)
        warnings.simplefilter("ignore", NumericalWarning)
        warnings.showwarning = lambda message, *_, **__: note(message)
        try:
            return pr.tune(model, evaluate, calibration, **settings)
        except PantherError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _check(settings: Mapping[str, Any], path: str) -> None:
    """Raise for names that are not settings, and for missing functions."""
    from panther.tuning import tune

    setting_names = [*_FUNCTIONS, *(name for name in inspect.signature(tune).parameters if not name.endswith("_fn"))]
    for name in settings:
        if name not in setting_names:
            hint = name_hint(name, list(dict.fromkeys(setting_names)))
            raise ConfigError(f"{name!r} in {path} is not a setting: {hint}")
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
    from torch import nn

    source = functions["model"]
    calibration: Any = None
    if Path(source).is_dir():
        from panther.cli import _transformers

        model: Any = _transformers.load_model(Path(source))
    elif names_function(source):
        returned = call(source)
        model, calibration = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        if not isinstance(model, nn.Module):
            raise wrong_return(source, returned, "an nn.Module, or a pair of one and a list of batches")
    else:
        raise PantherError(f"model = {source!r} is not a folder, and not of the form module:function: give one of them")
    if "calibration" in functions:
        with explained(f"{functions['calibration']} failed"):
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

"""Options that follow from settings: name, choices, default and help are written in the class or function alone.

The source is read and not run, because importing these classes imports torch, which ``--help`` does not wait for.
"""

__all__ = [
    "add_old_spelling", "add_settings", "flag_of", "given_settings", "note_old_spelling", "settings_explained",
    "value_of",
]  # fmt: skip

import argparse
import ast
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

from panther.cli._arguments import note
from panther.errors import PantherError

_NUMBERS = {"int", "float"}
_TEXTS = {"str", "Literal", "tuple"}  # The class of a tuple divides a text at its commas.
_LISTS = {"Sequence", "Selector"}
_MARKUP = re.compile(r":[\w:]+:`~?(?:[\w.]+\.(?=\w))?([^`<]+?)(?: <[^`]*>)?`|``([^`]*)``")
_LONGEST_METAVAR = 45  # characters; longer lists of choices are in the help
_LISTED_VALUE = re.compile(r'(?:^|[:.,;] | or )``"(\w[\w.+-]*)"``')


class _Setting(NamedTuple):
    """A field of a class, or an argument of a function."""

    types: set[str]
    """Names of the types that a value may have."""
    choices: list[str]
    default: Any
    description: str


def add_settings(
    parser: Any,
    place: str,
    *names: str,
    described_in: tuple[str, ...] = (),
    without: Collection[str] = (),
    flags: Mapping[str, str] = MappingProxyType({}),
    **defaults: Any,
) -> None:
    """Add an option to a parser or group for each setting for which a text can stand.

    ``place`` is ``module:name`` of a dataclass or function, the module relative to ``panther``; ``described_in`` are
    places of functions whose docstrings describe the settings. An option that is not given leaves no attribute, so that
    the default of the class holds, unless ``defaults`` has one. The class or function also checks the values.
    """
    for name, setting in _settings_of(place, described_in).items():
        if name in without or (names and name not in names) or (options := _options_of(name, setting)) is None:
            continue
        default = defaults.get(name, setting.default)
        summary = _summary(setting.description, has_own_default=name in defaults)
        if setting.choices and not setting.types & _NUMBERS and not options["metavar"].startswith("{"):
            summary += f" ({', '.join(setting.choices)})"
        if default not in (None, ()) and default is not False:
            summary += f" (default: {','.join(default) if isinstance(default, tuple) else default})"
        parser.add_argument(
            flags.get(name, flag_of(name)), dest=name, default=defaults.get(name, argparse.SUPPRESS),
            help=summary.replace("%", "%%"), **options,
        )  # fmt: skip


def given_settings(args: argparse.Namespace, place: str, *names: str) -> dict[str, Any]:
    """Return the settings of a class or function that the command line gives; if there are names, only those."""
    return {name: value for name, value in vars(args).items() if name in (names or _settings_of(place))}


def add_old_spelling(parser: argparse.ArgumentParser, flag: str, new_flag: str) -> None:
    """Add a hidden option that sets what ``new_flag`` sets, and prints a note that names it."""
    new_action: Any = parser._option_string_actions[new_flag]

    class Renamed(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            note_old_spelling(flag, new_flag)
            setattr(namespace, self.dest, values)

    parser.add_argument(
        flag, action=Renamed, dest=new_action.dest, type=new_action.type, default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )  # fmt: skip


def note_old_spelling(old: str, new: str) -> None:
    """Print a note about options with new names; a launcher that started this process has printed it."""
    if "RANK" not in os.environ:
        note(f"write {new} in place of {old}, which the next version of Panther does not accept")


def flag_of(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"


def value_of(text: str) -> Any:
    """Return a number, truth value, null or list that is written as in JSON or Python, or else the text."""
    for parse in (json.loads, int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return {"True": True, "False": False, "None": None}.get(text, text)


@contextmanager
def settings_explained() -> Iterator[None]:
    """Turn errors about settings into PantherError, which the command prints as one sentence."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise PantherError(str(error)) from error


def _options_of(name: str, setting: _Setting) -> dict[str, Any] | None:
    """Return what argparse needs to know about a setting, or None if no text can stand for it."""
    types = setting.types
    if "bool" in types:
        return {"action": argparse.BooleanOptionalAction}
    if types & _NUMBERS:
        return {"type": value_of, "metavar": "N"}
    metavar = name.rpartition("_")[2].upper()
    if types & _LISTS:
        return {"nargs": "+", "action": "extend", "metavar": metavar}
    if not types & _TEXTS:
        return None
    choices = "{" + ",".join(setting.choices) + "}"
    metavar = choices if 2 < len(choices) < _LONGEST_METAVAR else metavar
    return {"type": _text_or_none if "None" in types else str, "metavar": metavar}


def _text_or_none(text: str) -> str | None:
    return None if text in ("null", "None") else text


def _summary(description: str, has_own_default: bool) -> str:
    """Return the first sentence of a description, and what None means unless the command has its own default."""
    plain = _MARKUP.sub(lambda match: match[1] or match[2], description).rstrip(".")
    first, *further = plain.split(". ")
    first = first[:1].lower() + first[1:] if first[1:2].islower() else first
    if has_own_default:
        return first.partition("; None ")[0]
    return ". ".join([first, *(sentence for sentence in further if sentence.startswith("None "))])


@cache
def _settings_of(place: str, described_in: tuple[str, ...] = ()) -> Mapping[str, _Setting]:
    """Return the settings of a class or function by name."""
    descriptions: dict[str, str] = defaultdict(str)
    for described_place in (*reversed(described_in), place):
        descriptions |= _described_arguments(_definition(described_place)[1])
    settings = {}
    for name, annotation, default, own_description in _read_settings(place):
        types, description = set(_type_names(annotation)), " ".join((own_description or descriptions[name]).split())
        choices = _LISTED_VALUE.findall(description) if not own_description else []
        if "Literal" in types:
            choices = re.findall(r"'([^']*)'", ast.unparse(annotation))
        try:
            value = None if default is None else ast.literal_eval(default)
        except ValueError:  # It is a name or a call.
            value = None
        settings[name] = _Setting(types, list(dict.fromkeys(choices)), value, description)
    return settings


def _definition(place: str) -> tuple[ast.Module, Any]:
    """Return the source of a module, and the class or function in it, or that a package takes from a module."""
    module_name, _, name = place.partition(":")
    path = files("panther").joinpath(module_name.replace(".", "/"))
    path = path / "__init__.py" if path.is_dir() else files("panther").joinpath(f"{module_name.replace('.', '/')}.py")
    module = ast.parse(path.read_text(encoding="utf-8"))
    node = next((node for node in module.body if getattr(node, "name", None) == name), None)
    return _definition(_origin(module, place, name)) if node is None else (module, node)


def _origin(module: ast.Module, place: str, name: str) -> str:
    """Return the place from which a module imports a name; ``place`` is in the module."""
    imports = (node for node in module.body if isinstance(node, ast.ImportFrom))
    node = next(node for node in imports if name in {alias.name for alias in node.names})
    origin = f"{place.partition(':')[0]}.{node.module}" if node.level else f"{node.module}".removeprefix("panther.")
    return f"{origin}:{name}"


def _read_settings(place: str) -> Iterator[tuple[str, ast.expr, ast.expr | None, str]]:
    """Yield name, annotation, default and docstring of each setting, of base classes first."""
    module, node = _definition(place)
    if isinstance(node, ast.FunctionDef):
        arguments = node.args.args + node.args.kwonlyargs
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        for argument, default in zip(arguments, [None] * (len(arguments) - len(defaults)) + defaults, strict=True):
            if argument.annotation is not None:
                yield argument.arg, argument.annotation, default, ""
        return
    for base in node.bases:
        yield from _read_settings(_origin(module, place, ast.unparse(base)))
    for entry, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and entry.target.id[0] != "_":
            described = following.value if isinstance(following, ast.Expr) else None
            text = str(described.value) if isinstance(described, ast.Constant) else ""
            yield entry.target.id, entry.annotation, entry.value, text


def _type_names(annotation: ast.expr) -> Iterator[str]:
    if isinstance(annotation, ast.BinOp):
        yield from (*_type_names(annotation.left), *_type_names(annotation.right))
    else:
        yield ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)


def _described_arguments(node: Any) -> dict[str, str]:
    """Return the descriptions of arguments in a docstring in Google's style."""
    section = re.search(r"^(?:Args|Attributes):\n((?: .*\n?|\n)*)", ast.get_docstring(node) or "", re.M)
    entries = re.split(r"^ {4}(?=[\w*])", section[1] if section else "", flags=re.M)[1:]
    return {name: text.strip() for name, _, text in (entry.partition(":") for entry in entries)}

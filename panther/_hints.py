"""Hints in errors about names that Panther does not have: attributes, keyword arguments, settings and their values.

``hints.toml`` has the names of other libraries and guides, and what to use in their place. A guess by spelling needs a
close match, because a wrong guess is worse than the list of all names.
"""

__all__ = [
    "advice_for", "check_keywords", "explain_keywords", "explain_keywords_of_class", "hints", "missing_name",
    "name_hint", "near_name", "takes_settings", "value_hint",
]  # fmt: skip

import dis
import functools
import inspect
import sys
import tomllib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, Concatenate, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Fields = ParamSpec("_Fields")
_Config = TypeVar("_Config")
_Model = TypeVar("_Model")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# difflib's ratio: 'gradient_clip' has 0.87 to 'gradient_clipping', 'dpp' has 0.8 to 'pp', 'DistributedConfig' has 0.79
# to 'distributed', 'eps' has 0.67 to 'epochs'.
_CLOSE = 0.82
_LAUNCHED = ("TrainConfig", "parallelism_config")  # whose processes a launcher starts


@functools.cache
def hints() -> Mapping[str, Any]:
    """Return the tables of ``hints.toml``, which are read for the first error that needs them."""
    return tomllib.loads(files("panther").joinpath("hints.toml").read_text(encoding="utf-8"))


def _advice_in(table: Mapping[str, str], name: str) -> str | None:
    """Return the advice of a table whose key lists a name; None if no key does."""
    return next((advice for names, advice in table.items() if name in names.split()), None)


def missing_name(module: str, name: str, names: Collection[str], hint: str | None = None) -> Exception:
    """Return the error of a module's ``__getattr__`` for a name that it does not have, with what to use instead.

    It is an AttributeError, except in ``from module import name``, where Python would replace the text of an
    AttributeError by its own. ``names`` are the names that the module has; ``hint`` is the advice, if it is known.
    """
    if hint is None:
        near = get_close_matches(name, names, 1, cutoff=_CLOSE)
        tables = hints()["attributes"]
        advice = _advice_in(tables.get(module, tables["panther"]), name)
        hint = advice or (f"did you mean {near[0]!r}?" if near else None)
    if hint is None:
        return AttributeError(f"{module} has no attribute {name!r}", name=name)
    caller = sys._getframe(2)  # of the module's __getattr__
    if dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
        return ImportError(f"cannot import name {name!r} from {module!r}: {hint}", name=module)
    return AttributeError(f"{module} has no attribute {name!r}: {hint}", name=name)


def name_hint(name: str, names: Collection[str], owner: str = "") -> str:
    """Return the end of a message about an unknown setting: what to use instead, or all settings.

    Example:
        >>> name_hint("lr", ["learning_rate", "epochs"])
        "did you mean 'learning_rate'?"
        >>> name_hint("eps", ["learning_rate", "epochs"])
        'use some of learning_rate, epochs'
    """
    if (advice := advice_for(name, owner)) is not None:
        return advice
    if (near := near_name(name, names)) is not None:
        return f"did you mean {near!r}?"
    return f"use some of {', '.join(names)}"


def advice_for(name: str, owner: str) -> str | None:
    """Return what to do in place of a setting that other libraries have and the owner has not; None if unknown."""
    settings = hints()["settings"]
    advice = _advice_in(settings["launched"], name) if owner in _LAUNCHED else None
    return advice or _advice_in(settings.get(owner, {}), name)


def near_name(name: str, names: Collection[str]) -> str | None:
    """Return the entry of ``names`` that is a synonym of ``name`` or is spelled similarly, or None.

    A name of several words with which one entry alone begins is spelled similarly too.

    Example:
        >>> near_name("num_gpus", ["gpus", "memory"])
        'gpus'
        >>> near_name("log_every", ["log_every_n_steps", "seed"])
        'log_every_n_steps'
    """
    entries = hints()["synonyms"].items()
    synonyms = [entry for entry, foreign_names in entries if entry in names and name in foreign_names.split()]
    if similar := synonyms or get_close_matches(name, names, 1, cutoff=_CLOSE):
        return similar[0]
    longer = [longer_name for longer_name in names if "_" in name and longer_name.startswith(f"{name}_")]
    return longer[0] if len(longer) == 1 else None


def value_hint(setting: str, value: Any, values: Sequence[Any], owner: str = "") -> str:
    """Return the end of a message about an unknown value of a setting, as :func:`name_hint` does for names.

    Example:
        >>> value_hint("strategy", "FSDP", ["ddp", "fsdp"])
        "did you mean 'fsdp'?"
        >>> value_hint("strategy", "zero2", ["ddp", "fsdp"], "TrainConfig")
        "use strategy='fsdp' with reshard_after_forward=False"
    """
    plain, advice = _letters_and_digits(value), hints()["values"]
    if (hint := _advice_in(advice.get(f"{owner}.{setting}", advice.get(setting, {})), plain)) is not None:
        return hint
    by_plain = {_letters_and_digits(accepted): accepted for accepted in values}
    if near := get_close_matches(plain, by_plain, 1, cutoff=_CLOSE):
        return f"did you mean {by_plain[near[0]]!r}?"
    return f"use one of {', '.join(map(repr, values))}"


def _letters_and_digits(value: Any) -> str:
    return "".join(character for character in str(value).lower() if character.isalnum())


def check_keywords(function: Callable[..., Any], keywords: Collection[str]) -> None:
    """Raise TypeError, with a hint, if a function does not have one of these keyword arguments.

    Example:
        >>> def leading_vectors(A, k): ...
        >>> check_keywords(leading_vectors, ["n_components"])
        Traceback (most recent call last):
        TypeError: leading_vectors() got an unexpected keyword argument 'n_components': did you mean 'k'?
    """
    names = _argument_names(function)
    for keyword in keywords:
        if names is not None and keyword not in names:
            title = function.__qualname__.lstrip("_")
            hint = name_hint(keyword, names, title.removesuffix(".__init__"))
            raise TypeError(f"{title}() got an unexpected keyword argument {keyword!r}: {hint}")


def explain_keywords(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function, so that the error about an unknown keyword argument has a hint."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        check_keywords(function, kwargs)
        return function(*args, **kwargs)

    return call


def explain_keywords_of_class(subclass: type) -> None:
    """Do so for a class with its own ``__init__``. Its base class calls this function in ``__init_subclass__``.

    ``__new__`` could do it as well, but Sphinx and Python before 3.11.4 would show its signature as the class's.
    """
    if "__init__" in vars(subclass):
        subclass.__init__ = explain_keywords(subclass.__init__)  # type: ignore[misc]


def takes_settings(
    config_class: Callable[_Fields, _Config],
) -> Callable[[Callable[[_Model, _Config], _Result]], Callable[Concatenate[_Model, _Fields], _Result]]:
    """Decorate a function of a model and a configuration, so that callers pass the configuration's fields.

    The fields, with their types and defaults, are written once, in the dataclass. ``help``, documentation and type
    checkers see a function of the model and the fields.
    """

    def decorate(function: Callable[[_Model, _Config], _Result]) -> Callable[Concatenate[_Model, _Fields], _Result]:
        signature = inspect.signature(function)
        model, _ = signature.parameters.values()
        make_config: Callable[..., _Config] = config_class
        check = check_keywords  # for call, whose globals are those of the function's module
        signature = signature.replace(parameters=[model, *inspect.signature(config_class).parameters.values()])

        def call(*args: Any, **kwargs: Any) -> _Result:
            check(public, kwargs)
            try:
                settings = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(settings.pop(model.name), make_config(**settings))

        # doctest finds the functions of a module by their globals.
        public = types.FunctionType(call.__code__, function.__globals__, function.__name__, None, call.__closure__)
        public.__signature__ = signature  # type: ignore[attr-defined]  # inspect.signature reads it
        return functools.update_wrapper(public, function)

    return decorate


@functools.cache
def _argument_names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of the keyword arguments, or None if the function takes any."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(entry.name for entry in parameters if entry.kind in _BY_NAME and entry.name != "self")

"""Functions that users name on the command line, as ``module:function``."""

__all__ = [
    "call", "current_folder_importable", "explained", "find", "model_and_batches", "names_function", "wrong_return",
]  # fmt: skip

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panther.errors import PantherError

if TYPE_CHECKING:
    from torch import nn

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def names_function(text: str) -> bool:
    """Return whether a text has the form ``module:function`` and is not an existing path."""
    return _FUNCTION.fullmatch(text) is not None and not Path(text).exists()


def find(spec: str) -> Callable[..., Any]:
    """Import the function that ``module:function`` names, or raise PantherError."""
    name, _, attribute = spec.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise PantherError(f"{name} cannot be imported: it needs {error.name}, which is not installed") from error
        raise PantherError(
            f"{spec}: there is no module {name}, neither in the current folder nor installed: run this in the folder "
            f"that holds {name.partition('.')[0]}.py"
        ) from None
    except Exception as error:
        raise PantherError(f"{name} cannot be imported: {_described(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if not key.startswith("_") and callable(value)]
        raise PantherError(
            f"{spec}: the module {name} has no function {attribute}: it has {', '.join(functions) or 'no functions'}"
        )
    return function


def call(spec: str) -> Any:
    """Call ``module:function``; PantherError says that it does not exist or fails."""
    function = find(spec)
    with explained(f"{spec} failed"):
        return function()


def model_and_batches(
    spec: str, expected: str = "an nn.Module, or a pair of one and a list of batches"
) -> "tuple[nn.Module, Any, bool]":
    """Return the model and the batches, or None, that ``module:function`` returns, and whether it returns a pair.

    PantherError says that it fails, or returns something that is not ``expected``.
    """
    from torch import nn

    returned = call(spec)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    model, batches = returned if is_pair else (returned, None)
    if not isinstance(model, nn.Module):
        raise wrong_return(spec, returned, expected)
    return model, batches, is_pair


def wrong_return(spec: str, returned: Any, expected: str) -> PantherError:
    """Return the error about a function ``spec`` that returned an object of a wrong type; ``expected`` describes it."""
    return PantherError(f"{spec} returns a value of type {type(returned).__name__}: it must return {expected}")


@contextmanager
def explained(failure: str) -> Iterator[None]:
    """Turn errors of any type, except Panther's own, into one sentence that begins with ``failure``."""
    try:
        yield
    except PantherError:
        raise
    except Exception as error:
        raise PantherError(f"{failure}: {_described(error)}") from error


def _described(error: Exception) -> str:
    """Return the first line of an exception, with the file and line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line} ({os.path.basename(frame.filename)}, line {frame.lineno})"


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Search for modules in the current folder first, as ``python -m`` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)

"""Hints in errors about keyword arguments that a function or a class does not have.

Python's own error names the argument. The hint names the argument to use instead, by the table of other libraries'
names in ``panther._setting_names`` or by spelling.
"""

__all__ = ["check_keywords", "explain_keywords", "explain_keywords_of_class"]

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

from panther._setting_names import name_hint

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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


@functools.cache
def _argument_names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of the keyword arguments, or None if the function takes any."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(entry.name for entry in parameters if entry.kind in _BY_NAME and entry.name != "self")

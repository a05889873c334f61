"""Docstrings of families: arguments that several functions or classes share are written once, and all show them."""

__all__ = ["inherit_arguments"]

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

_Member = TypeVar("_Member", bound=Callable[..., Any])
# The sections that follow each of the inherited ones.
_LATER = {
    "Args": re.compile(r"^(?:Returns|Attributes|Shape|Raises|Warns|Cost|Examples?|References?):", re.M),
    "Raises": re.compile(r"^(?:Warns|Cost|Examples?|References?):", re.M),
}


def inherit_arguments(*sources: Any) -> Callable[[_Member], _Member]:
    """Decorate a function or class, whose docstring then has the entries of Args and Raises that it leaves to others.

    An argument that the signature has and the docstring does not describe is described as in the first of the sources
    that describes it. Errors that the docstring does not name are added too, if a source describes them.
    """

    def decorate(member: _Member) -> _Member:
        docstrings = [inspect.getdoc(source) for source in sources]
        if member.__doc__ is None or None in docstrings:  # Python's option -OO removes docstrings.
            return member
        docstring = inspect.cleandoc(member.__doc__)
        for section in _LATER:
            described = _entries(docstring, section)
            inherited: dict[str, str] = {}
            for source in docstrings:
                inherited = _entries(source or "", section) | inherited
            if section == "Args":  # in the order of the signature
                inherited = {name: inherited.get(name, "") for name in _argument_names(member)}
            entries = [entry for entry in (inherited | described).values() if entry]
            docstring = _with_section(docstring, section, entries)
        member.__doc__ = docstring
        return member

    return decorate


def _argument_names(member: Any) -> list[str]:
    kinds: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(member).parameters.values()
    return [kinds.get(parameter.kind, "") + parameter.name for parameter in parameters]


def _find(docstring: str, section: str) -> re.Match[str] | None:
    return re.search(rf"^{section}:\n((?:(?: .*)?(?:\n|$))*)", docstring, re.M)


def _entries(docstring: str, section: str) -> dict[str, str]:
    """Return the entries of a section by the name that they begin with."""
    match = _find(docstring, section)
    entries = re.split(r"^ {4}(?=\S)", match[1] if match else "", flags=re.M)[1:]
    return {entry.partition(":")[0]: entry.rstrip() for entry in entries}


def _with_section(docstring: str, section: str, entries: list[str]) -> str:
    """Return the docstring with these entries in a section, which is added in its place if there is none."""
    if not entries:
        return docstring
    content = "\n    ".join([f"{section}:", *entries])
    if match := _find(docstring, section):
        start, stop = match.span()
    elif following := _LATER[section].search(docstring):
        start = stop = following.start()
    else:
        start = stop = len(docstring)
    return "\n\n".join(part for part in (docstring[:start].rstrip(), content, docstring[stop:]) if part)

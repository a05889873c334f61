"""What to use in place of classes and functions that other libraries and guides have, and Panther has not.

The advice is in ``hints.toml``, for the modules in which people look for these names.
"""

__all__ = ["CLOSE", "advice_in", "hints", "missing_name"]

import dis
import inspect
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import FrameType
from typing import Any

# difflib's ratio: 'gradient_clip' has 0.87 to 'gradient_clipping', 'dpp' has 0.8 to 'pp', 'DistributedConfig' has 0.79
# to 'distributed', 'eps' has 0.67 to 'epochs'.
CLOSE = 0.82


@cache
def hints() -> Mapping[str, Any]:
    """Return the tables of ``hints.toml``, which are read for the first error that needs them."""
    return tomllib.loads(files("panther").joinpath("hints.toml").read_text(encoding="utf-8"))


def advice_in(table: Mapping[str, str], name: str) -> str | None:
    """Return the advice of a table whose key lists a name; None if no key does."""
    return next((advice for names, advice in table.items() if name in names.split()), None)


def missing_name(module: str, name: str, names: Collection[str], hint: str | None = None) -> Exception:
    """Return the error of a module's ``__getattr__`` for a name that it has not, with what to use in its place.

    Args:
        module: The name of the module.
        name: The name that was asked for.
        names: The names that the module has.
        hint: The advice, if the module knows it; None looks for the name in the table, and then for one that is spelled
            much alike.

    Returns:
        An AttributeError; an ImportError in ``from module import name``, in which Python would replace the text of an
        AttributeError by its own.
    """
    if hint is None:
        near = get_close_matches(name, names, 1, cutoff=CLOSE)
        tables = hints()["attributes"]
        advice = advice_in(tables.get(module, tables["panther"]), name)
        hint = advice or (f"did you mean {near[0]!r}?" if near else None)
    end = "" if hint is None else f": {hint}"
    if hint is not None and _is_in_from_import():
        return ImportError(f"cannot import name {name!r} from {module!r}{end}", name=module)
    return AttributeError(f"{module} has no attribute {name!r}{end}", name=name)


def _is_in_from_import() -> bool:
    """Return whether the code that asked ``__getattr__`` is ``from module import name``."""
    frame: FrameType | None = inspect.currentframe()
    for _ in range(3):  # this function, missing_name and __getattr__
        frame = None if frame is None else frame.f_back
    if frame is None:
        return False
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and dis.opname[code[frame.f_lasti]] == "IMPORT_FROM"

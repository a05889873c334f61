"""Panther's exceptions and warnings.

Every message states the rule, the values that broke it, and the fix. Each class also derives from the built-in
exception a torch user would expect, so ``except ValueError`` and the like keep working.
"""

__all__ = [
    "CheckpointError",
    "CompressionError",
    "ConfigError",
    "DTypeError",
    "DistributedError",
    "FormatError",
    "MissingExtraError",
    "NumericalWarning",
    "PantherError",
    "PerformanceWarning",
    "ShapeError",
    "SketchMismatchError",
    "TrainingError",
    "check_device",
    "check_flag",
    "check_floating",
    "check_size",
    "require_extra",
]

from importlib import import_module
from operator import index
from types import ModuleType
from typing import Any

import torch


class PantherError(Exception):
    """Base of all errors raised by Panther."""


class ShapeError(PantherError, ValueError):
    """A size or a shape breaks a rule."""


class DTypeError(PantherError, TypeError):
    """A dtype breaks a rule, or two dtypes do not go together."""


class SketchMismatchError(PantherError, RuntimeError):
    """Two sketches that must be one and the same are not: another seed, scale, version or content."""


class FormatError(PantherError, ValueError):
    """A file is not what Panther's inference format says it should be."""


class CheckpointError(PantherError, RuntimeError):
    """A checkpoint cannot be written, or does not fit what it is loaded into."""


class CompressionError(PantherError, ValueError):
    """A model, its calibration batches or the budget do not allow the compression that was asked for."""


class ConfigError(PantherError, ValueError):
    """A setting is unknown, of the wrong kind, or does not go with another or with what it is for."""


class TrainingError(PantherError, RuntimeError):
    """Training cannot go on."""


class DistributedError(PantherError, RuntimeError):
    """Processes disagree, are missing, or died."""


class MissingExtraError(PantherError, ImportError):
    """An optional dependency is not installed."""


class PerformanceWarning(UserWarning):
    """The request works, but a plain alternative would be smaller or faster."""


class NumericalWarning(UserWarning):
    """The result is less accurate than its dtype allows."""


def check_size(name: str, value: int, least: int) -> int:
    """Return a size given by a user as a Python int.

    Args:
        name: What to call it in the message.
        value: Anything that is an integer, a NumPy one too.
        least: Smallest size allowed.

    Raises:
        TypeError: If it is not an integer.
        ShapeError: If it is smaller than ``least``.

    Example:
        >>> check_size("in_features", 3, least=1)
        3
    """
    try:
        size = None if isinstance(value, bool) else index(value)
    except TypeError:
        size = None
    if size is None:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if size < least:
        raise ShapeError(f"{name}={size} must be at least {least}")
    return size


def check_floating(name: str, dtype: torch.dtype | None) -> None:
    """Raise unless a dtype given by a user is a floating one, or None.

    Raises:
        TypeError: If it is no torch.dtype.
        DTypeError: If it is not floating.

    Example:
        >>> check_floating("dtype", torch.float16)
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, not {type(dtype).__name__}: use torch.float32, say")
    if not dtype.is_floating_point:
        raise DTypeError(f"{name}={dtype} must be a floating dtype: use torch.float32, say")


def check_device(device: Any) -> None:
    """Raise unless a device given by a user is one in a form that torch takes, or None.

    Raises:
        TypeError: If it is something different, such as a tensor.

    Example:
        >>> check_device("cpu")
    """
    if device is not None and (isinstance(device, bool) or not isinstance(device, torch.device | str | int)):
        raise TypeError(f"device must be a torch.device or its name, not {type(device).__name__}: use device='cpu'")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless a switch given by a user is a bool: the text "no" would count as True.

    Example:
        >>> check_flag("bias", True)
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def require_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say how to install it.

    Args:
        module: Name to import, such as ``"sklearn.datasets"``.
        extra: The extra of ``panther-sketch`` that brings it.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: If it is not installed.

    Example:
        >>> require_extra("json", "demo").dumps([1])
        '[1]'
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # the extra is there, something that it needs is not
        raise MissingExtraError(
            f"{module.split('.')[0]} is needed here and is not installed: run pip install 'panther-sketch[{extra}]'"
        ) from error

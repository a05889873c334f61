"""Panther's exceptions and warnings.

Every message states the rule, the values that broke it, and the fix. Each class also derives from the built-in
exception a torch user would expect, so ``except ValueError`` and the like keep working.
"""

__all__ = [
    "CheckpointError", "CompressionError", "ConfigError", "DTypeError", "DistributedError", "FormatError",
    "MissingExtraError", "NumericalWarning", "PantherError", "PerformanceWarning", "ShapeError", "SketchMismatchError",
    "TrainingError", "TuningError", "check_device", "check_flag", "check_floating", "check_size", "check_version",
    "install_command", "require_extra",
]  # fmt: skip

import re
from importlib import import_module
from operator import index
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What pip installs: the folder of a checkout. After the first upload to a package index, the name in pyproject.toml;
# tests/test_packaging.py then lists the pages to change.
_INSTALLED_FROM = "."


class PantherError(Exception):
    """Base of all errors raised by Panther."""


class ShapeError(PantherError, ValueError):
    """A size or a shape breaks a rule."""


class DTypeError(PantherError, TypeError):
    """A dtype breaks a rule, or two dtypes that must agree differ."""


class SketchMismatchError(PantherError, RuntimeError):
    """Two sketches that must be the same differ in their seed, scale, version or content."""


class FormatError(PantherError, ValueError):
    """A file does not follow Panther's inference format."""


class CheckpointError(PantherError, RuntimeError):
    """A checkpoint cannot be written, or does not fit the model or optimizer it is loaded into."""


class CompressionError(PantherError, ValueError):
    """A model, its calibration batches or the budget do not allow the requested compression."""


class ConfigError(PantherError, ValueError):
    """A setting is unknown, of the wrong kind, or contradicts another one or the model."""


class TrainingError(PantherError, RuntimeError):
    """Training cannot continue."""


class TuningError(PantherError, RuntimeError):
    """A search cannot continue, or no trial satisfies its constraints."""


class DistributedError(PantherError, RuntimeError):
    """Processes disagree, are missing, or have died."""


class MissingExtraError(PantherError, ImportError):
    """An optional dependency is not installed."""


class PerformanceWarning(UserWarning):
    """The request works, but a plain alternative would be smaller or faster."""


class NumericalWarning(UserWarning):
    """The result is less accurate than its dtype allows."""


def check_size(name: str, value: int, least: int) -> int:
    """Return a user's size, which may be an integer of NumPy, as a Python int, or raise if it is below ``least``."""
    try:
        size = None if isinstance(value, bool) else index(value)
    except TypeError:
        size = None
    if size is None:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    if size < least:
        raise ShapeError(f"{name}={size} must be at least {least}")
    return size


def check_floating(name: str, dtype: "torch.dtype | None") -> None:
    """Raise unless a user's dtype is floating or None."""
    import torch  # lazy, so that the command line reports errors without waiting for torch

    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, not {type(dtype).__name__}: use one such as torch.float32")
    if not dtype.is_floating_point:
        raise DTypeError(f"{name}={dtype} must be a floating dtype: use one such as torch.float32")


def check_device(device: Any) -> None:
    """Raise unless a user's device is a value that torch accepts, or None."""
    import torch

    if device is not None and (isinstance(device, bool) or not isinstance(device, torch.device | str | int)):
        raise TypeError(f"device must be a torch.device or its name, not {type(device).__name__}: use device='cpu'")
    if isinstance(device, str):
        try:
            torch.device(device)
        except RuntimeError:  # Its text lists twenty types of devices.
            raise ValueError(f"device={device!r} is not a device of torch: use for example 'cpu' or 'cuda:0'") from None
    if isinstance(device, int):
        # A number is the index of a GPU, and torch's error where there is none is about its own compilation.
        count = torch.accelerator.device_count()
        if not 0 <= device < count:
            have = f"{count} of them, from 0 to {count - 1}" if count else "none"
            raise ValueError(
                f"device={device} is the number of a GPU, and this process has {have}: use 'cpu' or another device"
            )


def check_flag(name: str, value: Any) -> None:
    """Raise unless a user's flag is a bool, because the string "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for messages.

    Example:
        >>> install_command("demo")
        "pip install '.[demo]' in Panther's checkout"
    """
    place = " in Panther's checkout" if _INSTALLED_FROM == "." else ""
    return f"pip install '{_INSTALLED_FROM}[{extra}]'{place}"


def require_extra(module: str, extra: str) -> ModuleType:
    """Import and return a module such as ``"sklearn.datasets"``, which one of Panther's extras installs.

    If it is missing, MissingExtraError names the command that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # the extra is installed, but one of its dependencies is not
        raise MissingExtraError(
            f"{module.split('.')[0]} is needed here and is not installed: run {install_command(extra)}"
        ) from error


def check_version(name: str, version: str, *majors: int, least: tuple[int, int] | None = None) -> None:
    """Raise unless the adapter was tested with a library's major version.

    Args:
        name: The library.
        version: Its version.
        majors: The supported major versions.
        least: The oldest supported version, major and minor.

    Raises:
        ConfigError: If the version is not supported.

    Example:
        >>> check_version("transformers", "5.23.0", 5)
        >>> check_version("ray", "2.9.3", 2, least=(2, 60))
        Traceback (most recent call last):
        panther.errors.ConfigError: ray 2.9.3 is installed, and Panther needs 2.60 or newer: pip install 'ray>=2.60'
    """
    if version.partition(".")[0] not in map(str, majors):
        supported = " or ".join(f"{major}.x" for major in majors)
        raise ConfigError(
            f"{name} {version} is installed, and this Panther's adapter is made for {supported}: install that "
            "version, or a newer Panther"
        )
    if least is not None and tuple(map(int, re.findall(r"\d+", version)[:2])) < least:
        raise ConfigError(
            f"{name} {version} is installed, and Panther needs {least[0]}.{least[1]} or newer: "
            f"pip install '{name}>={least[0]}.{least[1]}'"
        )

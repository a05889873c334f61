"""Specifications of a setting's values: integers, floats or choices, which Optuna draws."""

__all__ = ["Choice", "Float", "Int", "Spec", "as_spec", "grid", "middle", "suggest"]

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from panther.errors import ConfigError, check_size

_PLAIN = (str, int, float, bool, type(None))  # types that Optuna's storages support
_GRID = 32  # values of a range that the first trials consider


@dataclass(frozen=True)
class Int:
    """An integer from ``low`` to ``high``, both included, in steps, or drawn by its logarithm.

    Args:
        low: The smallest value.
        high: The largest value.
        step: Distance between values.
        log: Whether the logarithm of the value is drawn uniformly.

    Raises:
        ConfigError: If the range is empty, or ``log`` is given with a step, or a ``low`` below 1.
        TypeError: If a bound is not an integer.

    Example:
        >>> Int(8, 64, step=8)
        Int(low=8, high=64, step=8, log=False)
    """

    low: int
    high: int
    step: int = 1
    log: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("low", "high"):
            object.__setattr__(self, name, check_size(name, getattr(self, name), least=-(2**53)))
        object.__setattr__(self, "step", check_size("step", self.step, least=1))
        _check_range(self, self.step != 1, smallest_log=1)
        object.__setattr__(self, "high", self.low + (self.high - self.low) // self.step * self.step)


@dataclass(frozen=True)
class Float:
    """A number from ``low`` to ``high``, both included, in steps if one is given, or drawn by its logarithm.

    Args:
        low: The smallest value.
        high: The largest value.
        step: Distance between values; None allows any number.
        log: Whether the logarithm of the value is drawn uniformly.

    Raises:
        ConfigError: If the range is empty or not finite, or ``log`` is given with a step, or a ``low`` of at most 0.

    Example:
        >>> Float(1e-4, 1e-2, log=True)
        Float(low=0.0001, high=0.01, step=None, log=True)
    """

    low: float
    high: float
    step: float | None = None
    log: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        for value in (self.low, self.high, self.step or 1.0):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"bounds and step of {self} must be finite numbers")
        if self.step is not None and self.step <= 0:
            raise ConfigError(f"the step of {self} must be above 0: leave it out for any number")
        _check_range(self, self.step is not None, smallest_log=5e-324)
        if self.step is not None:
            object.__setattr__(self, "high", _stepped(self, int((self.high - self.low) / self.step + 1e-9)))


@dataclass(frozen=True)
class Choice:
    """One of a list of values: strings, numbers, booleans or None. A list can be used instead.

    Args:
        values: The values.

    Raises:
        ConfigError: If there is no value, or a value has another type.

    Example:
        >>> Choice(["dense", "int8"])
        Choice(values=('dense', 'int8'))
    """

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        """Check the values."""
        if isinstance(self.values, str) or not isinstance(self.values, Iterable):
            raise ConfigError(f"a choice is among several values, not {self.values!r}: give a list")
        values = tuple(self.values)
        if not values:
            raise ConfigError("a choice has no values: give at least one")
        for value in values:
            if not isinstance(value, _PLAIN):
                kind = type(value).__name__
                raise ConfigError(f"a choice is among texts, numbers, truth values and None, not a {kind}: {value!r}")
        object.__setattr__(self, "values", tuple(dict.fromkeys(values)))


Spec = Int | Float | Choice
_RANGES: dict[str, Any] = {"int": Int, "float": Float}  # classes of ranges by their keys in TOML files


def _check_range(spec: Int | Float, stepped: bool, smallest_log: float) -> None:
    if not spec.low <= spec.high:
        raise ConfigError(f"low={spec.low} must be at most high={spec.high}")
    if spec.log and (stepped or spec.low < smallest_log):
        raise ConfigError(f"log=True takes no step and a low above 0: {spec}")


def _stepped(spec: Int | Float, count: int) -> Any:
    """Return the value ``count`` steps above the lower bound, without accumulating rounding errors."""
    if isinstance(spec, Int):
        return spec.low + count * spec.step
    return float(Decimal(str(spec.low)) + count * Decimal(str(spec.step)))


def as_spec(name: str, value: Any) -> Spec:
    """Return the specification for a specification, a list, a range, a table of a TOML file, or a single value."""
    if isinstance(value, Int | Float | Choice):
        return value
    if isinstance(value, range):
        if not value or value.step < 1:
            raise ConfigError(f"{name}: {value} must be ascending and not empty")
        return Int(value[0], value[-1], value.step)
    if isinstance(value, Mapping):
        options: dict[str, Any] = dict(value)
        bounds = [(make, options.pop(kind)) for kind, make in _RANGES.items() if kind in options]
        match bounds:
            case [(make, [low, high])] if options.keys() <= {"step", "log"}:
                spec: Spec = make(low, high, **options)
                return spec
        raise ConfigError(
            f"{name}: {dict(value)} is not a range: write {{int = [LOW, HIGH]}} or {{float = [LOW, HIGH]}}, with step "
            "or log"
        )
    return Choice(tuple(value) if isinstance(value, list | tuple) else (value,))


def suggest(trial: Any, name: str, spec: Spec) -> Any:
    """Draw a value in an Optuna trial; a single value does not become a parameter of the trial."""
    if len(values := grid(spec)) == 1:
        return values[0]
    if isinstance(spec, Choice):
        return trial.suggest_categorical(name, spec.values)
    if isinstance(spec, Int):
        return trial.suggest_int(name, spec.low, spec.high, step=spec.step, log=spec.log)
    return trial.suggest_float(name, spec.low, spec.high, step=spec.step, log=spec.log)


def grid(spec: Spec) -> list[Any]:
    """Return the values of a specification, or values that cover a long range."""
    if isinstance(spec, Choice):
        return list(spec.values)
    steps = 0 if spec.step is None else round((spec.high - spec.low) / spec.step)
    if 0 < steps < _GRID and not spec.log:
        return [_stepped(spec, index) for index in range(steps + 1)]
    shares = [index / (_GRID - 1) for index in range(_GRID)]
    if spec.log:
        values = [spec.low * (spec.high / spec.low) ** share for share in shares]
    else:
        values = [spec.low + share * (spec.high - spec.low) for share in shares]
    if spec.step is not None:  # An Int always has a step.
        values = [_stepped(spec, round((value - spec.low) / spec.step)) for value in values]
    return list(dict.fromkeys(min(max(value, spec.low), spec.high) for value in values))


def middle(spec: Spec) -> Any:
    """Return the middle of a specification's values, or the first value of a choice."""
    values = grid(spec)
    return values[0] if isinstance(spec, Choice) else values[len(values) // 2]

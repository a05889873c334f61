"""The lines of a user's space: layers, selected by name, type or index, and the values of their settings."""

__all__ = ["AUTO", "Group", "Line", "Request", "as_group", "parse_lines", "request_of", "selected", "used_forms"]

import fnmatch
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from panther.compression.forms import LOW_RANK, form_named, known_forms
from panther.compression.linearization.survey import is_attention
from panther.errors import ConfigError
from panther.nn.attention.feature_map import KERNELS
from panther.tuning.attention import EXACT
from panther.tuning.space.values import Spec, as_spec, grid, suggest


@dataclass(frozen=True)
class Group:
    """A key of a space: the layers that satisfy all conditions.

    Args:
        names: A glob of names, such as ``"encoder.*.up"``, or a tuple of globs.
        type: A class of layers (with its subclasses) or its name, or a tuple.
        contains: A part of the name, or a tuple of alternative parts.
        where: A function of the module and its name.
        indices: Indices among the matching layers, in the model's order: an integer, a tuple or a range.
        joint: Whether all layers have the same values. Otherwise each layer has its values.

    Example:
        >>> Group(
        ...     "encoder.*", type="Linear", indices=range(0, 6, 2), joint=True
        ... ).label
        'encoder.* Linear [0:6:2]'
    """

    names: str | tuple[str, ...] = "*"
    type: Any = None
    contains: str | tuple[str, ...] | None = None
    where: Callable[[nn.Module, str], bool] | None = None
    indices: int | tuple[int, ...] | range | None = None
    joint: bool = False

    def __post_init__(self) -> None:
        """Convert lists to tuples, so that a group can be a key."""
        for name in ("names", "type", "contains", "indices"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        for name in ("names", "contains"):
            if not all(isinstance(item, str) for item in _as_tuple(getattr(self, name))):
                raise ConfigError(f"{name}={getattr(self, name)!r} of a Group must be a text, or several")
        if not all(isinstance(item, str | type) for item in _as_tuple(self.type)):
            raise ConfigError(f"type={self.type!r} of a Group must be a class of layers, its name, or several")
        if self.where is not None and not callable(self.where):
            raise ConfigError(f"where={self.where!r} of a Group must be a function of a module and its name")
        indices = self.indices if isinstance(self.indices, range) else _as_tuple(self.indices)
        if any(isinstance(item, bool) or not isinstance(item, int) for item in indices):
            raise ConfigError(f"indices={self.indices!r} of a Group must be an integer, several, or a range")
        if self.indices is not None and not len(indices):
            raise ConfigError(f"indices={self.indices!r} of a Group selects nothing: leave it out for all")

    @property
    def label(self) -> str:
        """Return the group's name in the parameters of a study."""
        parts = ["|".join(_as_tuple(self.names))]
        parts += ["|".join(item if isinstance(item, str) else item.__name__ for item in _as_tuple(self.type))]
        parts += ["|".join(f"*{item}*" for item in _as_tuple(self.contains))]
        parts += [] if self.where is None else [getattr(self.where, "__name__", "where")]
        if isinstance(self.indices, range):
            parts.append(f"[{self.indices.start}:{self.indices.stop}:{self.indices.step}]")
        elif self.indices is not None:
            parts.append(str(list(_as_tuple(self.indices))))
        return " ".join(filter(None, parts))


def as_group(key: Any) -> Group:
    """Return the group that a key of a space stands for: a glob, a tuple of globs, a class, or a function."""
    if isinstance(key, Group):
        return key
    if isinstance(key, str) or (isinstance(key, tuple) and all(isinstance(glob, str) for glob in key)):
        return Group(key)
    if isinstance(key, type):
        return Group(type=key)
    if callable(key):
        return Group(where=key)
    raise ConfigError(f"space has the key {key!r}: use a glob of names, a class of layers, a function or a Group")


def selected(model: nn.Module, group: Group, attention: bool = False) -> tuple[str, ...]:
    """Return the names of a group's modules, in the model's order: modules with a matrix, or attention."""
    is_eligible = is_attention if attention else _is_layer
    names = tuple(
        name for name, module in model.named_modules() if name and is_eligible(module) and _matches(group, module, name)
    )
    if not names:
        raise ConfigError(
            f"{group.label!r} of the space matches no {'attention' if attention else 'layer'}: "
            "panther.inspect.tree(model) shows their names"
        )
    if group.indices is None:
        return names
    places: Sequence[int] = group.indices if isinstance(group.indices, range) else _as_tuple(group.indices)
    try:
        return tuple(dict.fromkeys(names[place] for place in places))
    except IndexError:
        raise ConfigError(
            f"{group.label!r} of the space needs the layers at {list(places)}, and {len(names)} match, from 0 to "
            f"{len(names) - 1}"
        ) from None


def _matches(group: Group, module: nn.Module, name: str) -> bool:
    types, parts = _as_tuple(group.type), _as_tuple(group.contains)
    kinds = [kind.__name__ for kind in type(module).__mro__]
    return (
        any(fnmatch.fnmatchcase(name, item) for item in _as_tuple(group.names))
        and (not types or any(item in kinds if isinstance(item, str) else isinstance(module, item) for item in types))
        and (not parts or any(part in name for part in parts))
        and (group.where is None or bool(group.where(module, name)))
    )


def _is_layer(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return () if value is None else value if isinstance(value, tuple) else (value,)


AUTO = "auto"
_OF_LAYERS = ("form", "rank", "bits", "share", "num_terms", "low_rank")
_OF_ATTENTION = ("kernel_fn", "num_random_features")
_INTEGERS = ("rank", "bits", "num_terms", "low_rank", "num_random_features")
_MAX_COMBINATIONS = 512  # combinations of the settings of a line that the first trials consider


@dataclass(frozen=True)
class Line:
    """A line of a space: layers, and the specifications of their common settings."""

    label: str
    names: tuple[str, ...]
    specs: Mapping[str, Spec]

    def __str__(self) -> str:
        """Return the label, names and specifications, which are equal for equal lines."""
        names = "" if self.names == (self.label,) else f" ({' '.join(self.names)})"
        return f"{self.label}{names} {dict(self.specs) or 'auto'}"

    @property
    def kind(self) -> str:
        """Return the kind of settings: ``"layers"``, ``"auto"`` or ``"attention"``."""
        if not self.specs:
            return AUTO
        return "attention" if not self.specs.keys().isdisjoint(_OF_ATTENTION) else "layers"

    def draw(self, trial: Any) -> dict[str, Any]:
        """Draw the settings of an Optuna trial that the drawn form has."""
        settings: dict[str, Any] = {}
        for name in (*_OF_LAYERS, *_OF_ATTENTION):
            if name in self.specs and _is_used(name, settings):
                settings[name] = suggest(trial, f"{self.label}/{name}", self.specs[name])
        return settings

    def values(self) -> list[dict[str, Any]]:
        """Return all combinations of settings, or an evenly spaced selection of at most 512."""
        grids = {name: grid(self.specs[name]) for name in _OF_LAYERS if name in self.specs}
        step = -(-math.prod(map(len, grids.values())) // _MAX_COMBINATIONS)
        combinations: list[dict[str, Any]] = []
        for values in itertools.islice(itertools.product(*grids.values()), 0, None, step):
            settings = dict(zip(grids, values, strict=True))
            used_settings = {name: value for name, value in settings.items() if _is_used(name, settings)}
            if used_settings not in combinations:
                combinations.append(used_settings)
        return combinations


def _is_used(name: str, values: Mapping[str, Any]) -> bool:
    if name in _OF_ATTENTION:
        return name == "kernel_fn" or values.get("kernel_fn") not in (EXACT, "taylor")
    return name in ("form", "bits") or form_named(request_of(values).form).has_rank


class Request(NamedTuple):
    """What the values of a line's settings ask for.

    The measure is ``"rank"`` or ``"share"`` of a layer's bytes, which the limit bounds, or empty.
    """

    form: str
    measure: str = ""
    limit: float = 0.0


def request_of(values: Mapping[str, Any]) -> Request:
    """Return what the values of a line's settings ask for."""
    form = f"int{values['bits']}" if "bits" in values else str(values.get("form", LOW_RANK))
    if "low_rank" in values:  # the sizes of an SKLinear
        return Request(form, "rank", 2 * values.get("num_terms", 1) * values["low_rank"])
    measure = next((measure for measure in ("rank", "share") if measure in values), "")
    return Request(form, measure, values.get(measure, 0.0))


def parse_lines(model: nn.Module, space: Mapping[Any, Mapping[str, Any]]) -> list[Line]:
    """Return the lines of a user's space."""
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(
            f"space={space!r} must be 'auto', or a dict with the values of settings by layers, such as "
            "{'encoder.*': {'rank': [16, 32]}}"
        )
    lines: list[Line] = []
    key_by_layer: dict[str, Any] = {}
    for key, settings in space.items():
        group = as_group(key)
        if isinstance(settings, str) and settings == AUTO:
            settings = {}
        elif not isinstance(settings, Mapping) or not settings:
            raise ConfigError(
                f"space[{key!r}]={settings!r} must be 'auto' or a dict of settings, such as {{'rank': [16, 32]}}"
            )
        specs = {name: as_spec(f"space[{key!r}][{name!r}]", value) for name, value in settings.items()}
        _check_settings(key, specs)
        line = Line(group.label, (), specs)
        names = selected(model, group, attention=line.kind == "attention")
        if twice := next((name for name in names if name in key_by_layer), None):
            raise ConfigError(
                f"layer {twice!r} is in two lines of the space, {key_by_layer[twice]!r} and {key!r}: remove it from one"
            )
        key_by_layer |= dict.fromkeys(names, key)
        if group.joint or line.kind == AUTO:
            # Labels must differ, although for example all lambdas have the same name. No layer is in two lines.
            labels = {earlier.label for earlier in lines}
            label = f"{group.label} ({names[0]})" if group.label in labels else group.label
            lines.append(Line(label, names, specs))
        else:
            lines += [Line(name, (name,), specs) for name in names]
    return lines


def _check_settings(key: Any, specs: Mapping[str, Spec]) -> None:
    """Raise ConfigError if a setting of a line is unknown, contradicts another one, or has an impossible value."""
    of_attention = not specs.keys().isdisjoint(_OF_ATTENTION)
    known_settings = _OF_ATTENTION if of_attention else (*_OF_LAYERS, *_OF_ATTENTION)
    for name, spec in specs.items():
        if name not in known_settings:
            names = ", ".join(map(repr, known_settings))
            raise ConfigError(f"space[{key!r}] has the unknown setting {name!r}: use some of {names}")
        for value in grid(spec):
            if name in _INTEGERS and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
                raise ConfigError(
                    f"space[{key!r}]: {name} {value!r} must be an integer, at least 1: use a list of them, or Int"
                )
            if name == "share" and not (isinstance(value, int | float) and value > 0 and value is not True):
                raise ConfigError(f"space[{key!r}]: share {value!r} must be a number above 0: use a list, or Float")
    if of_attention:
        kernels = grid(specs["kernel_fn"]) if "kernel_fn" in specs else []
        if unknown := [name for name in kernels if name not in (EXACT, *KERNELS)]:
            names = ", ".join(map(repr, (EXACT, *KERNELS)))
            raise ConfigError(f"space[{key!r}]: kernel_fn {unknown[0]!r} is unknown: use some of {names}")
        if "num_random_features" not in specs and not {EXACT, "taylor"}.issuperset(kernels):
            raise ConfigError(f"space[{key!r}] has no number of features: add 'num_random_features'")
        return
    for setting, other in (("form", "bits"), ("rank", "share"), ("rank", "low_rank"), ("share", "low_rank")):
        if setting in specs and other in specs:
            raise ConfigError(f"space[{key!r}] has both {setting!r} and {other!r}, which are alternatives: remove one")
    forms = used_forms(specs)
    if unknown := [form for form in forms if form not in known_forms()]:
        raise ConfigError(f"space[{key!r}]: form {unknown[0]!r} is unknown: use some of {', '.join(known_forms())}")
    if "num_terms" in specs and "low_rank" not in specs:
        raise ConfigError(f"space[{key!r}] has 'num_terms' and no rank of a term: add 'low_rank'")
    ranked = [form for form in forms if form_named(form).has_rank]
    if specs and ranked and not {"rank", "share", "low_rank"} & specs.keys():
        raise ConfigError(f"space[{key!r}] has the form {ranked[0]!r} and no rank: add 'rank' or 'share'")


def used_forms(specs: Mapping[str, Spec]) -> list[str]:
    """Return the forms that the layers of a line may have."""
    names = [name for name in ("form", "bits") if name in specs]
    return [request_of({name: value}).form for name in names for value in grid(specs[name])] or [LOW_RANK]

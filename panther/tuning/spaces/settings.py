"""The settings that a line of a space can have, and checks of their values."""

__all__ = ["OF_ATTENTION", "OF_LAYERS", "check_settings", "used_forms"]

from collections.abc import Mapping
from typing import Any

from panther.compression.forms import LOW_RANK, form_named, known_forms
from panther.errors import ConfigError
from panther.nn.attention.feature_map import KERNELS
from panther.tuning.attention import EXACT
from panther.tuning.spaces.values import Spec, grid

OF_LAYERS = ("form", "rank", "bits", "share", "num_terms", "low_rank")
OF_ATTENTION = ("kernel_fn", "num_random_features")
_OF_SCRATCH = ("num_terms", "low_rank")
_LEAST = {"rank": 1, "bits": 1, "num_terms": 1, "low_rank": 1, "num_random_features": 1}


def check_settings(key: Any, specs: Mapping[str, Spec], scratch: bool) -> None:
    """Raise ConfigError if a setting of a line is unknown, contradicts another one, or has an impossible value."""
    if scratch:
        if "low_rank" not in specs or not set(_OF_SCRATCH).issuperset(specs):
            raise ConfigError(
                f"space[{key!r}] has {sorted(specs)}: a layer that is trained has 'low_rank', and 'num_terms' if there "
                "is more than one"
            )
        _check_values(key, specs, _LEAST | {"low_rank": 0})  # 0 keeps the layer dense.
        return
    of_attention = not specs.keys().isdisjoint(OF_ATTENTION)
    line_settings = OF_ATTENTION if of_attention else OF_LAYERS
    for name in specs:
        if name not in line_settings:
            all_settings = (*OF_LAYERS, *OF_ATTENTION) if not of_attention else line_settings
            names = ", ".join(map(repr, all_settings))
            raise ConfigError(f"space[{key!r}] has the unknown setting {name!r}: use some of {names}")
    _check_values(key, specs, _LEAST)
    if of_attention:
        _check_attention(key, specs)
        return
    for setting, other in (("form", "bits"), ("rank", "share"), ("rank", "low_rank"), ("share", "low_rank")):
        if setting in specs and other in specs:
            raise ConfigError(f"space[{key!r}] has both {setting!r} and {other!r}, which are alternatives: remove one")
    for form in used_forms(specs):
        if form not in known_forms():
            raise ConfigError(f"space[{key!r}]: form {form!r} is unknown: use some of {', '.join(known_forms())}")
    ranked = [form for form in used_forms(specs) if form_named(form).has_rank]
    if "num_terms" in specs and "low_rank" not in specs:
        raise ConfigError(f"space[{key!r}] has 'num_terms' and no rank of a term: add 'low_rank'")
    if specs and ranked and not {"rank", "share", "low_rank"} & specs.keys():
        raise ConfigError(f"space[{key!r}] has the form {ranked[0]!r} and no rank: add 'rank' or 'share'")


def _check_values(key: Any, specs: Mapping[str, Spec], least: Mapping[str, int]) -> None:
    for name, spec in specs.items():
        for value in grid(spec):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in least and not (number and isinstance(value, int) and value >= least[name]):
                raise ConfigError(
                    f"space[{key!r}]: {name} {value!r} must be an integer, at least {least[name]}: use a list of them, "
                    "or Int"
                )
            if name == "share" and not (number and value > 0):
                raise ConfigError(f"space[{key!r}]: share {value!r} must be a number above 0: use a list, or Float")


def _check_attention(key: Any, specs: Mapping[str, Spec]) -> None:
    kernels = grid(specs["kernel_fn"]) if "kernel_fn" in specs else []
    if unknown := [name for name in kernels if name not in (EXACT, *KERNELS)]:
        names = ", ".join(map(repr, (EXACT, *KERNELS)))
        raise ConfigError(f"space[{key!r}]: kernel_fn {unknown[0]!r} is unknown: use some of {names}")
    if "num_random_features" not in specs and not {EXACT, "taylor"}.issuperset(kernels):
        raise ConfigError(f"space[{key!r}] has no number of features: add 'num_random_features'")


def used_forms(specs: Mapping[str, Spec]) -> list[str]:
    """Return the forms that the layers of a line may have."""
    if "form" in specs:
        return [str(form) for form in grid(specs["form"])]
    if "bits" in specs:
        return [f"int{bits}" for bits in grid(specs["bits"])]
    return [LOW_RANK]

"""The perceptron of sketched layers that the guide's classes build, and the check of their `layer_configs`."""

__all__ = ["check_configs", "perceptron"]

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from panther.errors import ShapeError, check_size
from panther.nn import SKLinear

_KEYS = ("in_features", "out_features", "sketch_size")


def check_configs(
    layer_configs: Sequence[Mapping[str, Any]], optional: Sequence[str] = ()
) -> list[tuple[int, int, int]]:
    """Return every layer's three sizes, or raise if a size is missing or an input's width is not the last output's."""
    if isinstance(layer_configs, str) or not isinstance(layer_configs, Sequence):
        raise TypeError(f"layer_configs must be a list of mappings, not {type(layer_configs).__name__}")
    if not layer_configs:
        raise ShapeError("layer_configs is empty and must have at least one layer")
    for index, config in enumerate(layer_configs):
        if not isinstance(config, Mapping):
            raise TypeError(f"layer_configs[{index}] must be a mapping, not {type(config).__name__}")
        for key in config:
            if key not in (*_KEYS, *optional):
                raise ShapeError(
                    f"layer_configs[{index}] has the unknown key {key!r}: use {', '.join((*_KEYS, *optional))}"
                )
        if missing := [key for key in _KEYS if key not in config]:
            raise ShapeError(f"layer_configs[{index}] lacks {', '.join(missing)}: add it")
        for key in _KEYS:
            check_size(f"layer_configs[{index}][{key!r}]", config[key], least=1)
    for index, (before, after) in enumerate(pairwise(layer_configs)):
        if before["out_features"] != after["in_features"]:
            raise ShapeError(
                f"layer_configs[{index}] gives {before['out_features']} features and layer_configs[{index + 1}] takes "
                f"{after['in_features']}: make them equal"
            )
    return [(config["in_features"], config["out_features"], config["sketch_size"]) for config in layer_configs]


def perceptron(sizes: Iterable[tuple[int, int, int]]) -> nn.Sequential:
    """Build SKLinears of the given inputs, outputs and sketch sizes, with ReLU between them."""
    model = nn.Sequential()
    for n_in, n_out, sketch_size in sizes:
        if model:
            model.append(nn.ReLU())
        model.append(SKLinear(n_in, n_out, sketch_size))
    return model

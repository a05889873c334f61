"""Check the `layer_configs` that several of the guide's classes take."""

__all__ = ["check_configs"]

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from panther.errors import ShapeError

_KEYS = ("in_features", "out_features", "sketch_size")


def check_configs(layer_configs: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless every layer has its three sizes, and each layer's input is as wide as the last one's output."""
    if not layer_configs:
        raise ShapeError("layer_configs is empty and must have at least one layer")
    for index, config in enumerate(layer_configs):
        if set(config) != set(_KEYS):
            raise ShapeError(f"layer_configs[{index}] must have the keys {', '.join(_KEYS)}, not {', '.join(config)}")
    for index, (before, after) in enumerate(pairwise(layer_configs)):
        if before["out_features"] != after["in_features"]:
            raise ShapeError(
                f"layer_configs[{index}] gives {before['out_features']} features and layer_configs[{index + 1}] takes "
                f"{after['in_features']}: make them equal"
            )

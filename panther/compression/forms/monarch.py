"""Monarch layers in the place of linear layers, which :func:`panther.sketch_layers_` makes without a fit."""

__all__ = ["convert_to_monarch", "monarch_option", "monarch_refusal"]

from panther._process_settings import ignored_warnings
from panther.compression.calibration.targets import Target
from panther.compression.forms.base import Option, Replacement, replace_layers
from panther.errors import PerformanceWarning
from panther.nn import MonarchLinear


def monarch_option(target: Target, fraction: float) -> Option:
    """Return the bytes and the rank of the layers with this fraction of the weight's numbers."""
    with ignored_warnings(category=PerformanceWarning):  # a layer that is not smaller is refused
        layer = MonarchLinear(target.inner, target.outer, fraction=fraction, bias=False, device="meta")
    return Option("monarch", (layer.down.numel() + layer.up.numel()) * target.weight.itemsize, layer.rank)


def monarch_refusal(target: Target, fraction: float) -> str | None:
    """Return why the layers of a weight stay dense; None if Monarch layers can take their places."""
    if not target.kind.is_linear:
        return f"is a {target.class_name}, and kind='monarch' replaces linear layers only"
    smallest = monarch_option(target, fraction).bytes
    if smallest < target.dense_bytes:
        return None
    return f"would not shrink: fraction={fraction} takes {smallest:,} bytes, the layer {target.dense_bytes:,}"


def convert_to_monarch(target: Target, fraction: float, seed: int) -> Replacement:
    """Make a Monarch layer for each layer of the target; see :meth:`WeightKind.monarch_layer`."""
    return replace_layers(target, lambda module: target.kind.monarch_layer(module, fraction, seed))

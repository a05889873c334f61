"""New layers in the place of old ones: what all forms share when they convert a weight."""

__all__ = ["Replacement", "inherit_flags", "replace_layers"]

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from panther._process_settings import ignored_warnings
from panther._torch import buffers_of, parameters_of
from panther.compression.calibration.targets import Target
from panther.errors import PerformanceWarning
from panther.nn.factors import inherit_settings
from panther.nn.protocol import CompressedModule

Replacement = dict[nn.Module, nn.Module]
"""The new layer of each old layer."""


def replace_layers(
    target: Target,
    make: Callable[[nn.Module], CompressedModule],
    bias_change: Tensor | float = 0.0,
    *,
    share_buffers: bool = False,
) -> Replacement:
    """Make a new layer for each layer of the target.

    Each new layer has the bias of its old layer plus ``bias_change``. All share the parameters of the first one, and
    with ``share_buffers``, as codes need it, also its buffers.
    """
    with ignored_warnings(category=PerformanceWarning):  # the report lists the speed of every layer
        new = {module: make(module) for module in target.modules}
    first = new[target.modules[0]]
    for module, layer in new.items():
        bias = getattr(module, "bias", None)
        if bias is not None:
            with torch.no_grad():
                layer.get_parameter("bias").copy_(bias + bias_change)
        for name in parameters_of(first).keys() - {"bias"}:
            layer.register_parameter(name, parameters_of(first)[name])
        if share_buffers:
            buffers_of(layer).update(buffers_of(first))
    return dict(new)


def inherit_flags(replacement: Mapping[nn.Module, nn.Module]) -> None:
    """Give new layers the training mode and flags of the old ones, and what users set on them."""
    for old, new in replacement.items():
        inherit_settings(new, old)

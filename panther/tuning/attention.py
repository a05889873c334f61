"""Attention in a search: the modules that can become attention by features, and their replacements."""

__all__ = ["EXACT", "Attention", "calibrated", "find", "replacement_of"]

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import replace_modules
from panther.compression.forms import Replacement
from panther.compression.linearization.survey import find_attention
from panther.errors import ConfigError, TuningError
from panther.nn import RandMultiHeadAttention
from panther.nn.attention.linearized import CHILD, convert_attention
from panther.nn.attention.random_features import RandomFeatureAttention
from panther.nn.attention.record import sizes_of
from panther.tuning.guards import STILL_REFERENCED, Usage, recording_usage

EXACT = "exact"  # value of kernel_fn that keeps the softmax

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Attention:
    """The attention modules of a model that a search may replace.

    Attributes:
        modules: The modules that can be replaced, by name.
        reasons: Why an attention module cannot be replaced, by name.
    """

    modules: Mapping[str, nn.Module]
    reasons: Mapping[str, str]

    def checked(self, label: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the modules that can be replaced.

        Raises:
            ConfigError: If no module can be replaced.
        """
        replaceable = tuple(name for name in names if name in self.modules)
        if not replaceable:
            why = "; ".join(f"{name!r} {self.reasons[name]}" for name in names if name in self.reasons)
            raise ConfigError(
                f"{label!r} of the space matches no attention that can be replaced{': ' if why else ''}{why}: "
                "nn.MultiheadAttention and transformers' modules that take an attention function can"
            )
        return replaceable


def find(model: nn.Module) -> Attention:
    """Find the attention modules of a model."""
    survey = find_attention(model, None, None)
    return Attention(survey.modules, {entry.name: entry.reason for entry in survey.skipped})


def replacement_of(
    modules: Mapping[str, nn.Module], settings_by_name: Mapping[str, Settings], seed: int
) -> Replacement:
    """Return the new modules. They share all parameters with transformers' modules, and none with torch's."""
    new: Replacement = {}
    for index, (name, settings) in enumerate(sorted(settings_by_name.items())):
        module, layer_seed = modules[name], (seed + index) % 2**63
        features, kernel = settings.get("num_random_features", 1), settings["kernel_fn"]
        if isinstance(module, nn.MultiheadAttention):
            layer = RandMultiHeadAttention.from_mha(module, features, kernel_fn=kernel, seed=layer_seed)
            layer._unchecked = False  # The metric shows how good it is.
            new[module] = layer
        else:
            sizes = sizes_of(module)
            assert sizes is not None  # find() skips modules without sizes.
            like = next(module.parameters())
            core = RandomFeatureAttention(*sizes, features, kernel_fn=kernel, seed=layer_seed, device=like.device)
            new[module] = convert_attention(module, core.to(like.dtype))
    return new


def calibrated(runner: Runner, new: Replacement, names: Mapping[nn.Module, str]) -> Replacement:
    """Fit the feature maps to the first batch, and check that the model uses only the new modules.

    Raises:
        TuningError: If a new module is not called, an old module is still used, or a call is not possible.
    """
    if not new or not runner.batches:
        return new
    usage = Usage()
    with ExitStack() as stack, torch.no_grad():
        for layer in new.values():
            _calibrate_on_call(stack, layer)
        stack.enter_context(replace_modules(runner.model, new))
        stack.enter_context(recording_usage(runner.model, new, usage))
        try:
            runner.output(runner.batches[0])
        except Exception as error:
            raise TuningError(
                f"attention by features does not run in this model: {error}: leave the layer out of the space"
            ) from error
    for old in new:
        if old in usage.held or old not in usage.called:
            problem = "is not called in" if old not in usage.called else "is called as well as the old module in"
            raise TuningError(
                f"attention {names[old]!r} was replaced, and the new module {problem} the first calibration "
                f"batch: {STILL_REFERENCED}"
            )
    return new


def _calibrate_on_call(stack: ExitStack, layer: nn.Module) -> None:
    """Fit a layer to the arguments of its first call, before the call."""
    core: Any = layer if isinstance(layer, RandMultiHeadAttention) else getattr(layer, CHILD)
    if core.kernel_fn not in ("hermite", "oprf"):
        return

    def fit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        if isinstance(core, RandMultiHeadAttention):
            query, key = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            core.calibrate_(query, key)
        else:
            mask = args[3] if len(args) > 3 else kwargs.get("key_mask")
            core.calibrate_(args[0], args[1], mask, kwargs.get("scale"))

    handle = core.register_forward_pre_hook(fit, with_kwargs=True)
    stack.callback(handle.remove)

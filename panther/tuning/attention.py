"""Attention by features in a search: the new modules, fitted to a batch."""

__all__ = ["EXACT", "calibrated", "replacement_of"]

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import replace_modules
from panther.compression.forms import Replacement
from panther.errors import TuningError
from panther.nn import RandMultiHeadAttention
from panther.nn.attention.linearized import CHILD, convert_attention
from panther.nn.attention.random_features import RandomFeatureAttention
from panther.nn.attention.record import sizes_of

EXACT = "exact"  # value of kernel_fn that keeps the softmax

Settings = Mapping[str, Any]


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
            assert sizes is not None  # find_attention() skips modules without sizes.
            like = next(module.parameters())
            core = RandomFeatureAttention(*sizes, features, kernel_fn=kernel, seed=layer_seed, device=like.device)
            new[module] = convert_attention(module, core.to(like.dtype))
    return new


def calibrated(runner: Runner, new: Replacement, names: Mapping[nn.Module, str]) -> Replacement:
    """Fit the feature maps to the first batch, and check that the model uses only the new modules.

    A list in the model, or a forward that a library has stored, can still refer to a replaced module.
    """
    if not new or not runner.batches:
        return new
    called: set[nn.Module] = set()
    with ExitStack() as stack, torch.no_grad():
        for old, layer in new.items():
            _calibrate_on_call(stack, layer)
            stack.callback(layer.register_forward_pre_hook(lambda *_, old=old: called.add(old)).remove)
        stack.enter_context(replace_modules(runner.model, new))
        try:
            runner.output(runner.batches[0])
        except Exception as error:
            raise TuningError(
                f"attention by features does not run in this model: {error}: leave the layer out of the space"
            ) from error
    if uncalled := [names[old] for old in new if old not in called]:
        raise TuningError(
            f"module {uncalled[0]!r} was replaced, and the new module is not called in the first calibration batch: "
            "something else references the old one, for example a forward that a library has stored: remove the "
            "reference, or exclude it from the search"
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

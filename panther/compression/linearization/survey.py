"""Find the attention modules of a model that can be converted, and the reasons why further ones cannot."""

__all__ = ["AttentionModules", "find_attention", "is_attention", "make_attention"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from panther._torch import children_of
from panther.compression.calibration.survey import is_selected, selectors_of, unmatched_notes
from panther.compression.calibration.targets import Selector, SkippedLayer
from panther.nn import LearnedLinearAttention, RandMultiHeadAttention
from panther.nn.attention.interface import calls_interface
from panther.nn.attention.linearized import CHILD
from panther.nn.attention.record import sizes_of
from panther.nn.factors import settings_refusal


@dataclass(frozen=True)
class AttentionModules:
    """Attention modules to convert, by name, and attention modules that keep their softmax."""

    modules: Mapping[str, nn.Module]
    skipped: tuple[SkippedLayer, ...]
    notes: tuple[str, ...]


def find_attention(model: nn.Module, include: Any, exclude: Any) -> AttentionModules:
    """Find the attention modules of a model."""
    included, excluded = selectors_of("include", include, ("*",)), selectors_of("exclude", exclude, ())
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    modules, skipped = {}, []
    for module, places in names.items():
        if not is_attention(module):
            continue
        reason = _refusal(module, places, included, excluded)
        if reason is None:
            modules[places[0]] = module
        else:
            skipped.append(SkippedLayer(places[0] or "(the model)", type(module).__name__, reason))
    notes = unmatched_notes(included, excluded, [name for module_names in names.values() for name in module_names])
    return AttentionModules(modules, tuple(skipped), tuple(notes))


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is attention of torch or transformers, or is named like attention and has parameters."""
    if isinstance(module, LearnedLinearAttention):  # a child of a module that is converted already
        return False
    is_convertible_kind = isinstance(module, (nn.MultiheadAttention, RandMultiHeadAttention)) or calls_interface(module)
    # A module that is named like attention and has projections is listed as skipped, so that the user sees why.
    return is_convertible_kind or (
        type(module).__name__.endswith("Attention") and any(True for _ in module.parameters(False))
    )


def make_attention(module: nn.Module, num_features: int, window: int) -> LearnedLinearAttention:
    """Return linear attention of the module's sizes, with parameters in float32 or wider, on the module's device."""
    sizes = sizes_of(module)
    assert sizes is not None  # modules without sizes are refused
    first = next(module.parameters(), None)
    dtype = torch.float32 if first is None else torch.promote_types(first.dtype, torch.float32)
    device = None if first is None else first.device
    return LearnedLinearAttention(*sizes, num_features, window=window, device=device, dtype=dtype)


def _refusal(
    module: nn.Module, names: Sequence[str], included: Sequence[Selector], excluded: Sequence[Selector]
) -> str | None:
    """Return why a module keeps its softmax, or None if it can be converted."""
    if CHILD in children_of(module) or isinstance(module, RandMultiHeadAttention):
        return "is linear already"
    if not any(is_selected(selector, names, module) for selector in included):
        return "is not included"
    if any(is_selected(selector, names, module) for selector in excluded):
        return "is excluded"
    if names == [""]:
        return "is the model itself, which cannot be replaced in place: wrap it in nn.Sequential"
    if reason := settings_refusal(module):
        return reason
    if isinstance(module, nn.MultiheadAttention):
        if type(module) is not nn.MultiheadAttention:
            return "is a subclass of nn.MultiheadAttention, whose forward may be different"
        if module.bias_k is not None or module.add_zero_attn:
            return "adds a key of its own (add_bias_kv or add_zero_attn), which has no position"
        if module.in_proj_weight is not None and module.in_proj_weight.is_meta:
            return "is on the meta device: load its weights first"
        return None
    if not calls_interface(module):
        return (
            "computes its weights itself: only nn.MultiheadAttention, and transformers' modules that take an attention "
            "function, can be converted"
        )
    if getattr(module, "is_cross_attention", False):
        return "attends from one sequence to another, whose positions no window relates"
    if sizes_of(module) is None:
        return "does not state the number and width of its heads"
    return None

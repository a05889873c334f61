"""The attention modules of a model: which can be converted, and why the others cannot."""

__all__ = ["Found", "find_attention", "is_attention", "make_attention"]

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from panther._torch import children_of, has_hooks
from panther.compression.targets import Selector, SkippedLayer, _matches, _selectors
from panther.nn import LearnedLinearAttention, RandMultiHeadAttention
from panther.nn.attention.interface import calls_interface
from panther.nn.attention.linearized import CHILD
from panther.nn.attention.record import sizes_of


@dataclass(frozen=True)
class Found:
    """Attention modules to convert, by name, and those that stay."""

    modules: Mapping[str, nn.Module]
    skipped: tuple[SkippedLayer, ...]
    notes: tuple[str, ...]


def find_attention(model: nn.Module, include: Any, exclude: Any) -> Found:
    """Find the attention modules of a model."""
    wanted, unwanted = _selectors("include", include, ("*",)), _selectors("exclude", exclude, ())
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    modules, skipped = {}, []
    for module, places in names.items():
        if not is_attention(module):
            continue
        reason = _refusal(module, places, wanted, unwanted)
        if reason is None:
            modules[places[0]] = module
        else:
            skipped.append(SkippedLayer(places[0] or "(the model)", type(module).__name__, reason))
    notes = tuple(
        f"{role}={one!r} matches no name of model.named_modules()"
        for role, selectors in (("include", wanted), ("exclude", unwanted))
        for one in selectors
        if isinstance(one, str) and not any(fnmatch.fnmatchcase(p, one) for several in names.values() for p in several)
    )
    return Found(modules, tuple(skipped), notes)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is attention: torch's, one of transformers', or one that looks as if it were."""
    if isinstance(module, LearnedLinearAttention):  # of a module that is linear already
        return False
    known = isinstance(module, (nn.MultiheadAttention, RandMultiHeadAttention)) or calls_interface(module)
    # Named so and with projections of its own: told to the user, who would otherwise wonder.
    return known or (type(module).__name__.endswith("Attention") and any(True for _ in module.parameters(False)))


def make_attention(module: nn.Module, num_features: int, window: int) -> LearnedLinearAttention:
    """Return linear attention of a module's size, with parameters in float32 at least, on its device."""
    sizes = sizes_of(module)
    assert sizes is not None  # modules without are refused
    first = next(module.parameters(), None)
    dtype = torch.float32 if first is None else torch.promote_types(first.dtype, torch.float32)
    device = None if first is None else first.device
    return LearnedLinearAttention(*sizes, num_features, window=window, device=device, dtype=dtype)


def _refusal(
    module: nn.Module, names: Sequence[str], wanted: Sequence[Selector], unwanted: Sequence[Selector]
) -> str | None:
    """Return why a module keeps its softmax; None if it is to be converted."""
    if CHILD in children_of(module) or isinstance(module, RandMultiHeadAttention):
        return "is linear already"
    if not any(_matches(one, names, module) for one in wanted):
        return "is not included"
    if any(_matches(one, names, module) for one in unwanted):
        return "is excluded"
    if names == [""]:
        return "is the model itself, which cannot be replaced in place: wrap it in nn.Sequential"
    if "forward" in vars(module):
        return "has a forward that was set on it (as accelerate does), which would be lost: remove it first"
    if has_hooks(module):
        return "has hooks, which see the weights: remove them first"
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
        return "does not tell the number and width of its heads"
    return None

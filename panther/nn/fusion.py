"""Replacement of sketched layers by layers of two factors, for inference."""

__all__ = ["fuse_"]

import warnings

from torch import nn

from panther._model_libraries import layers_replaced
from panther._torch import has_hooks, put_module
from panther.errors import PerformanceWarning
from panther.nn.linear import SKLinear
from panther.nn.linears import reason_to_skip
from panther.nn.low_rank import LowRankLinear


def fuse_(model: nn.Module) -> nn.Module:
    """Replace every SKLinear of a model by a LowRankLinear of the same weight, for inference.

    A forward of a layer with ``sketch="signs"`` then takes two products instead of four; see
    :meth:`SKLinear.to_low_rank <panther.nn.SKLinear.to_low_rank>`. A layer with sparse sketches takes two from the
    start, and those of its replacement have twice as many numbers. Layers that share factors share them afterwards.
    Save the model before it is fused: a seeded layer stores half as many numbers.

    Args:
        model: A model with SKLinear layers, changed in place, or one such layer.

    Returns:
        ``model``, or the new layer if the model is itself an SKLinear.

    Raises:
        TypeError: If ``model`` is not a module.

    Warns:
        PerformanceWarning: If a layer is not replaced, with its name and the reason, or there is nothing to fuse.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     pr.nn.SKLinear(256, 128, 4, sketch="signs"), torch.nn.ReLU()
        ... )
        >>> pr.fuse_(model)[0]
        LowRankLinear(in_features=256, out_features=128, rank=8, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_ takes a model, not {type(model).__name__}")
    layers = {name: layer for name, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, SKLinear)}
    new: dict[nn.Module, LowRankLinear] = {}
    reasons: dict[str, str] = {}
    shared: dict[tuple[int, ...], LowRankLinear] = {}
    for name, layer in layers.items():
        if reason := _reason_not_to_fuse(layer):
            reasons[name] = reason
        elif layer not in new:
            new[layer] = layer.to_low_rank()
            first = shared.setdefault(tuple(id(getattr(layer, key)) for key in layer.stored_names()), new[layer])
            new[layer].down, new[layer].up = first.down, first.up
    for name in layers.keys() - reasons.keys() - {""}:
        put_module(model, name, new[layers[name]])
    layers_replaced(model)
    outcome = f"found no SKLinear in this {type(model).__name__}, so nothing was changed"
    if reasons:
        name, reason = next(iter(reasons.items()))
        outcome = f"did not fuse {len(reasons)} of {len(layers)} SKLinear layers, the first of them {name!r}: {reason}"
    if reasons or not (layers or any(isinstance(layer, LowRankLinear) for layer in model.modules())):
        warnings.warn(f"fuse_ {outcome}", PerformanceWarning, stacklevel=2)
    return new.get(model, model)


def _reason_not_to_fuse(layer: SKLinear) -> str | None:
    if layer.packed:
        return "the signs of this layer are packed: call unpack_() first"
    if has_hooks(layer):
        return "it has hooks, which a new layer would not have: remove them first"
    return reason_to_skip(layer)

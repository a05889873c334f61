"""The names of compressed experts in the files of transformers.

Files hold the weights of experts one by one or in other layouts, and transformers converts them when it loads and saves
a model. Its conversions are chosen by names. They would also match the codes of compressed experts, which begin with
the name of the weight, and are therefore left out.
"""

__all__ = ["conversions_to_keep", "keep_expert_names_", "load_conversions", "save_conversions"]

import sys
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from panther.nn.protocol import compressed_layers

# What models had as their list of conversions before some of them were left out; None if they had no list.
_COMPLETE: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def conversions_to_keep(conversions: list[Any], model: nn.Module) -> list[Any]:
    """Return the conversions that leave the compressed experts of a model alone."""
    remaining = [conversion for conversion in conversions if _keeps_names(conversion, model)]
    if len(remaining) < len(conversions):
        _COMPLETE.setdefault(model, getattr(model, "_weight_conversions", None))
    return remaining


def _keeps_names(conversion: Any, model: nn.Module) -> bool:
    """Return whether a conversion, in both directions, leaves compressed experts alone; renaming does."""
    if not hasattr(conversion, "operations"):
        return True
    names = [
        f"{name}.{tensor_name}"
        for name, layer in compressed_layers(model)
        if layer.replaces_parameter
        for tensor_name in layer.stored_names()
    ]
    both = (conversion, conversion.reverse_transform()) if names else ()
    return all(each.rename_source_key(name)[1] is None for each in both for name in names)


def keep_expert_names_(model: Any) -> None:
    """Let ``save_pretrained`` of a transformers model save compressed experts as they are, and dense ones as before."""
    if not any(layer.replaces_parameter for _, layer in compressed_layers(model)):
        if model in _COMPLETE:
            model._weight_conversions = _COMPLETE.pop(model)
        return
    present = getattr(model, "_weight_conversions", None)
    conversions = save_conversions(model) if present is None else present
    remaining = conversions_to_keep(conversions, model)
    if len(remaining) < len(conversions):
        model._weight_conversions = remaining


def load_conversions(model: Any) -> list[Any]:
    """Return the conversions that transformers applies to the tensors of files, in their order."""
    mapping: Any = sys.modules["transformers.conversion_mapping"]  # transformers' models cannot be built without it
    conversions: list[Any] = mapping.get_model_conversion_mapping(model)
    return conversions


def save_conversions(model: Any) -> list[Any]:
    """Return the conversions whose reverse transformers applies to save a model that was not loaded from a file."""
    mapping: Any = sys.modules["transformers.conversion_mapping"]
    conversions = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in conversions if type(conversion).__name__ != "PrefixChange"]

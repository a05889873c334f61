"""Guards of a search: what the user's function changed in the model, and which new modules the model calls."""

__all__ = ["fingerprint", "recording_calls"]

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from panther.compression.calibration.descriptions import hash_of
from panther.compression.forms import Replacement


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return the values that a user's function must not change, by name.

    They are the modules, forwards that are set on modules, hooks, hashes of tensors, and which parameters are trained.
    """
    entries: dict[str, Any] = {}
    for name, module in model.named_modules():
        attributes, label = vars(module), f"module {name!r}" if name else "the model"
        entries[label] = id(module)
        if not isinstance(module, torch.jit.ScriptModule):  # It sets its forward in the first call.
            entries[f"forward of {label}"] = id(attributes.get("forward"))
        # In torch the names of all tables of hooks end so. The keys are unique in a process.
        entries[f"hooks of {label}"] = [
            (key, *table) for key, table in attributes.items() if key.endswith("_hooks") and isinstance(table, Mapping)
        ]
    for name, parameter in model.named_parameters():
        entries[f"parameter {name!r}"] = hash_of(parameter)
        entries[f"requires_grad of parameter {name!r}"] = parameter.requires_grad
    return entries | {f"buffer {name!r}": hash_of(buffer) for name, buffer in model.named_buffers()}


@contextmanager
def recording_calls(replacement: Replacement, called: set[nn.Module]) -> Iterator[None]:
    """Add the old modules whose new modules are called to ``called``."""
    with ExitStack() as stack:
        for old, new in replacement.items():
            stack.callback(new.register_forward_pre_hook(lambda *_, old=old: called.add(old)).remove)
        yield

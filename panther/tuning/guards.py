"""Guards of an evaluation: whether the user's function changed the model, and whether the model calls its new layers.

A list in the model, or a forward that a library has stored, can reference a replaced layer. The replaced layer is then
still used, while the model seems to be smaller.
"""

__all__ = ["Usage", "fingerprint", "place_of", "recording_usage"]

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from panther.compression.calibration.descriptions import hash_of
from panther.compression.forms import Replacement
from panther.errors import TuningError


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


@dataclass(frozen=True)
class Usage:
    """The use of the replacements of layers.

    Attributes:
        called: Replaced layers whose replacements were called.
    """

    called: set[nn.Module] = field(default_factory=set)

    def check(self, required: Iterable[nn.Module], names: Mapping[nn.Module, str], noun: str, caller: str) -> None:
        """Raise TuningError if the new layer of a ``required`` one was not called."""
        for old in required:
            if old not in self.called:
                raise TuningError(
                    f"{noun} {names[old]!r} was replaced, and the new {noun} is not called {caller}: something else "
                    "references the old one, for example a forward that a library has stored: remove the reference, or "
                    "exclude it from the search"
                )


@contextmanager
def recording_usage(replacement: Replacement, usage: Usage) -> Iterator[None]:
    """Record in ``usage`` which new layers are called."""

    def calls(layer: nn.Module) -> Callable[..., None]:
        # A deepcopy of the model shares functions, so calls of the copy count too.
        def note(*_: Any) -> None:
            usage.called.add(layer)

        return note

    with ExitStack() as stack:
        for layer, new in replacement.items():
            # Modules of experts index their weights, and call them in grouped products only.
            place = place_of(layer)
            called = new if place is None else place[0]
            stack.callback(called.register_forward_pre_hook(calls(layer)).remove)
        yield


def place_of(layer: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the module and the name of the parameter that a layer stands for; None for a module of the model."""
    place: tuple[nn.Module, str] | None = getattr(layer, "place", None)
    return place

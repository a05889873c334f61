"""The note in which a module keeps what it was before it was sharded; `unshard_module` reads it."""

__all__ = ["Unsharded", "remember_"]

from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Unsharded:
    """What a module was before it was cut."""

    plain: type[nn.Module]
    added: tuple[str, ...] = ()
    """Attributes that it did not have."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Values of attributes that were changed."""


def remember_(module: nn.Module, added: tuple[str, ...] = (), **attributes: Any) -> None:
    """Note what a module is, before it is changed, once; later calls add to the note."""
    before: Unsharded = vars(module).get("_cut", Unsharded(type(module)))
    module.__dict__["_cut"] = Unsharded(before.plain, before.added + added, attributes | before.attributes)

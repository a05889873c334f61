"""The modules of stages, without the code that traces models."""

__all__ = ["Children", "StageModules", "from_source_", "source_of"]

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn


class StageModules(nn.ModuleList):
    """The modules of this rank's stages; checkpoints use the full model's names, without the index of a stage."""


def from_source_(stage: nn.Module, model: nn.Module | None) -> None:
    """Store the model of a stage without values, whose classes draw the values; None removes it."""
    # In __dict__, because the model would otherwise become a submodule of the stage.
    stage.__dict__.pop("_source", None)
    if model is not None:
        stage.__dict__["_source"] = model


def source_of(module: nn.Module) -> nn.Module:
    """Return the model of a stage without values; for any other module, the module itself."""
    return vars(module).get("_source", module)


@dataclass
class Children:
    """The children of an nn.Sequential; each child is a block."""

    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def names_in(self, begin: int, end: int) -> set[str]:
        """Return the names of the modules in the blocks from ``begin`` to before ``end``."""
        return set(self.names[begin:end])

    def module(self, model: nn.Module, begin: int, end: int) -> nn.Module:
        """Return the stage that consists of the blocks from ``begin`` to before ``end``."""
        return nn.Sequential(OrderedDict((name, model.get_submodule(name)) for name in self.names[begin:end]))

"""The container of a rank's stages, and the link from a stage to its model, without the code that traces models."""

__all__ = ["StageModules", "from_source_", "source_of"]

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

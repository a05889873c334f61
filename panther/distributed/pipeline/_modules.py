"""The container of a rank's stages, and the model of a stage, apart from the code that traces models."""

__all__ = ["StageModules", "from_source_", "source_of"]

from torch import nn


class StageModules(nn.ModuleList):
    """The modules of this rank's stages; checkpoints use the full model's names, without the index of a stage."""


def from_source_(stage: nn.Module, model: nn.Module | None) -> None:
    """Note, or with None forget, the model that a stage without values is of, whose classes draw its values."""
    # Through __dict__: as a submodule, the whole model would be a part of the stage.
    stage.__dict__.pop("_source", None)
    if model is not None:
        stage.__dict__["_source"] = model


def source_of(module: nn.Module) -> nn.Module:
    """Return the model that a stage without values is of, or the module itself."""
    return vars(module).get("_source", module)

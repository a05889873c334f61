"""The container of a rank's stages, apart from the code that traces models: checkpoints need only the container."""

__all__ = ["StageModules"]

from torch import nn


class StageModules(nn.ModuleList):
    """The modules of this rank's stages; checkpoints use the full model's names, without the index of a stage."""

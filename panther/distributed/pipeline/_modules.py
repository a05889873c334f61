"""The container of a rank's stages. Checkpoints know it, so it needs none of the code that traces models."""

__all__ = ["StageModules"]

from torch import nn


class StageModules(nn.ModuleList):
    """The modules of this rank's stages; for checkpoints their names are those of the whole model, without a number."""

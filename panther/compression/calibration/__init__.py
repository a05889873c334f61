"""Calibration of a model that the user wrote: its batches, its masks, and its state.

``batches`` copies a batch for each forward, ``masks`` finds the positions that count, and ``model_state`` restores
everything that forwards change in the model.
"""

__all__ = ["Masks", "ModelState", "copy_batch", "counted"]

from panther.compression.calibration.batches import copy_batch
from panther.compression.calibration.masks import Masks, counted
from panther.compression.calibration.model_state import ModelState

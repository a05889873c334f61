"""Calibration of a model that the user wrote: its batches, its masks, and its state.

``targets`` has the weights and their kinds, ``survey`` finds the weights, ``batches`` copies a batch for each
forward, ``masks`` finds the positions that count, and ``model_state`` restores everything that forwards change.
"""

__all__: list[str] = []

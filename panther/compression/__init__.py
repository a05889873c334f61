"""Compressing a trained model: survey, moments, fits, ranks, new layers. The function is :func:`panther.compress`.

A model goes through the files in this order: ``targets`` (which layers), ``runner`` (how the model is called on
batches), ``survey`` (one batch), ``moments`` (all batches), ``fits`` (components of each weight), ``ranks``
(how many each layer keeps), ``conversion`` (new layers), ``measurement`` (errors and speed), ``healing`` with
``distillation`` (a run of the Trainer), ``report``. Each makes a frozen result of those before it; ``_compress`` calls
them, and changes the model last.
"""

from ._compress import compress, sketch_layers_
from .config import HealConfig, SketchConfig
from .report import CompressionReport, HealResult, LayerReport
from .targets import SkippedLayer

__all__ = [
    "CompressionReport",
    "HealConfig",
    "HealResult",
    "LayerReport",
    "SketchConfig",
    "SkippedLayer",
    "compress",
    "sketch_layers_",
]

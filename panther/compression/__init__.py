"""Compressing a trained model: calibrate, allocate ranks, convert, heal. The function is :func:`panther.compress`."""

from ._compress import compress, sketch_layers_
from .config import SketchConfig
from .healing import HealConfig, HealResult
from .planning import Left
from .report import CompressionReport, LayerReport

__all__ = [
    "CompressionReport",
    "HealConfig",
    "HealResult",
    "LayerReport",
    "Left",
    "SketchConfig",
    "compress",
    "sketch_layers_",
]

"""Compressing a trained model by :func:`panther.compress`; CONTRIBUTING tells how a model goes through these files."""

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

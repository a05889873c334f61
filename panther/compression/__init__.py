"""Compressing a trained model by :func:`panther.compress`; CONTRIBUTING tells how a model goes through these files."""

from . import weights  # noqa: F401 (registers the kinds of weights)
from ._compress import compress, sketch_layers_
from .calibration.targets import SkippedLayer
from .config import HealConfig, SketchConfig
from .linearization import LinearizationReport, LinearizedLayer, linearize_
from .report import CompressionReport, HealResult, LayerReport

__all__ = [
    "CompressionReport",
    "HealConfig",
    "HealResult",
    "LayerReport",
    "LinearizationReport",
    "LinearizedLayer",
    "SketchConfig",
    "SkippedLayer",
    "compress",
    "linearize_",
    "sketch_layers_",
]

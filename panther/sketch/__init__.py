"""Random sketches that are functions of an integer seed."""

from .dense import GaussianSketch, SignSketch, UniformSketch
from .functional import scaled_sign_sketch
from .operator import SketchingOperator, TransposedSketch
from .streams import STREAM_VERSION, check_seed, draw_seed, signs

__all__ = [
    "STREAM_VERSION",
    "GaussianSketch",
    "SignSketch",
    "SketchingOperator",
    "TransposedSketch",
    "UniformSketch",
    "check_seed",
    "draw_seed",
    "scaled_sign_sketch",
    "signs",
]

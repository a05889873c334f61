"""Random sketches that are functions of an integer seed."""

from .dense import GaussianSketch, SignSketch, UniformSketch
from .functional import scaled_sign_sketch
from .operator import SketchingOperator, TransposedSketch
from .sparse import Axis, SparseSketch
from .streams import STREAM_VERSION, check_seed, draw_seed, signs
from .trig import SRHT

__all__ = [
    "SRHT",
    "STREAM_VERSION",
    "Axis",
    "GaussianSketch",
    "SignSketch",
    "SketchingOperator",
    "SparseSketch",
    "TransposedSketch",
    "UniformSketch",
    "check_seed",
    "draw_seed",
    "scaled_sign_sketch",
    "signs",
]

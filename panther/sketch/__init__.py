"""Random sketches that are functions of an integer seed."""

from .dense import SignSketch, scaled_sign_sketch
from .operator import SketchingOperator, TransposedSketch
from .streams import STREAM_VERSION, check_seed, draw_seed, signs

__all__ = [
    "STREAM_VERSION",
    "SignSketch",
    "SketchingOperator",
    "TransposedSketch",
    "check_seed",
    "draw_seed",
    "scaled_sign_sketch",
    "signs",
]

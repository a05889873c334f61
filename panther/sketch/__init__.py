"""Random sketches that are functions of an integer seed."""

from typing import Any

from panther._hints import missing_name
from panther._process_settings import check_seed, draw_seed

from .dense import GaussianSketch, SignSketch, UniformSketch
from .functional import (
    DistributionFamily,
    count_skop,
    dense_sketch_operator,
    gaussian_skop,
    scaled_sign_sketch,
    sjlt_skop,
    sketch_tensor,
    sparse_sketch_operator,
    srht,
)
from .operator import SketchingOperator, TransposedSketch
from .sparse import Axis, SparseSketch
from .streams import STREAM_VERSION, signs
from .trig import SRHT

__all__ = [
    "SRHT", "STREAM_VERSION", "Axis", "DistributionFamily", "GaussianSketch", "SignSketch", "SketchingOperator",
    "SparseSketch", "TransposedSketch", "UniformSketch", "check_seed", "count_skop", "dense_sketch_operator",
    "draw_seed", "gaussian_skop", "scaled_sign_sketch", "signs", "sjlt_skop", "sketch_tensor", "sparse_sketch_operator",
    "srht",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name, __all__)

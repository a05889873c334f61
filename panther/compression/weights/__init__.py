"""The kinds of weights: :mod:`.base` has what kinds share, and each further file registers a kind.

The order of the imports matters: kinds that are registered later are asked first.
"""

from panther.compression.weights import linear, conv, table, experts  # isort: skip
from panther.compression.calibration.targets import WeightKind, register_kind
from panther.compression.weights.base import MatrixKind

__all__ = ["MatrixKind", "WeightKind", "conv", "experts", "linear", "register_kind", "table"]

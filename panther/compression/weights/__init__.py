"""The kinds of weights, one in each file, which registers it. :mod:`.linear` also has what kinds of matrices share.

The order of the imports matters: kinds that are registered later are asked first.
"""

from panther.compression.weights import linear, conv, table, experts  # isort: skip
from panther.compression.calibration.targets import WeightKind, register_kind
from panther.compression.weights.linear import MatrixKind

__all__ = ["MatrixKind", "WeightKind", "conv", "experts", "linear", "register_kind", "table"]

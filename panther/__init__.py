"""Panther: sketched layers for PyTorch, on one device or on many.

>>> import panther as pr
>>> layer = pr.nn.SKLinear(1024, 1024, num_terms=1, low_rank=16)  # drop-in for nn.Linear
"""

from . import errors, nn, sketch
from ._version import __version__

__all__ = ["__version__", "errors", "nn", "sketch"]

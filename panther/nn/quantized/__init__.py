"""Layers whose weight is stored in few bits.

``form`` counts bytes, ``grid`` rounds, ``state`` saves and loads, ``matrix`` holds and fits a weight, and ``linear`` is
the layer.
"""

from panther.kernels.reference.codes import pack_codes, unpack_codes

from .form import stored_bytes
from .linear import QuantizedLinear

__all__ = ["QuantizedLinear", "pack_codes", "stored_bytes", "unpack_codes"]

"""Layers whose weight is stored in few bits.

``form`` counts bytes, ``grid`` rounds, ``state`` saves and loads, ``matrix`` stores and fits a weight, ``linear`` and
``conv`` are the layers, and ``frozen`` computes the product if only the input needs a gradient.
"""

from panther.kernels.reference.codes import pack_codes, unpack_codes

from .conv import QuantizedConv2d
from .form import stored_bytes
from .linear import QuantizedLinear

__all__ = ["QuantizedConv2d", "QuantizedLinear", "pack_codes", "stored_bytes", "unpack_codes"]

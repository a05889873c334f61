"""Layers whose weight is stored in few bits.

``grid`` rounds, ``state`` saves and loads, ``matrix`` stores and fits a weight, and ``linear`` and ``conv`` are the
layers. The products are :func:`panther.kernels.quantized_matmul` and :func:`~panther.kernels.quantized_weight`.
"""

from panther.kernels import pack_codes, unpack_codes

from .conv import QuantizedConv2d
from .linear import QuantizedLinear
from .matrix import stored_bytes

__all__ = ["QuantizedConv2d", "QuantizedLinear", "pack_codes", "stored_bytes", "unpack_codes"]

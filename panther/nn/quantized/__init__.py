"""Layers whose weight is stored in few bits.

``grid`` rounds, ``state`` saves and loads, ``matrix`` stores and fits a weight, ``linear``, ``conv``, ``embedding`` and
``experts`` are the layers, ``stacked`` names the parameters that ``experts`` replaces, ``conversions`` keeps their
names in files of transformers, and ``ties`` names the tensors that tied layers of transformers share. The products are
:func:`panther.kernels.quantized_matmul` and :func:`~panther.kernels.quantized_weight`.
"""

from panther.kernels import pack_codes, unpack_codes

from .conv import QuantizedConv2d
from .embedding import QuantizedEmbedding, QuantizedEmbeddingBag
from .experts import QuantizedExperts
from .linear import QuantizedLinear
from .matrix import stored_bytes
from .packing import PackedLayer, PackReport, pack_, unpack_

__all__ = [
    "PackReport", "PackedLayer", "QuantizedConv2d", "QuantizedEmbedding", "QuantizedEmbeddingBag", "QuantizedExperts",
    "QuantizedLinear", "pack_", "pack_codes", "stored_bytes", "unpack_", "unpack_codes",
]  # fmt: skip

"""Kernels for sketched layers: Triton kernels, a torch reference, and one dispatch. Knows nothing of the rest."""

from ._backend import backend
from .ops import causal_linear_attention, csr_matmul, hadamard_transform, sign_block, sketched_matmul
from .reference import normal_block, pack_signs, philox_4x32, uniform_block, unpack_signs, word_block

__all__ = [
    "backend",
    "causal_linear_attention",
    "csr_matmul",
    "hadamard_transform",
    "normal_block",
    "pack_signs",
    "philox_4x32",
    "sign_block",
    "sketched_matmul",
    "uniform_block",
    "unpack_signs",
    "word_block",
]

"""Kernels in plain torch: the CPU path, and the ground truth every faster kernel is tested against."""

from .attention import causal_linear_attention
from .hadamard import hadamard_transform
from .packing import pack_signs, unpack_signs
from .philox import normal_block, philox_4x32, sign_block, uniform_block, word_block
from .sketched import chained_matmul, joined_matmul, packed_matmul, sketched_matmul
from .sparse import csr_matmul, csr_tensor

__all__ = [
    "causal_linear_attention",
    "chained_matmul",
    "csr_matmul",
    "csr_tensor",
    "hadamard_transform",
    "joined_matmul",
    "normal_block",
    "pack_signs",
    "packed_matmul",
    "philox_4x32",
    "sign_block",
    "sketched_matmul",
    "uniform_block",
    "unpack_signs",
    "word_block",
]

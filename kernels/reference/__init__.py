"""Kernels in plain torch: the CPU path, and the ground truth every faster kernel is tested against."""

from .attention import causal_linear_attention
from .hadamard import hadamard_transform
from .philox import normal_block, philox_4x32, sign_block, uniform_block, word_block
from .sketched import sketched_matmul
from .sparse import csr_matmul, csr_tensor

__all__ = [
    "causal_linear_attention",
    "csr_matmul",
    "csr_tensor",
    "hadamard_transform",
    "normal_block",
    "philox_4x32",
    "sign_block",
    "sketched_matmul",
    "uniform_block",
    "word_block",
]

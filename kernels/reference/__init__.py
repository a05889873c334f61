"""Kernels in plain torch: one function per operation. Every faster version is tested against them."""

from .attention import causal_linear_attention
from .codes import quantized_matmul
from .folded import dense_sketch, fold, folded_matmul, tile
from .hadamard import hadamard_transform
from .packing import pack_signs, unpack_signs
from .philox import philox_4x32, random_block
from .sketched import sketched_inner, sketched_matmul, sketched_outer
from .sparse import coo_tensor, csr_matmul, csr_tensor
from .windowed_attention import windowed_linear_attention

__all__ = [
    "causal_linear_attention",
    "coo_tensor",
    "csr_matmul",
    "csr_tensor",
    "dense_sketch",
    "fold",
    "folded_matmul",
    "hadamard_transform",
    "pack_signs",
    "philox_4x32",
    "quantized_matmul",
    "random_block",
    "sketched_inner",
    "sketched_matmul",
    "sketched_outer",
    "tile",
    "unpack_signs",
    "windowed_linear_attention",
]

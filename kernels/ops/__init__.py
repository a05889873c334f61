"""The one dispatch: every operation chooses between Triton kernels and torch by its operands."""

from .attention import causal_linear_attention
from .hadamard import hadamard_transform
from .philox import normal_block, sign_block, uniform_block, word_block
from .sketched import sketched_matmul
from .sparse import csr_matmul

__all__ = [
    "causal_linear_attention",
    "csr_matmul",
    "hadamard_transform",
    "normal_block",
    "sign_block",
    "sketched_matmul",
    "uniform_block",
    "word_block",
]

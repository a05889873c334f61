"""The one dispatch: every operation chooses between Triton kernels and torch by its operands."""

from .signs import sign_block
from .sketched import sketched_matmul

__all__ = ["sign_block", "sketched_matmul"]

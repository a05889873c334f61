"""Positive definite matrices: systems, few columns of a kernel, and the logarithm of the determinant."""

from ._logdet import logdet
from ._pcg import NystromPreconditioner, PCGResult, nystrom_preconditioner, pcg
from ._rp_cholesky import RPCholeskyResult, rp_cholesky

__all__ = [
    "NystromPreconditioner", "PCGResult", "RPCholeskyResult", "logdet", "nystrom_preconditioner", "pcg", "rp_cholesky",
]  # fmt: skip

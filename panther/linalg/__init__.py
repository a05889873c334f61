"""Randomized linear algebra: building blocks, drivers on top of them, and the error they made."""

from ._cqrrpt import CQRRPTResult, cqrrpt
from ._eigh import EighResult, NystromResult, nystrom, randomized_eigh
from ._lstsq import LstsqResult, sketch_lstsq
from ._qb import QBResult, qb
from ._rangefinder import rangefinder
from ._svd import SVDResult, randomized_svd
from .error import ErrorEstimate, estimate_error
from .orthogonal import cholesky_qr, orthonormalize

__all__ = [
    "CQRRPTResult",
    "EighResult",
    "ErrorEstimate",
    "LstsqResult",
    "NystromResult",
    "QBResult",
    "SVDResult",
    "cholesky_qr",
    "cqrrpt",
    "estimate_error",
    "nystrom",
    "orthonormalize",
    "qb",
    "randomized_eigh",
    "randomized_svd",
    "rangefinder",
    "sketch_lstsq",
]

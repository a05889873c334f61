r"""Randomized linear algebra: building blocks, drivers that use them, and error estimates.

Common to :func:`randomized_svd`, :func:`randomized_eigh`, :func:`nystrom`, :func:`qb` and :func:`rangefinder`:

- A is a real matrix or a batch of them, ``(*batch, m, n)``: a tensor, a NumPy array, or one matrix that is a sparse
  tensor, a table with ``to_numpy`` such as a pandas.DataFrame, or anything with ``.shape``, ``.dtype``, ``@`` and
  ``.T`` (which symmetric matrices need not have).
- The memory of an array is shared and never written, even if the array is read-only, column-major or memory-mapped. An
  array is copied if it is not aligned, has a foreign byte order, or has a negative stride.
- Results are in float32 or float64 (half precision is computed in float32), without gradients. They are NumPy arrays
  where A is a NumPy array, a matrix of scipy.sparse or a table and no argument is a tensor, and tensors otherwise.
- ``seed`` is the seed of the random signs; None draws one from torch's default CPU generator.
- With ``return_error=True`` they return the tuple of the results and an :class:`ErrorEstimate` of the Frobenius norm of
  A minus its approximation, from probes that are independent of the signs.
- They raise :class:`~panther.errors.ShapeError` where ``k``, ``oversample``, ``n_iter`` or ``block_size`` is out of
  range, or A has fewer than two dimensions; :class:`~panther.errors.DTypeError` where A is not real and floating; and
  ValueError where A, or a product with it, has NaN or infinity.

:func:`pcg`, :func:`nystrom_preconditioner`, :func:`rp_cholesky`, :func:`trace`, :func:`diag` and :func:`logdet` take
such matrices and raise such errors too. All except ``trace`` and ``diag`` take one matrix; ``rp_cholesky`` takes dense
ones and functions.
"""

from typing import Any

from panther._hints import missing_name

from ._cqrrpt import CQRRPTResult, cqrrpt
from ._eigh import EighResult, NystromResult, nystrom, randomized_eigh
from ._interpolative import InterpolativeResult, interpolative, leverage_scores
from ._lstsq import LstsqResult, sketch_lstsq
from ._pcg import NystromPreconditioner, PCGResult, nystrom_preconditioner, pcg
from ._qb import QBResult, qb
from ._rangefinder import rangefinder
from ._rp_cholesky import RPCholeskyResult, rp_cholesky
from ._svd import SVDResult, randomized_svd
from ._trace import TraceEstimate, diag, logdet, trace
from .error import ErrorEstimate, estimate_error
from .orthogonal import cholesky_qr, orthonormalize
from .sharded import RowSharded
from .streaming import PCAResult, StreamingSVD

__all__ = [
    "CQRRPTResult", "EighResult", "ErrorEstimate", "InterpolativeResult", "LstsqResult", "NystromPreconditioner",
    "NystromResult", "PCAResult", "PCGResult", "QBResult", "RPCholeskyResult", "RowSharded", "SVDResult",
    "StreamingSVD", "TraceEstimate", "cholesky_qr", "cqrrpt", "diag", "estimate_error", "interpolative",
    "leverage_scores", "logdet", "nystrom", "nystrom_preconditioner", "orthonormalize", "pcg", "qb", "randomized_eigh",
    "randomized_svd", "rangefinder", "rp_cholesky", "sketch_lstsq", "trace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name, __all__)

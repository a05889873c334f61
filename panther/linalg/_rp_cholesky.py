r"""Partial Cholesky factorisation of a positive semidefinite matrix, from few of its columns.

A pivot is drawn with a probability proportional to the diagonal that remains. Blocks of pivots are drawn at once and
thinned by rejection, which leaves the distribution as it is: Epperly, Tropp and Webber (2024), arXiv:2410.03969.
"""

__all__ = ["RPCholeskyResult", "rp_cholesky"]

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from panther.errors import ShapeError, check_floating, check_size
from panther.linalg._rangefinder import check_tol, warn_above_tol
from panther.linalg.operand import as_dense, check_finite, driver
from panther.sketch import check_seed

_MOST_PIVOTS = 128
# Pivots below this multiple of eps times the largest diagonal entry are rounding, and pivots below this fraction of the
# entry with which they were drawn would amplify it.
_ROUNDING, _LEAST_RATIO = 32.0, 1e-3


class RPCholeskyResult(NamedTuple):
    """Partial Cholesky factorisation, A about F F^T.

    Attributes:
        F: Factor, ``(n, k)``.
        pivots: Indices of the columns of A that F spans, ``(k,)``, int64.
        trace_error: Trace of ``A - F F^T``, which is semidefinite, so that the trace bounds its norms.
    """

    F: Tensor
    pivots: Tensor
    trace_error: Tensor

    def __matmul__(self, X: Tensor) -> Tensor:  # (n, l) -> (n, l)
        """Return the approximation of A times X."""
        return self.F @ (self.F.mT @ X)


@driver
def rp_cholesky(
    A: Any, rank: int, *, diagonal: Any = None, tol: float | None = None, seed: int | None = None
) -> RPCholeskyResult:
    r"""Approximate a positive semidefinite matrix by few of its columns, :math:`A \approx F F^T`.

    The columns are better than uniformly drawn ones if the data have small clusters or outliers, and as good if they
    have none. :func:`~panther.linalg.nystrom` is more accurate, and needs products with all of A.

    Args:
        A: Positive semidefinite tensor or array (n, n), or a function that returns the columns (n, b) of A for b
            indices (a tensor of int64).
        rank: Largest number of columns of F, from 0 to n.
        diagonal: The diagonal of A, (n,), which a function needs. Its dtype and device are those of the result.
        tol: Stop once the trace of :math:`A - F F^T` is at most ``tol`` times the trace of A.
        seed: The seed of the pivots; None draws one from torch's default CPU generator.

    Returns:
        ``(F, pivots, trace_error)``; F has fewer than ``rank`` columns where the tolerance or rounding is reached.

    Raises:
        TypeError: If A is neither a dense matrix nor a function, or is a function without diagonal.
        ValueError: If A is not symmetric and semidefinite, to the root of eps, or ``tol`` is outside [0, 1).

    Warns:
        NumericalWarning: If ``rank``, or rounding, keeps the result from the tolerance.

    Cost: ``2 n k^2`` flops and k columns of A, and mostly 1 to 40 % more columns, which are rejected.

    Example:
        >>> X = torch.cat((torch.zeros(90), torch.arange(10.0)))
        >>> def columns(i):
        ...     return torch.exp(-((X[:, None] - X[i]) ** 2) / 2)
        >>> result = rp_cholesky(columns, 10, diagonal=torch.ones(100), seed=0)
        >>> bool(result.trace_error < 1e-4)
        True

    Reference: Chen, Epperly, Tropp and Webber (2025), "Randomly pivoted Cholesky", arXiv:2207.06503.
    """
    if is_function := callable(A) and not isinstance(A, Tensor):
        if diagonal is None:
            raise TypeError("diagonal must be given where A is a function: use torch.ones(n) for a Gaussian kernel")
        diagonal = as_dense("diagonal", diagonal)
    else:
        A = as_dense("A", A)
        if A.ndim != 2 or A.shape[0] != A.shape[1]:
            raise ShapeError(f"A, of shape {tuple(A.shape)}, must be square: use A @ A.mT, or cqrrpt")
        diagonal = A.diagonal()
    if diagonal.ndim != 1:
        raise ShapeError(f"diagonal, of shape {tuple(diagonal.shape)}, must have one dimension: use diagonal.flatten()")
    check_floating("A", diagonal.dtype)
    check_finite("A", diagonal)
    n, dtype, eps = len(diagonal), torch.promote_types(diagonal.dtype, torch.float32), torch.finfo(diagonal.dtype).eps
    if (rank := check_size("rank", rank, least=0)) > n:
        raise ShapeError(f"rank={rank} must be at most n = {n}: use rank={n}")
    generator = np.random.Generator(np.random.Philox(key=check_seed(seed)))
    remaining = diagonal.to(torch.float64, copy=True)
    tol, trace = check_tol(tol), float(remaining.sum())
    target = (tol or 0.0) * trace
    largest = float(remaining.abs().max()) if n else 0.0
    # Kernels of distances that are computed by products, as in torch.cdist, are indefinite to more than rounding.
    floor, indefinite = _ROUNDING * eps * largest, math.sqrt(eps) * largest
    F = torch.empty(rank, n, dtype=dtype, device=diagonal.device).mT
    pivots: list[int] = []
    while True:
        k = len(pivots)
        if bool((remaining < -indefinite).any()):
            raise ValueError(
                f"A must be positive semidefinite and has the diagonal entry {float(remaining.min()):.3g} after {k} "
                "steps: check the diagonal, or use randomized_eigh"
            )
        remaining.clamp_min_(0)
        if k == rank or float(remaining.sum()) <= target or float(remaining.max()) <= floor:
            break
        block = min(rank - k, max(1, min(rank // 10, _MOST_PIVOTS)))
        draws = generator.choice(n, block, p=(remaining / remaining.sum()).cpu().numpy())
        proposals = torch.from_numpy(draws).to(F.device)
        C = as_dense("the columns of A", A(proposals) if is_function else A[:, proposals]).to(F)
        if C.shape != (n, len(proposals)):
            raise ShapeError(f"A({len(proposals)} indices) must have the shape {(n, len(proposals))}, not {C.shape}")
        check_finite("A", C)
        C = C - F[:, :k] @ F[proposals, :k].mT
        H = C[proposals].double().cpu()
        if bool(((H - H.mT).abs() > indefinite).any()):
            raise ValueError("A must be symmetric: use (A + A.mT) / 2, or randomized_svd")
        accepted, R = _thin(H, remaining[proposals].cpu(), floor, generator)
        new = torch.linalg.solve_triangular(R.to(C), C[:, accepted], upper=True, left=False)
        F[:, k : k + len(accepted)] = new
        remaining[proposals] = torch.minimum(remaining[proposals], H.diagonal().to(remaining.device))
        remaining -= new.double().square().sum(1)
        remaining[proposals[accepted]] = 0.0
        pivots += proposals[accepted].tolist()
    if tol is not None and (left := float(remaining.sum())) > target:
        warn_above_tol(tol, left / trace, dtype, f"rank={rank}" if k == rank < n else None)
    indices = torch.tensor(pivots, dtype=torch.int64, device=F.device)
    return RPCholeskyResult(F[:, :k].contiguous(), indices, remaining.sum().to(dtype))


def _thin(H: Tensor, drawn_with: Tensor, floor: float, generator: np.random.Generator) -> tuple[list[int], Tensor]:
    """Return positions of accepted proposals, and the Cholesky factor of their block of the remaining matrix H.

    A proposal is accepted with the ratio of its remaining diagonal entry to the entry with which it was drawn.
    """
    thresholds = torch.from_numpy(generator.random(len(H))).clamp_min(_LEAST_RATIO) * drawn_with
    accepted: list[int] = []
    L, H = torch.zeros_like(H), H.clone()
    for i in range(len(H)):
        if H[i, i] > max(floor, float(thresholds[i])):
            L[:, len(accepted)] = H[:, i] / H[i, i].sqrt()
            H -= torch.outer(L[:, len(accepted)], L[:, len(accepted)])
            accepted.append(i)
    return accepted, L[accepted, : len(accepted)].mT

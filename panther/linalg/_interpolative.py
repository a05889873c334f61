r"""A few columns of a matrix, all other columns as combinations of them, and leverage scores.

Pivoted QR of a sketch with slightly more rows than the rank selects the columns. Their coefficients come from A itself,
by least squares: coefficients from the sketch would have 1.3 to 1.9 times the error. While a coefficient is above 2,
the column that it belongs to replaces the column that it multiplies, which multiplies the volume of the selected
columns by the coefficient.
"""

__all__ = ["InterpolativeResult", "interpolative", "leverage_scores"]

import math
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from panther.errors import ShapeError, check_size
from panther.linalg._cqrrpt import cqrrpt
from panther.linalg._rangefinder import check_goal, check_rank, sign_matrix, warn_above_tol
from panther.linalg._svd import randomized_svd
from panther.linalg.error import ErrorEstimate, estimate_error
from panther.linalg.operand import Operand, as_operand, driver, frobenius_norm
from panther.linalg.orthogonal import cholesky_qr
from panther.sketch import check_seed

# With a bound near 1, exchanges would be frequent and gain little.
_LARGEST_COEFFICIENT = 2.0
# Coefficients are solved for again after exchanges, at most this many times. The bound holds after each exchange.
_ROUNDS = 3
# The number of columns that are tried first for a tolerance. It doubles until they suffice.
_FIRST_WIDTH = 32
_PROBES = 32


class InterpolativeResult(NamedTuple):
    """An interpolative decomposition; ``result @ X`` multiplies by its approximation of A.

    Attributes:
        J: (k,) int64, the indices of the selected columns, or rows.
        T: The coefficients, (k, n) for columns and (m, k) for rows, at most 2 in size: the identity at J.
        skeleton: The selected columns, (m, k), or rows, (k, n).
        dim: -1 if columns are selected, ``A`` about ``skeleton @ T``; -2 if rows are, ``A`` about ``T @ skeleton``.
    """

    J: Tensor
    T: Tensor
    skeleton: Tensor
    dim: int

    def __matmul__(self, X: Tensor) -> Tensor:  # (n,) or (*batch, n, l) -> (m,) or (*batch, m, l)
        """Return the approximation of A times X."""
        left, right = (self.skeleton, self.T) if self.dim == -1 else (self.T, self.skeleton)
        return left @ (right @ X)


class _Options(TypedDict, total=False):
    dim: int
    oversample: int
    seed: int | None


@overload
def interpolative(
    A: Any, k: int | None = ..., tol: float | None = ..., **options: Unpack[_Options]
) -> InterpolativeResult: ...
@overload
def interpolative(
    A: Any, k: int | None = ..., tol: float | None = ..., *, return_error: Literal[True], **options: Unpack[_Options]
) -> tuple[InterpolativeResult, ErrorEstimate]: ...
@driver
def interpolative(
    A: Any,  # (m, n)
    k: int | None = None,
    tol: float | None = None,
    *,
    dim: int = -1,
    oversample: int = 10,
    seed: int | None = None,
    return_error: bool = False,
) -> InterpolativeResult | tuple[InterpolativeResult, ErrorEstimate]:
    r"""Select k columns of a matrix such that :math:`A \approx A_{:,J} T`, or k rows: :math:`A \approx T A_{J,:}`.

    No entry of T is above 2 in size, and :math:`T_{:,J} = I`. Among all T, this one has the least error for these
    columns, except where the third round of exchanges ends at the bound. The error is that of the columns of LAPACK's
    pivoted QR of A, to 10 %: 1.1 to 2 times the error of the best matrix of rank k, which mixes all columns.

    Args:
        A: One matrix, (m, n); kinds, dtypes and errors as for :mod:`panther.linalg`, except for batches.
        k: Number of columns, from 0 to min(m, n), and with a tolerance the largest number; None is min(m, n).
        tol: Select only as many columns as bring :math:`\|A - A_{:,J} T\|_F` to ``tol`` times :math:`\|A\|_F`,
            estimated from 32 Gaussian probes as in :func:`~panther.linalg.qb`. None selects k.
        dim: The dimension that J indexes: -1 (or 1) selects columns, -2 (or 0) rows.
        oversample: Rows of the sketch beyond the number of columns, 0 or more.
        seed: The seed of the random signs of the sketch.
        return_error: Whether to return an estimate of :math:`\|A - A_{:,J} T\|_F` as well.

    Returns:
        ``InterpolativeResult(J, T, skeleton, dim)``; with ``return_error`` the pair of this and the estimate. If A has
        a lower rank than k, the columns that it does not need have coefficients of zero.

    Raises:
        ShapeError: If A is sharded over several ranks.
        ValueError: If neither k nor tol is given, tol is outside [0, 1), or ``dim`` is neither of both dimensions.

    Warns:
        NumericalWarning: If k, or rounding, keeps the result from the tolerance.

    Cost: products of A with ``2 k + oversample`` columns, a pivoted QR of the sketch, ``2 n (k + oversample)^2``, and
    ``6 m k^2`` flops; k more columns for each round of exchanges, which are rare. A tolerance takes up to twice as
    much. Memory beyond A: ``(m + n) (k + oversample)``.

    Example:
        >>> A = torch.outer(
        ...     torch.arange(1.0, 4.0), torch.tensor([3.0, 6.0, 1.5])
        ... )
        >>> J, T, skeleton, _ = interpolative(A, 1, seed=0)
        >>> J, T
        (tensor([1]), tensor([[0.5000, 1.0000, 0.2500]]))
        >>> torch.allclose(A[:, J] @ T, A), torch.equal(skeleton, A[:, J])
        (True, True)

    Reference: Voronin and Martinsson (2017), doi:10.1007/s10444-016-9494-8; Cheng, Gimbutas, Martinsson and Rokhlin
    (2005), doi:10.1137/030602678; exchanges as in Goreinov et al. (2010), doi:10.1142/9789812836021_0015.
    """
    operand = as_operand(A, batched=False)
    if operand.ranks.size > 1:
        raise ShapeError(
            f"interpolative takes a whole matrix, and A is sharded over {operand.ranks.size} ranks: gather A, or use "
            "randomized_svd"
        )
    most, tol = check_goal("interpolative", k, tol, operand)
    oversample = check_size("oversample", oversample, least=0)
    if isinstance(dim, bool) or dim not in (-2, -1, 0, 1):
        raise ValueError(f"dim={dim!r} must be -1 for columns or -2 for rows: use dim=-1")
    seed = check_seed(seed)
    if dim in (-2, 0):
        J, T, skeleton = _select(operand.mT, most, tol, oversample, seed)
        result = InterpolativeResult(J, T.mT, skeleton.mT, -2)
    else:
        result = InterpolativeResult(*_select(operand, most, tol, oversample, seed), -1)
    return (result, estimate_error(A, result, seed=seed)) if return_error else result


def _columns(operand: Operand, J: Tensor) -> Tensor:  # (k,) -> (m, k)
    """Return the columns J."""
    if operand.dense is not None:
        return operand.dense[:, J]
    units = torch.zeros(operand.shape[1], len(J), dtype=operand.dtype, device=operand.device)
    return operand.matmul(units.index_put_((J, torch.arange(len(J), device=J.device)), units.new_ones(())))


def _pivots(operand: Operand, width: int, oversample: int, seed: int) -> tuple[Tensor, int]:
    """Return an order of the columns by pivoted QR of a sketch, and the rank of the sketch, at most ``width``."""
    m = operand.shape[0]
    d = min(width + oversample, m)
    if d == m and operand.dense is not None:
        sketch = operand.dense
    else:
        sketch = operand.rmatmul(sign_matrix(operand.mT, d, seed) if d < m else operand.mT.eye()).mT
    operand.check_finite(sketch)
    _, R, order = cqrrpt(sketch, rtol=min(0.5, max(d, 1) * torch.finfo(sketch.dtype).eps), seed=seed)
    return order, min(len(R), width)


def _select(
    operand: Operand, most: int, tol: float | None, oversample: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:  # (k,), (k, n), (m, k)
    """Return the indices of columns, the coefficients of all columns, and the selected columns."""
    n, k = operand.shape[1], most
    width = most if tol is None else min(most, _FIRST_WIDTH)
    probed, norm = None, 0.0
    if tol is not None:
        probed, values = operand.matmul(operand.probes(_PROBES, seed) / math.sqrt(_PROBES)), operand.values
        norm = float(probed.double().norm() if values is None else frobenius_norm(values))
    while True:
        order, rank = _pivots(operand, width, oversample, seed)
        Q, R = cholesky_qr(_columns(operand, order[:rank]))
        if tol is None or probed is None:
            break
        k, residual = _needed(Q, probed, tol * norm)
        if residual <= tol * norm or width == most or rank < width:
            if residual > tol * norm:
                limit = f"k={most}" if rank == most < min(operand.shape) else None
                warn_above_tol(tol, residual / norm, operand.dtype, limit, stacklevel=5)
            rank = k
            break
        width = min(most, 2 * width)
    for _ in range(_ROUNDS):
        B = operand.rmatmul(Q[:, :rank])[order[rank:]].double()  # (n - rank, rank)
        C = torch.linalg.solve_triangular(R[:rank, :rank].double().mT, B, upper=False, left=False)
        if not _exchange(order, C):
            break
        Q, R = cholesky_qr(_columns(operand, order[:rank]))
    T = torch.zeros(k, n, dtype=operand.dtype, device=order.device)
    T[:rank, order[rank:]] = C.mT.to(T.dtype)
    T[:, order[:k]] = torch.eye(k, dtype=T.dtype, device=T.device)
    return order[:k], T, _columns(operand, order[:k])


def _needed(Q: Tensor, probed: Tensor, allowed: float) -> tuple[int, float]:
    """Return how many columns of Q bring the residual of probes to the allowed norm, and the norm with all columns."""
    inside = Q.mT @ probed
    shares = torch.cat(((probed - Q @ inside).double().norm()[None], inside.double().norm(dim=1).flip(0))).square()
    residuals = shares.cumsum(0)  # by number of columns, from all down to none
    short = residuals > allowed**2
    return min(int(short.sum()), Q.shape[1]), float(shares[0].sqrt())


def _exchange(order: Tensor, C: Tensor) -> bool:  # (n,), (n - r, r)
    """Exchange selected columns in place while a coefficient is above 2; return whether any was.

    Row i of C has the coefficients of column ``order[r + i]``.
    """
    r, exchanged = C.shape[1], False
    while C.numel() and (largest := C.abs()).max() > _LARGEST_COEFFICIENT:
        i, j = divmod(int(largest.argmax()), r)
        step = C[i].clone()
        pivot = step[j].item()
        step[j] -= 1
        C[i] = 0
        C[i, j] = 1  # Columns i and j exchange their places, and all columns get coefficients of the new selection.
        C.addr_(C[:, j].clone(), step, alpha=-1 / pivot)
        order[[j, r + i]] = order[[r + i, j]]
        exchanged = True
    return exchanged


@driver
def leverage_scores(A: Any, k: int | None = None, *, seed: int | None = None) -> Tensor:  # (*batch, m)
    r"""Compute the leverage scores of the rows, :math:`\ell_i = \|Q_{i,:}\|^2` for an orthonormal basis Q of the range.

    Scores are between 0 and 1 and add up to the rank. A score near 1 means that no combination of other rows gives the
    row, so that a sample of rows must contain it; in regression they are the diagonal of the hat matrix. Use
    ``leverage_scores(A.mT)`` for columns.

    Args:
        A: Matrix or batch, (\*batch, m, n); kinds, dtypes and errors as for :mod:`panther.linalg`.
        k: Compute the scores of the best approximation of rank k, from the k leading left singular vectors; None takes
            the range of A, up to singular values that are zero to rounding.
        seed: The seed of the sketch.

    Cost: :func:`~panther.linalg.cqrrpt` of a dense A, ``3 m n^2`` flops if it is tall; otherwise
    :func:`~panther.linalg.randomized_svd`, with k triplets or all of them, and memory for its U.

    Example:
        >>> A = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> leverage_scores(A, seed=0)
        tensor([1.0000, 0.5000, 0.5000])

    Reference: Drineas, Magdon-Ismail, Mahoney and Woodruff (2012), arXiv:1109.3843.
    """
    operand = as_operand(A)
    if k is None and operand.dense is not None and operand.dense.ndim == 2:
        return cqrrpt(operand.dense, seed=seed).Q.square().sum(-1)
    most = min(operand.shape[-2:])
    rank = most if k is None else check_rank(k, operand)
    U, S, _ = map(torch.as_tensor, randomized_svd(A, rank, seed=seed))
    rounding = max(operand.shape[-2:]) * torch.finfo(S.dtype).eps * S[..., :1]
    return (U * (rounding < S)[..., None, :]).square().sum(-1)

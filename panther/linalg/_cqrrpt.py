r"""QR with column pivoting of tall matrices: CholeskyQR, preconditioned and pivoted by a sketch.

With S of ceil(gamma n) rows, pivoted QR of the small sketch, :math:`S M_{:,P} = Q_s R_s`, gives the pivots and a
preconditioner: :math:`X = M_{:,P} R_s^{-1}` has singular values within the distortion of S for any condition of
M. So its Gram matrix has a Cholesky factor :math:`X^T X = C^T C`, and :math:`M_{:,P} = (X C^{-1}) (C R_s)`.
"""

__all__ = ["CQRRPTResult", "cqrrpt"]

import math
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from panther.linalg._preconditioner import condition
from panther.linalg._ranks import sharded_qr
from panther.linalg.error import ErrorEstimate, estimate_error
from panther.linalg.operand import (
    as_dense,
    as_operand,
    as_sharded,
    check_finite,
    check_number,
    driver,
    summed_product,
    times_two_to,
    unsafe_power,
)
from panther.linalg.orthogonal import rotate
from panther.linalg.sharded import ShardedOperand
from panther.sketch import SparseSketch, check_seed

# The sketch has this many rows more than gamma n, because singular values of small random matrices vary more.
_MORE_ROWS = 16
_MOST_GAMMA = 1e6
# In float32 the sketch has at least this many rows per column, if M has _TALL rows per column. X then has a condition
# near 2, with which the first pass of CholeskyQR is accurate enough. A second one would take longer than such a sketch.
_FLOAT32_GAMMA, _TALL = 8, 32
# Rows of a panel, which is gathered, solved and multiplied while it is in a CPU's cache. The Gram matrices of panels
# are added in float64, so that rounding does not grow with m.
_PANEL, _CUDA_PANEL = 2048, 1 << 16
# Columns of a block of a Gram matrix. Blocks below the diagonal are not computed.
_BLOCK = 128
# Numbers in M from which the sketch saves time.
_LEAST_NUMBERS = {torch.float64: 1 << 19, torch.float32: 1 << 20}
_PROBES = 8


class CQRRPTResult(NamedTuple):
    """A pivoted QR factorisation, ``M[:, P] = Q @ R``; ``result @ X`` multiplies by its approximation of M.

    Attributes:
        Q: (m, r), orthonormal columns.
        R: (r, n), upper triangular (trapezoidal where r < n), its diagonal positive.
        P: (n,) int64, the permutation of the columns.
    """

    Q: Tensor
    R: Tensor
    P: Tensor

    def __matmul__(self, X: Tensor) -> Tensor:  # (n,) or (*batch, n, l) -> (m,) or (*batch, m, l)
        """Return the approximation of M times X."""
        return self.Q @ (self.R @ (X[self.P] if X.ndim == 1 else X[..., self.P, :]))


@overload
def cqrrpt(M: Tensor, gamma: float = ..., *, rtol: float | None = ..., seed: int | None = ...) -> CQRRPTResult: ...
@overload
def cqrrpt(
    M: Tensor, gamma: float = ..., *, rtol: float | None = ..., seed: int | None = ..., return_error: Literal[True]
) -> tuple[Tensor, Tensor, Tensor, ErrorEstimate]: ...
@driver
def cqrrpt(
    M: Tensor, gamma: float = 1.25, *, rtol: float | None = None, seed: int | None = None, return_error: bool = False
) -> CQRRPTResult | tuple[Tensor, Tensor, Tensor, ErrorEstimate]:
    r"""Factor a matrix as :math:`M_{:,P} = Q R` with column pivoting, which shows its numerical rank r.

    Q is orthonormal, :math:`\|Q^T Q - I\|_2 \le \epsilon^{3/4}`, for any condition of M. R is upper triangular;
    its diagonal is positive and does not increase by more than the distortion of the sketch (a few times). The
    residual :math:`\|M_{:,P} - Q R\|_F` is at most :math:`\epsilon^{3/4} \|M\|_F`, plus the part that ``rtol``
    truncates.

    The rank r is the number of diagonal entries before the first one that is at most rtol times the leading one.
    By default rtol is :math:`\epsilon \min(\max(m, n), 10 n)`, so that no matrix of condition below
    :math:`1 / (10 n \epsilon)` is truncated.

    Where a sketch would not save time, LAPACK's pivoted QR factors M with the same conventions: for wide matrices, and
    on the CPU for matrices with m < 6 n, n < 64, or fewer than 2^19 numbers (2^20 in float32).

    Args:
        M: A dense matrix of any shape; dtypes and errors as for :mod:`panther.linalg`.
        gamma: Rows of the sketch per column of M, 1 or more; there are at least n + 16 rows, and 8 n in float32 where
            M has 32 n. More rows make the diagonal of R fall more evenly, and cost time.
        rtol: Threshold that determines the rank, in [0, 1). If it is far below eps, rounding errors count as rank.
        seed: Seed of the sketch; None draws one from torch's default CPU generator.
        return_error: Whether to return an :class:`ErrorEstimate` of the residual too.

    Returns:
        ``CQRRPTResult(Q, R, P)``, of shapes (m, r), (r, n) and (n,); or a tuple of these and the error.

    Raises:
        TypeError: If M is not a dense tensor or array, or ``gamma`` or ``rtol`` is not a number.
        ValueError: If ``gamma`` or ``rtol`` is outside its range, or R is beyond the range of the dtype.

    Cost: ``3 m n^2`` flops, in products and triangular solves of whole panels (Householder's method takes
    ``4 m n^2``, a quarter of it column by column); ``8 m n`` for the sketch and :math:`O(\gamma n^3)` for its QR; a
    second pass of CholeskyQR, ``2 m n^2``, where the first is not accurate enough, as in float32 for m < 32 n.

    Example:
        >>> M = torch.ones(1000, 1) @ torch.tensor([[1.0, 3.0, 2.0]])
        >>> Q, R, P = cqrrpt(M, seed=0)
        >>> Q.shape, R.shape, P[0]
        (torch.Size([1000, 1]), torch.Size([1, 3]), tensor(1))
        >>> torch.allclose(M[:, P], Q @ R)
        True

    Reference: Melnichenko, Balabanov, Murray, Demmel, Mahoney and Luszczek (2023), arXiv:2311.08316.
    """
    operand = as_operand(as_dense("M", M) if as_sharded(M) is None else M, "M", batched=False)
    matrix, M = M, as_dense("M", operand.A)
    m, n = operand.shape
    rule = f"between 1 and {_MOST_GAMMA:g}"
    gamma = check_number("gamma", gamma, rule, lambda number: 1 <= number <= _MOST_GAMMA, "1.25, the default, or 2")
    if rtol is None:
        rtol = torch.finfo(M.dtype).eps * min(max(m, n), 10 * n)
    rtol = check_number("rtol", rtol, "in [0, 1)", lambda number: 0 <= number < 1, "None for the numerical rank")
    seed = operand.ranks.seed(check_seed(seed))
    if not isinstance(operand, ShardedOperand):
        d = max(math.ceil(gamma * n), n + _MORE_ROWS)
        if M.dtype == torch.float32 and m >= _TALL * n:
            d = max(d, _FLOAT32_GAMMA * n)
        result = _factor(M, d, rtol, seed)
    else:
        operand.check_finite(M)
        Q, R = sharded_qr(M, operand.ranks)
        small = _factor(R, len(R) + n, rtol, seed)
        result = CQRRPTResult(rotate(Q, small.Q), small.R, small.P)
    # The probes use a different kind of stream than the sketch, so they are independent.
    return (*result, estimate_error(matrix, result, seed=seed ^ 1)) if return_error else result


def _factor(M: Tensor, d: int, rtol: float, seed: int) -> CQRRPTResult:
    m, n = M.shape
    if m == 0 or n == 0:
        return CQRRPTResult(M.new_empty(m, 0), M.new_empty(0, n), torch.arange(n, device=M.device))
    if _pays(M, d):
        S = SparseSketch(d, m, seed=seed, dtype=M.dtype, device=M.device)
        sketch, exponent = S @ M, 0
        # NaN and infinity in M reach its sketch, which is faster to check than M.
        largest = float(sketch.abs().max())
        if not 0 < largest < math.inf or unsafe_power(largest, M.dtype):
            M, exponent = _scaled(M)
            sketch = S @ M
        Q, R, P = _factor_preconditioned(M, sketch, rtol, seed) or _pivoted_qr(M)
    else:
        M, exponent = _scaled(M)
        Q, R, P = _pivoted_qr(M)
    r = _count_leading(R.diagonal() > rtol * R[:1, :1].sum())
    R = times_two_to(R[:r], [exponent])
    largest = R.abs().max().item() if r else 1.0
    if not torch.finfo(M.dtype).tiny <= largest < math.inf:
        raise ValueError(f"R has entries of {largest}, beyond the range of {M.dtype}: multiply M by 2.0**{-exponent}")
    return CQRRPTResult(Q[:, :r].contiguous(), R.contiguous(), P)


def _pays(M: Tensor, d: int) -> bool:
    """Return whether a sketch of d rows saves time: on a CPU if M, (m, n), is tall and larger than the cache."""
    m, n = M.shape
    if M.is_cuda:
        return d < m
    return m > d and m >= 6 * n and n >= 64 and M.numel() >= _LEAST_NUMBERS[M.dtype]


def _factor_preconditioned(M: Tensor, sketch: Tensor, rtol: float, seed: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return Q, R and P, of the rank at which the sketch's R nearly vanishes; None if the sketch missed part of M."""
    d, n = sketch.shape
    eps = torch.finfo(M.dtype).eps
    # The pivots of the sketch are those of its R, and LAPACK's pivoted QR is slow.
    _, R, P = _pivoted_qr(torch.linalg.qr(sketch, mode="r").R, with_q=False)
    # The sketch may shrink a direction by the least singular value of a random d x n matrix, over the greatest, and
    # what it leaves out are up to n columns. The remaining rank is determined again at the end.
    distortion = (math.sqrt(d) + math.sqrt(n)) / (math.sqrt(d) - math.sqrt(n - 1))
    cut = max(rtol / max(2 * distortion, 3 * math.sqrt(n)), eps**2) * R[0, 0]
    k = _count_leading(R.diagonal() > cut)
    Q, gram = _precondition(M, R[:k, :k], P[:k])
    R = _orthonormalise(Q, gram, seed) @ R[:k]
    # Random probes find columns that are small in the sketch only; at the end, the truncated part has exact norms.
    threshold = max(rtol, 10 * n * eps) * R[:1, :1].sum()
    r = _count_leading(R.diagonal() > rtol * R[:1, :1].sum())
    missed = R[r:, r:].norm() > distortion * math.sqrt(n) * threshold
    if k < n and not missed:
        missed = estimate_error(M, CQRRPTResult(Q, R, P), probes=_PROBES, seed=seed).frobenius > threshold
    return None if missed else (Q, R, P)


def _precondition(M: Tensor, R: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``X = M[:, P] R^-1`` and the upper triangle of ``X^T X``, panel by panel."""
    X, gram = M.new_empty(M.shape[0], len(P)), R.new_zeros(R.shape, dtype=torch.float64)
    for rows in _panels(X):
        torch.gather(M[rows], 1, P.expand(X[rows].shape), out=X[rows])
        _solve(R, X[rows])
        _add_gram(gram, X[rows])
    return X, gram


def _orthonormalise(X: Tensor, gram: Tensor, seed: int) -> Tensor:
    """Make X orthonormal in place and return the triangular C with ``X_before = X C``; ``gram`` is overwritten.

    After a pass of CholeskyQR, ``X^T X - I`` is of the order of eps cond(X)^2; after a second one, of eps.
    """
    eps = torch.finfo(X.dtype).eps
    C, failed = torch.linalg.cholesky_ex(gram, upper=True)
    loss = math.inf if failed else eps * condition(C, seed) ** 2
    if loss <= 1e-3:
        _solve(C.to(X.dtype), X)
    else:
        Q, R = torch.linalg.qr(X)
        signs = torch.where(R.diagonal() < 0, -1.0, 1.0).to(R.dtype)
        torch.mul(Q, signs, out=X)
        C = (R * signs[:, None]).double()
    if loss > eps**0.75 / 8:
        gram.zero_()
        for rows in _panels(X):
            _add_gram(gram, X[rows])
        second = torch.linalg.cholesky(gram, upper=True)
        _solve(second.to(X.dtype), X)
        C = second @ C
    triangle: Tensor = C.to(X.dtype)
    return triangle


def _solve(R: Tensor, X: Tensor) -> None:
    """Replace X by ``X R^-1``."""
    torch.linalg.solve_triangular(R, X, upper=True, left=False, out=X)


def _panels(X: Tensor) -> list[slice]:
    height = _CUDA_PANEL if X.is_cuda else _PANEL
    return [slice(start, start + height) for start in range(0, len(X), height)]


def _add_gram(gram: Tensor, X: Tensor) -> None:
    """Add ``X^T X`` to ``gram``, on and above the diagonal."""
    for start in range(0, X.shape[1], _BLOCK):
        gram[start : start + _BLOCK, start:] += summed_product(X[:, start : start + _BLOCK], X[:, start:])


def _pivoted_qr(M: Tensor, with_q: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return LAPACK's pivoted QR, computed on the CPU, with a positive diagonal of R."""
    from scipy.linalg import qr  # slow to import

    factors = qr(M.cpu().numpy(), mode="economic" if with_q else "r", pivoting=True, check_finite=False)
    R, P = torch.from_numpy(factors[-2]).to(M), torch.from_numpy(factors[-1]).to(M.device, torch.int64)
    R = R[: min(M.shape)]
    signs = torch.where(R.diagonal() < 0, -1.0, 1.0).to(M)
    Q = torch.from_numpy(factors[0]).to(M) * signs if with_q else M
    return Q, R * signs[:, None], P


def _count_leading(condition: Tensor) -> int:
    return int(condition.long().cumprod(0).sum())


def _scaled(M: Tensor) -> tuple[Tensor, int]:
    """Return M and 0; if squares of its entries are out of range, ``2^-e M`` with largest entry near 1, and e."""
    check_finite("M", M)
    exponent = unsafe_power(float(M.abs().max()), M.dtype)
    return times_two_to(M, [-exponent]), exponent

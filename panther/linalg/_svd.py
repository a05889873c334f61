r"""Truncated singular value decomposition from a block Krylov space.

A space of a few narrow blocks contains the leading singular vectors better than the single wide block of subspace
iteration, for fewer products with A.
"""

__all__ = ["SVDResult", "randomized_svd"]

from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from panther.errors import check_size
from panther.linalg._krylov import KrylovSpace, grow, iterate, whole_space
from panther.linalg._rangefinder import (
    SearchOptions,
    check_n_iter,
    check_rank,
    check_tol,
    krylov_blocks,
    sign_matrix,
    warn_above_tol,
)
from panther.linalg.error import ErrorEstimate, estimate_error
from panther.linalg.operand import Operand, as_operand, driver
from panther.linalg.orthogonal import fix_signs
from panther.linalg.sharded import ShardedOperand
from panther.sketch import check_seed

_TOL_PROBES = 16
# Below this number of entries times k + oversample, operations on a Krylov space take longer than the products that it
# saves (measured).
_SMALL = 2 * 10**8
_ITERATIONS = 2


class SVDResult(NamedTuple):
    """Truncated SVD, A about U diag(S) V^T.

    Attributes:
        U: Left singular vectors, ``(*batch, m, k)``, orthonormal columns.
        S: Singular values in descending order, ``(*batch, k)``.
        V: Right singular vectors, ``(*batch, n, k)``, orthonormal columns.
    """

    U: Tensor
    S: Tensor
    V: Tensor

    def __matmul__(self, X: Tensor) -> Tensor:  # (*batch, n, l) -> (*batch, m, l)
        """Return the approximation of A times X."""
        return self.U @ (self.S[..., None] * (self.V.swapaxes(-1, -2) @ X))


@overload
def randomized_svd(A: Any, k: int, tol: float | None = ..., **options: Unpack[SearchOptions]) -> SVDResult: ...
@overload
def randomized_svd(
    A: Any, k: int, tol: float | None = ..., *, return_error: Literal[True], **options: Unpack[SearchOptions]
) -> tuple[Tensor, Tensor, Tensor, ErrorEstimate]: ...
@driver
def randomized_svd(
    A: Any,  # (*batch, m, n)
    k: int,
    tol: float | None = None,
    *,
    oversample: int = 10,
    n_iter: int | Literal["auto"] = "auto",
    seed: int | None = None,
    return_error: bool = False,
) -> SVDResult | tuple[Tensor, Tensor, Tensor, ErrorEstimate]:
    r"""Compute the k leading singular triplets, :math:`A \approx U \,\mathrm{diag}(S)\, V^T`.

    The sign convention: in each column of U the entry of largest magnitude is positive (the first of equal entries).

    Args:
        A: Matrix or batch, (\*batch, m, n); kinds, dtypes and errors as for :mod:`panther.linalg`.
        k: Number of triplets, from 0 to min(m, n).
        tol: Keep only as many triplets, at most k, as bring :math:`\|A - U S V^T\|_F` to ``tol`` times
            :math:`\|A\|_F`, estimated from 16 random probes; for a batch, as many as its most demanding entry
            needs. None keeps k.
        oversample: Dimensions of the search space beyond k, 0 or more.
        n_iter: Number of iterations with A^T A, from 0 to 100; each adds a block to the search space. The ``n_iter +
            1`` blocks have 2/5 of k + oversample columns (more if they would not add up to k + oversample), rounded up
            to a multiple of 16. If they add up to min(m, n) or more, A is decomposed outright. "auto" adds such blocks,
            three to nine of them (for :class:`RowSharded` always five), until an estimate says that all further ones
            would take less than 1.5 % off the squared error (less in proportion for k below 100), and the next one
            would add less than 30 % to the last squared singular value; of a sparse matrix, also until further ones
            would add less than 3e-5 to the sum of the squared singular values. Small matrices, and k + oversample above
            an eighth of min(m, n) of matrices that are not tall, take two subspace iterations with slightly more than k
            + oversample columns instead; from about half of min(m, n) on, A is decomposed outright.
        seed: The seed of the random signs from which the search starts.
        return_error: Whether to return an estimate of :math:`\|A - U S V^T\|_F` as well.

    Returns:
        U (\*batch, m, k), S (\*batch, k), V (\*batch, n, k); U and V have orthonormal columns even where S is zero.
        With ``return_error`` the tuple of the three and the estimate.

    Raises:
        ValueError: If tol is outside [0, 1).

    Warns:
        NumericalWarning: If k, or rounding, keeps the result from the tolerance.

    Cost: products of A with 2 d columns and about ``6 (m + n) d^2`` flops more in float64, d the dimension of the
    search space: with "auto" 1.2 to 2 times ``k + oversample`` mostly, at most 3.6 times.

    Example:
        >>> A = torch.outer(torch.arange(1.0, 4.0), torch.tensor([3.0, 4.0]))
        >>> U, S, V = randomized_svd(A, 1, seed=0)
        >>> round(S.item(), 4), torch.allclose(U @ torch.diag(S) @ V.T, A)
        (18.7083, True)

    Reference: Musco and Musco (2015), arXiv:1504.05477; Halko, Martinsson and Tropp (2011), doi:10.1137/090771806.
    """
    operand = as_operand(A)
    k = check_rank(k, operand)
    tol = check_tol(tol)
    width = k + check_size("oversample", oversample, least=0)
    iterations = None if n_iter == "auto" else check_n_iter(n_iter)
    seed = operand.ranks.seed(check_seed(seed))
    is_wide = operand.shape[-2] < operand.shape[-1] and not isinstance(operand, ShardedOperand)
    operand = operand.mT if is_wide else operand
    space = _search(operand, k, width, iterations, seed)
    if tol is None:
        U, S, V = space.triplets(k, operand.dtype)
    else:
        U, S, V = space.triplets_by_qr(lambda S: _rank(operand, space, S, k, tol, seed))
    S = S * space.scale[..., 0]
    U, S, V = U.to(operand.dtype), S.to(operand.dtype), V.to(operand.dtype)
    operand.check_finite(S)
    if is_wide:
        U, V = V, U
    flips = fix_signs(U)
    if operand.ranks.size > 1:
        rows = torch.nn.functional.pad(U, (0, 0, 0, 1))  # This rank may have no rows.
        flips = fix_signs(operand.ranks.gather(rows.gather(0, rows.abs().argmax(0, keepdim=True)))[:, 0])
    result = SVDResult(U * flips, S, V * flips)
    # The probes of the estimate are Gaussian, so they are independent of the signs with the same seed.
    return (*result, estimate_error(A, result, seed=seed)) if return_error else result


def _search(operand: Operand, k: int, width: int, iterations: int | None, seed: int) -> KrylovSpace:
    """Return the search space of the triplets."""
    large_size, small_size = operand.shape[-2:]
    block, blocks = krylov_blocks(width, check_n_iter("auto") if iterations is None else iterations)
    if isinstance(operand, ShardedOperand):
        if block * blocks < min(large_size, small_size):
            return grow(operand, operand.signs(block, seed), k, blocks)
        if small_size <= large_size or large_size == 0:
            return whole_space(operand)
        return grow(operand, operand.rows_of(torch.eye(large_size, dtype=operand.dtype, device=operand.device)), k, 1)
    if iterations is None:
        tall = small_size <= large_size / 4
        # From this share of all directions on, LAPACK is faster than two iterations, which make many calls.
        if 9 * small_size <= 16 * (width + 24) or (tall and small_size <= 2 * width):
            return whole_space(operand)
        # A Krylov space is twice as wide as the space of subspace iteration and needs fewer products with A. It gains
        # if the products are most of the work.
        if small_size * large_size * width <= _SMALL or (not tall and small_size < 8 * width):
            columns = -(-(width + 2) // 4) * 4
            return iterate(operand, sign_matrix(operand.mT, columns, seed), _ITERATIONS)
    elif block * blocks >= small_size:
        return whole_space(operand)
    return grow(operand, sign_matrix(operand.mT, block, seed), k, None if iterations is None else blocks)


def _rank(operand: Operand, space: KrylovSpace, S: Tensor, k: int, tol: float, seed: int) -> int:
    """Return the least number of triplets, at most k, whose residual is within the tolerance for every batch entry."""
    omega = operand.probes(_TOL_PROBES, seed)
    inner = omega.double() if space.P is None else space.P.mT @ omega.double()
    outside = operand.matmul(omega).double() / space.scale - space.Y @ inner
    inside = S.square()
    tails = torch.cat((inside.flip(-1).cumsum(-1).flip(-1), torch.zeros_like(inside[..., :1])), -1)
    tails += operand.ranks.sum(outside.square().sum((-1, -2)))[..., None] / _TOL_PROBES
    short = tails > tol**2 * tails[..., :1]  # (*batch, d + 1), by number of triplets, from 0
    rank = int(short.sum(-1).amax()) if short.numel() else 0
    if rank > k:
        reached = float((tails[..., k] / tails[..., 0]).nan_to_num().amax().sqrt())
        limit = f"k={k}" if k < min(operand.shape[-2:]) else None
        warn_above_tol(tol, reached, operand.dtype, limit, stacklevel=7)  # names the caller of randomized_svd
    return min(k, rank)

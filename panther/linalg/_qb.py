r"""Adaptive low-rank factorisation :math:`A \approx Q B`, block by block until a tolerance is met.

Each block of Q reduces the squared residual by the squares of its rows of B. Once the residual has fallen to
:math:`\sqrt\epsilon \|A\|`, that difference is only rounding, and products with random probes estimate the residual.
"""

__all__ = ["QBResult", "qb"]

import math
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from panther.errors import check_size
from panther.linalg._rangefinder import check_goal, check_n_iter, warn_above_tol
from panther.linalg.error import ErrorEstimate, estimate_error
from panther.linalg.operand import Operand, as_operand, driver, frobenius_norm, times_two_to, unsafe_power
from panther.linalg.orthogonal import add_to_basis, rotate
from panther.sketch import SignSketch, check_seed

_PROBES = 32
# The difference of norms gives the squared residual up to a few eps |A|^2, which is a percent of it above _RESOLVED
# eps.
_RESOLVED = 1000


class QBResult(NamedTuple):
    """Low-rank factorisation, A about Q B.

    Attributes:
        Q: Orthonormal columns, ``(*batch, m, r)``.
        B: Q^T A, ``(*batch, r, n)``.
    """

    Q: Tensor
    B: Tensor

    def __matmul__(self, X: Tensor) -> Tensor:  # (*batch, n, l) -> (*batch, m, l)
        """Return the approximation of A times X."""
        return self.Q @ (self.B @ X)


class _Options(TypedDict, total=False):
    block_size: int
    n_iter: int
    seed: int | None


@overload
def qb(A: Any, k: int | None = ..., tol: float | None = ..., **options: Unpack[_Options]) -> QBResult: ...
@overload
def qb(
    A: Any, k: int | None = ..., tol: float | None = ..., *, return_error: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor, ErrorEstimate]: ...
@driver
def qb(
    A: Any,  # (*batch, m, n)
    k: int | None = None,
    tol: float | None = None,
    *,
    block_size: int = 32,
    n_iter: int = 1,
    seed: int | None = None,
    return_error: bool = False,
) -> QBResult | tuple[Tensor, Tensor, ErrorEstimate]:
    r"""Factor :math:`A \approx Q B`, Q orthonormal and :math:`B = Q^T A`, to a rank or to a tolerance.

    Args:
        A: Matrix or batch, (\*batch, m, n); kinds, dtypes and errors as for :mod:`panther.linalg`.
        k: Largest rank, from 0 to min(m, n); None is min(m, n).
        tol: Stop as soon as :math:`\|A - Q B\|_F \le \mathrm{tol}\, \|A\|_F`, for every entry of a batch. Down to
            :math:`\sqrt{1000 \epsilon}` (0.011 in float32, 5e-7 in float64) the residual is exact; below, and for an A
            that is not a tensor, it is estimated from 32 Gaussian probes, to 5 % or better where many singular values
            remain and within a factor of 1.6 (99.9 %) where one does. None continues to rank k.
        block_size: Columns of Q that a step adds. The last step drops the columns that the tolerance does not need.
        n_iter: Number of iterations with A A^T on each block, from 0 to 100.
        seed: The seed of the random signs.
        return_error: Whether to return an estimate of :math:`\|A - Q B\|_F` as well.

    Returns:
        Q (\*batch, m, r) and B (\*batch, r, n). With ``return_error`` the tuple of both and the estimate.

    Raises:
        ValueError: If neither k nor tol is given, or tol is outside [0, 1).

    Warns:
        NumericalWarning: If k, or rounding, keeps the result from the tolerance.

    Cost: ``2 n_iter + 2`` products of A with r columns, and ``4 (n_iter + 1) m r^2`` flops to keep Q orthonormal.

    Example:
        >>> A = torch.diag(0.5 ** torch.arange(50.0))
        >>> Q, B = qb(A, tol=0.01, seed=0)
        >>> Q.shape[1] < 10, bool((A - Q @ B).norm() < 0.01 * A.norm())
        (True, True)

    Reference: Yu, Gu and Li (2018), algorithm 2, doi:10.1137/17M1141977.
    """
    operand = as_operand(A)
    (most, tol), n_iter = check_goal("qb", k, tol, operand), check_n_iter(n_iter)
    block_size = check_size("block_size", block_size, least=1)
    seed = operand.ranks.seed(check_seed(seed))
    n = operand.shape[-1]
    S = SignSketch(most, n, seed=seed, scale=False, dtype=operand.dtype, device=operand.device)
    residual = None if tol is None else _Residual(operand, tol, seed)
    Q = torch.empty(*operand.shape[:-2], operand.num_rows, 0, dtype=operand.dtype, device=operand.device)
    Bt = torch.empty(*operand.shape[:-2], n, 0, dtype=operand.dtype, device=operand.device)
    met = residual is not None and residual.met
    while (rank := Q.shape[-1]) < most and not met:
        size = min(block_size, most - rank)
        omega = S.block(slice(rank, rank + size), slice(None)).mT
        Y = operand.matmul(omega.expand(*operand.shape[:-2], n, size))
        operand.check_finite(Y)
        new = add_to_basis(Y, Q, operand.ranks)
        for _ in range(n_iter):
            new = add_to_basis(operand.matmul(add_to_basis(operand.rmatmul(new))), Q, operand.ranks)
        new_bt = operand.accurate_rmatmul(new)
        if residual is not None:
            new, new_bt = residual.reduce(new, new_bt)
            met = residual.met
        Q, Bt = torch.cat((Q, new), -1), torch.cat((Bt, new_bt), -1)
    if tol is not None and residual is not None and not met:
        limit = f"k={k}" if most < min(operand.shape[-2:]) else None
        warn_above_tol(tol, residual.relative, operand.dtype, limit)
    result = QBResult(Q, Bt.mT)
    operand.check_finite(result.B)
    return (*result, estimate_error(A, result, seed=seed)) if return_error else result


class _Residual:
    """The squared residual of each batch entry, relative to the squared norm of A."""

    def __init__(self, operand: Operand, tol: float, seed: int) -> None:
        self.target, self.ranks = tol**2, operand.ranks
        values = operand.values if self.target >= _RESOLVED * torch.finfo(operand.dtype).eps else None
        if is_probed := values is None:
            values = operand.matmul(operand.probes(_PROBES, seed) / math.sqrt(_PROBES))
        largest = self.ranks.gather(values.abs().max() if values.numel() else values.new_zeros(())).max()
        self.power = unsafe_power(float(largest), operand.dtype)  # Squares of A over 2^power are in range.
        values = times_two_to(values, [-self.power])
        self.probed = values if is_probed else None
        self.norm = self.ranks.norm(frobenius_norm(values))
        operand.check_finite(self.norm)
        self.left = (self.norm > 0).double()

    @property
    def met(self) -> bool:
        return bool((self.left <= self.target).all())

    @property
    def relative(self) -> float:
        return float(self.left.clamp_min(0).max().sqrt())

    def reduce(self, Q: Tensor, Bt: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract a block from the residual; return it with descending columns, truncated at the tolerance."""
        scaled = times_two_to(Bt, [-self.power])
        W = torch.linalg.eigh((scaled.mT @ scaled).double()).eigenvectors.to(Q.dtype)
        Q, Bt = rotate(Q, W.flip(-1)), rotate(Bt, W.flip(-1))
        # (*batch, n or probes, b)
        coefficients = rotate(scaled, W.flip(-1)) if self.probed is None else self.ranks.sum(Q.mT @ self.probed).mT
        scale = torch.where(self.norm > 0, self.norm, 1.0)
        shares = (coefficients.double() / scale[..., None, None]).square().sum(-2)
        if self.probed is None:
            left = self.left - shares.sum(-1)
        else:
            self.probed = self.probed - Q @ coefficients.mT
            norm = torch.linalg.vector_norm(self.probed, dim=(-2, -1), dtype=torch.float64)
            left = (self.ranks.norm(norm) / scale).square()
        tail = torch.cat((left[..., None], shares.flip(-1)[..., :-1]), -1)
        after = tail.cumsum(-1).flip(-1)  # (*batch, b), by number of columns; sums, because differences would round
        enough = (after <= self.target).reshape(-1, after.shape[-1]).all(0)
        num_columns = int(enough.int().argmax()) + 1 if bool(enough[-1]) else len(enough)
        self.left = after[..., num_columns - 1]
        return Q[..., :num_columns], Bt[..., :num_columns]

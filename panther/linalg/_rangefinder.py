r"""Orthonormal bases that contain most of a matrix: subspace iteration and block Krylov spaces."""

__all__ = [
    "SearchOptions", "check_goal", "check_n_iter", "check_rank", "check_tol", "krylov_blocks", "rangefinder",
    "sign_matrix", "warn_above_tol",
]  # fmt: skip

import warnings
from typing import Any, Literal, TypedDict, overload

import numpy as np
import torch
from torch import Tensor

from panther.errors import NumericalWarning, ShapeError, check_size
from panther.linalg.error import ErrorEstimate, estimate_error
from panther.linalg.operand import Operand, as_operand, check_number, driver
from panther.linalg.orthogonal import add_to_basis
from panther.sketch import check_seed

_MOST_ITERATIONS = 100
_AUTO = 4
# Blocks have 2/5 of k + oversample columns. Narrower blocks need fewer columns for the same error, but more time for
# each column.
_NARROWING = 2, 5
# If the width is not a multiple of 16, a product takes up to 1.4 times as long per column (MKL, 1 thread).
_GRANULE = 16


class SearchOptions(TypedDict, total=False):
    """Options of the drivers that search a block Krylov space."""

    oversample: int
    n_iter: int | Literal["auto"]
    seed: int | None


@overload
def rangefinder(A: Any, k: int, *, n_iter: int = ..., seed: int | None = ...) -> Tensor: ...
@overload
def rangefinder(
    A: Any, k: int, *, n_iter: int = ..., seed: int | None = ..., return_error: Literal[True]
) -> tuple[Tensor, ErrorEstimate]: ...
@driver
def rangefinder(
    A: Any, k: int, *, n_iter: int = 2, seed: int | None = None, return_error: bool = False
) -> Tensor | tuple[Tensor, ErrorEstimate]:
    r"""Find an orthonormal Q of k columns with :math:`A \approx Q Q^T A`.

    .. math:: Q = \mathrm{orth}((A A^T)^q A \Omega), \qquad \Omega_{ij} = \pm 1,

    by subspace iteration, orthonormalised after every product. The error is similar to or below the error of the best
    matrix of rank k - 10, so use 10 more columns than the rank that you need.

    Args:
        A: Matrix or batch, (\*batch, m, n); kinds, dtypes and errors as for :mod:`panther.linalg`.
        k: Number of columns, from 0 to min(m, n).
        n_iter: The number q of iterations, from 0 to 100.
        seed: The seed of :math:`\Omega`.
        return_error: Whether to return an estimate of :math:`\|A - Q Q^T A\|_F` as well.

    Returns:
        Q, (\*batch, m, k); with ``return_error`` the pair of Q and the estimate.

    Cost: ``2 n_iter + 1`` products of A with k columns, and one more for the estimate.

    Example:
        >>> import torch
        >>> A = torch.outer(torch.arange(1.0, 6.0), torch.ones(4))
        >>> Q = rangefinder(A, 1, seed=0)
        >>> torch.allclose(Q @ (Q.T @ A), A)
        True

    Reference: Halko, Martinsson and Tropp (2011), algorithm 4.4, doi:10.1137/090771806.
    """
    operand = as_operand(A)
    k = check_rank(k, operand)
    n_iter = check_n_iter(n_iter)
    seed = operand.ranks.seed(check_seed(seed))
    Y = operand.matmul(sign_matrix(operand, k, seed))
    operand.check_finite(Y)
    Q = add_to_basis(Y, None, operand.ranks)
    for _ in range(n_iter):
        Q = add_to_basis(operand.matmul(add_to_basis(operand.rmatmul(Q))), None, operand.ranks)
    return (Q, estimate_error(A, (Q, operand.rmatmul(Q).mT), seed=seed)) if return_error else Q


def krylov_blocks(width: int, n_iter: int) -> tuple[int, int]:
    """Return width and number of the blocks of a Krylov space for ``width`` = k + oversample and ``n_iter`` iterations.

    ``n_iter + 1`` blocks of 2/5 of ``width`` (more if they would not add up to it), rounded up to a multiple of 16:
    (112, 1) for a width of 110 and no iteration, (48, 5) for 4.
    """
    blocks = n_iter + 1
    numerator, denominator = max(_NARROWING, (1, blocks), key=lambda f: f[0] / f[1])
    return max(1, -(-numerator * width // (denominator * _GRANULE))) * _GRANULE, blocks


def sign_matrix(operand: Operand, columns: int, seed: int) -> Tensor:
    """Return random signs to multiply an operand by, (*batch, n, columns)."""
    rows = operand.shape[-1]
    # The stream of NumPy's Philox is fixed for all versions and platforms. It draws 15 times as fast as the streams of
    # panther.sketch, which can draw a block without the rest.
    words = np.random.Philox(key=seed).random_raw(-(-rows * columns // 64)).astype("<u8", copy=False)
    bits = torch.from_numpy(np.unpackbits(words.view(np.uint8), count=rows * columns))
    S = bits.view(columns, rows).to(operand.device, operand.dtype).mul_(2).sub_(1)
    return S.mT.expand(*operand.shape[:-2], rows, columns)


def check_rank(k: int, operand: Operand) -> int:
    """Return k as a Python int, or raise ShapeError unless ``0 <= k <= min(m, n)``."""
    k = check_size("k", k, least=0)
    most = min(operand.shape[-2:])
    if k > most:
        raise ShapeError(
            f"k={k} must be at most min(m, n) = {most} for A of shape {tuple(operand.shape)}: use k={most}"
        )
    return k


def check_n_iter(n_iter: int | str) -> int:
    """Return n_iter as a Python int, 4 for "auto", or raise ShapeError unless ``0 <= n_iter <= 100``."""
    if isinstance(n_iter, str):
        if n_iter != "auto":
            raise ValueError(f'n_iter={n_iter!r} must be an integer or "auto"')
        return _AUTO
    n_iter = check_size("n_iter", n_iter, least=0)
    if n_iter > _MOST_ITERATIONS:
        raise ShapeError(f"n_iter={n_iter} must be at most {_MOST_ITERATIONS}: raise k or oversample instead")
    return n_iter


def check_goal(driver: str, k: int | None, tol: float | None, operand: Operand) -> tuple[int, float | None]:
    """Return the largest rank, and tol as a float or None; raise ValueError if neither says when to stop."""
    if k is None and tol is None:
        raise ValueError(
            f"{driver} must know when to stop, and k and tol are both None: pass a rank k, or a tolerance such as "
            "tol=1e-3"
        )
    return min(operand.shape[-2:]) if k is None else check_rank(k, operand), check_tol(tol)


def check_tol(tol: float | None) -> float | None:
    """Return tol as a float, or raise ValueError unless ``0 <= tol < 1``; None stays."""
    if tol is None:
        return None
    return check_number("tol", tol, "in [0, 1), relative to the norm of A", lambda number: 0 <= number < 1, "1e-3")


def warn_above_tol(tol: float, reached: float, dtype: torch.dtype, limit: str | None, stacklevel: int = 4) -> None:
    """Warn that ``limit``, such as "k=20", keeps a result from its tolerance, or the rounding of ``dtype`` if None."""
    reason = f"below what {dtype} can reach" if limit is None else f"not reached with {limit}"
    fix = "use a larger one" if limit is None else "raise either"
    warnings.warn(f"tol={tol} is {reason}, {reached:.1e} here: {fix}", NumericalWarning, stacklevel)

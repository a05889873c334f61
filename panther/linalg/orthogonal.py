r"""Orthonormal bases of tall blocks, in matrix products.

CholeskyQR takes R from :math:`X^T X = R^T R` and Q from :math:`X R^{-1}`. It loses orthogonality as the square of X's
condition, so a second round follows, which checks that the Gram matrix of the first round's Q, in float64, is near I.
If it is not, or a factor does not exist (X deficient, zero, badly conditioned, too large to square), Householder's
reflections in float64 are used, which are slower and always correct. Y. Yamamoto,
Y. Nakatsukasa, Y. Yanagisawa and T. Fukaya, "Roundoff error analysis of the CholeskyQR2 algorithm", ETNA 44 (2015),
306-326.
"""

__all__ = ["add_to_basis", "cholesky_qr", "core_svd", "fix_signs", "near_qr", "orthonormalize", "rotate"]

import torch
from torch import Tensor

from panther.errors import DTypeError, ShapeError
from panther.linalg._ranks import ALONE, Ranks, sharded_qr
from panther.linalg.operand import as_dense, check_finite, driver, power_of_two

# |G - I| <= 1/2 in the Frobenius norm bounds the first Q's condition by sqrt(3): one more round gives I to rounding.
_NEAR_IDENTITY = 0.5


@driver
def cholesky_qr(X: Tensor) -> tuple[Tensor, Tensor]:  # (*batch, m, n) -> (*batch, m, n), (*batch, n, n)
    r"""Factor a tall matrix, :math:`X = Q R` with orthonormal Q and upper triangular R.

    Args:
        X: Real, float32 or float64, m >= n, of any rank.

    Returns:
        Q, whose n columns are orthonormal to rounding for any rank of X, and R.

    Raises:
        ShapeError: If n > m.
        DTypeError: If X is neither float32 nor float64.
        ValueError: If X has NaN or infinity, or R overflows.

    Cost: ``6 m n^2`` flops in matrix products and ``m n^2`` in a triangular solve; ``4 m n^2`` more by Householder's
    method where Cholesky's fails.

    Example:
        >>> X = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0]])
        >>> Q, R = cholesky_qr(X)
        >>> torch.allclose(Q @ R, X), torch.allclose(Q.T @ Q, torch.eye(2))
        (True, True)
    """
    X = _checked("X", X)
    Q, T, R = near_qr(X)
    if not bool(R.isfinite().all()):
        raise ValueError(f"R overflows {X.dtype}: divide X by its largest entry, or use float64")
    return rotate(Q, T), R


@driver
def orthonormalize(X: Tensor, basis: Tensor | None = None) -> Tensor:  # (*batch, m, n), (*batch, m, d)
    r"""Return an orthonormal Q such that the columns of X are in the span of Q and ``basis``.

    :math:`Q^T Q = I`, :math:`\mathrm{basis}^T Q = 0`, and X is in the span of both. Where X adds fewer than n
    directions, other directions complete Q.

    Args:
        X: Real, float32 or float64, of any rank.
        basis: Orthonormal columns that Q must be orthogonal to; None for none.

    Raises:
        ShapeError: If n + d > m, or basis does not have the shape ``(*batch, m, d)``.
        DTypeError: If X is neither float32 nor float64.
        ValueError: If X or basis has NaN or infinity.

    Cost: ``6 m n^2 + 8 m n d`` flops in matrix products and ``m n^2`` in a triangular solve; Householder's method on
    (m, d + n) where Cholesky's fails.

    Example:
        >>> # Rank one: the second column is another direction.
        >>> Q = orthonormalize(torch.ones(3, 2))
        >>> torch.allclose(Q.T @ Q, torch.eye(2), atol=1e-6)
        True
    """
    X = _checked("X", X)
    if basis is not None:
        basis = _checked("basis", basis)
        if basis.shape[:-1] != X.shape[:-1] or basis.dtype != X.dtype:
            raise ShapeError(
                f"basis, {basis.dtype} of shape {tuple(basis.shape)}, must equal X, {X.dtype} of shape "
                f"{tuple(X.shape)}, in all but the last dimension: expand or cast it"
            )
    return add_to_basis(X, basis)


def add_to_basis(X: Tensor, basis: Tensor | None = None, ranks: Ranks = ALONE) -> Tensor:
    """Compute :func:`orthonormalize` without its checks, also of rows that are sharded over ranks."""
    Q, T, _ = near_qr(X, basis, ranks)
    return rotate(Q, T)


def near_qr(X: Tensor, basis: Tensor | None = None, ranks: Ranks = ALONE) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return Q (\*batch, m, n), T and R of a QR factorisation without its last product: :math:`Q T` is orthonormal.

    T is near I, and the basis has the shape (\*batch, m, d), if there is one.

    Without a basis, X = Q T R. Where a well-conditioned basis of X suffices, use Q, of condition :math:`\sqrt 3` or
    less; to form :math:`Q T W`, multiply T and W first. The rows of X and of the basis may be sharded over ranks.
    """
    (m, n), basis_size = X.shape[-2:], 0 if basis is None else basis.shape[-1]
    if n + basis_size > m and ranks.size == 1:
        raise ShapeError(
            f"{n} columns beside a basis of {basis_size} must be at most the {m} rows of X, of shape {tuple(X.shape)}: "
            "pass fewer columns"
        )
    cleared = _clear(X, basis, ranks)
    R, info = torch.linalg.cholesky_ex(ranks.sum(cleared.mT @ cleared), upper=True)
    Q = _clear(torch.linalg.solve_triangular(R, cleared, upper=True, left=False), basis, ranks)
    # This Gram matrix decides how orthonormal the result is. In float32 its sums over m entries were wrong by 66 eps at
    # m = 301 (MKL with AVX-512), where all terms had the same sign, as for constant columns.
    gram = ranks.sum(_gram(Q, Q))
    R2, info2 = torch.linalg.cholesky_ex(gram, upper=True)
    eye = torch.eye(n, dtype=gram.dtype, device=X.device)
    near = (torch.linalg.matrix_norm(gram - eye) <= _NEAR_IDENTITY) & (info == 0) & (info2 == 0)
    if bool(near.all()):
        return Q, torch.linalg.solve_triangular(R2, eye, upper=True).to(X.dtype), (R2 @ R.to(R2.dtype)).to(X.dtype)
    scale = power_of_two(X, ranks)  # The scale keeps squares and remainders in the dtype's range.
    # In float64, because float32 reflections lose digits in the same sums: R was wrong by 450 eps at m = 20,000.
    stacked = (X / scale if basis is None else torch.cat((basis, X / scale), -1)).double()
    Q, R = torch.linalg.qr(stacked) if ranks.size == 1 else sharded_qr(stacked, ranks)
    R = (R[..., basis_size:, basis_size:] * scale).to(X.dtype)
    return Q[..., basis_size:].to(X.dtype), eye.to(X.dtype).expand(R.shape), R


def rotate(Q: Tensor, W: Tensor) -> Tensor:  # (*batch, m, n), (*batch, n, k) -> (*batch, m, k)
    """Return ``Q W``, summed in float64, so that orthonormal Q and W give orthonormal columns to rounding."""
    return (Q.double() @ W.double()).to(Q.dtype)


def _gram(X: Tensor, Y: Tensor) -> Tensor:
    """Return ``X^T Y``, summed in float64."""
    return X.double().mT @ Y.double()


def core_svd(R: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (*batch, n, n)
    """Return the SVD of a small matrix, computed in float64: in float32, LAPACK's vectors lose up to two digits."""
    W, S, Xh = torch.linalg.svd(R.double())
    return W.to(R.dtype), S.to(R.dtype), Xh.to(R.dtype)


def fix_signs(Q: Tensor) -> Tensor:  # (*batch, m, n) -> (*batch, 1, n)
    """Return the signs, +-1, that make the largest entry of each column positive; the first of equal entries."""
    if Q.shape[-2] == 0:
        return Q.new_ones(*Q.shape[:-2], 1, Q.shape[-1])
    largest = Q.gather(-2, Q.abs().argmax(-2, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0).to(Q.dtype)


def _clear(X: Tensor, basis: Tensor | None, ranks: Ranks) -> Tensor:
    """Subtract from X its projection onto the range of a basis."""
    return X if basis is None or basis.shape[-1] == 0 else X - basis @ ranks.sum(_gram(basis, X)).to(X.dtype)


def _checked(name: str, X: Tensor) -> Tensor:
    X = as_dense(name, X)
    if X.ndim < 2:
        raise ShapeError(f"{name}, of shape {tuple(X.shape)}, must have two dimensions or more: use {name}[:, None]")
    if X.dtype not in (torch.float32, torch.float64):
        raise DTypeError(f"{name} is {X.dtype} and must be float32 or float64: use {name}.float()")
    check_finite(name, X)
    return X

r"""Orthonormal bases of tall blocks, in matrix products.

CholeskyQR takes R from :math:`X^T X = R^T R` and Q from :math:`X R^{-1}`. It loses orthogonality as the square of X's
condition, so a second round follows, and with it a check: the Gram matrix of the first round's Q must be near I. Where
it is not, or a factor does not exist (X deficient, zero, badly conditioned, too large to square), Householder's
reflections take over, slower and always right. Y. Yamamoto, Y. Nakatsukasa, Y. Yanagisawa and T. Fukaya, "Roundoff
error analysis of the CholeskyQR2 algorithm", ETNA 44 (2015), 306-326.
"""

__all__ = ["cholesky_qr", "fix_signs", "orthonormalize"]

import torch
from torch import Tensor

from panther.errors import ShapeError

# |G - I| <= 1/2 in the Frobenius norm bounds the first Q's condition by sqrt(3): one more round gives I to rounding.
_NEAR_IDENTITY = 0.5


def cholesky_qr(
    X: Tensor,  # (*batch, m, n)
) -> tuple[Tensor, Tensor]:  # (*batch, m, n), (*batch, n, n)
    r"""Factor a tall matrix, :math:`X = Q R` with orthonormal Q and upper triangular R.

    Args:
        X: Real, float32 or float64, m >= n, of any rank.

    Returns:
        Q, its n columns orthonormal to rounding whatever the rank of X, and R.

    Raises:
        ShapeError: If n > m.

    Cost: ``6 m n^2`` flops in matrix products; ``4 m n^2`` more by Householder's method where Cholesky's fails.

    Example:
        >>> X = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0]])
        >>> Q, R = cholesky_qr(X)
        >>> torch.allclose(Q @ R, X), torch.allclose(Q.T @ Q, torch.eye(2))
        (True, True)
    """
    _check_tall(X, 0)
    factors = _two_rounds(X, None)
    return torch.linalg.qr(X) if factors is None else factors


def orthonormalize(
    X: Tensor,  # (*batch, m, n)
    basis: Tensor | None = None,  # (*batch, m, d)
) -> Tensor:  # (*batch, m, n)
    r"""Orthonormal Q whose range, with that of ``basis``, holds the columns of X.

    :math:`Q^T Q = I`, :math:`\mathrm{basis}^T Q = 0`, and X is in the span of both. Where X adds fewer than n
    directions, other directions complete Q.

    Args:
        X: Real, float32 or float64, of any rank.
        basis: Orthonormal columns to keep clear of; None for none.

    Raises:
        ShapeError: If n + d > m: so many directions do not exist.

    Cost: ``6 m n^2 + 8 m n d`` flops in matrix products; Householder's method on (m, d + n) where Cholesky's fails.

    Example:
        >>> Q = orthonormalize(torch.ones(3, 2))  # rank one: the second column is another direction
        >>> torch.allclose(Q.T @ Q, torch.eye(2), atol=1e-6)
        True
    """
    known = 0 if basis is None else basis.shape[-1]
    _check_tall(X, known)
    factors = _two_rounds(X, basis if known else None)
    if factors is not None:
        return factors[0]
    return torch.linalg.qr(torch.cat((basis, X), -1) if basis is not None else X)[0][..., known:]


def fix_signs(
    Q: Tensor,  # (*batch, m, n)
) -> Tensor:  # (*batch, 1, n)
    """The signs, +-1, that make the largest entry of each column positive; of equal ones the first counts.

    Example:
        >>> fix_signs(torch.tensor([[1.0, 3.0], [-2.0, 3.0]]))
        tensor([[-1.,  1.]])
    """
    if Q.shape[-2] == 0:
        return Q.new_ones(*Q.shape[:-2], 1, Q.shape[-1])
    largest = Q.gather(-2, Q.abs().argmax(-2, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0).to(Q.dtype)


def _check_tall(X: Tensor, known: int) -> None:
    m, n = X.shape[-2:]
    if n + known > m:
        raise ShapeError(
            f"{n} columns beside a basis of {known} must be at most the {m} rows, X being of shape {tuple(X.shape)}: "
            f"pass fewer columns"
        )


def _two_rounds(X: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Q and R of CholeskyQR2, orthogonalised against the basis before each round; None where it cannot be trusted."""
    Q, factors, sound = X, [], torch.ones((), dtype=torch.bool, device=X.device)
    gram = X  # both are set in the loop
    for _ in range(2):
        if basis is not None:
            Q = Q - basis @ (basis.mT @ Q)
        gram = Q.mT @ Q
        R, info = torch.linalg.cholesky_ex(gram, upper=True)
        sound = sound & (info == 0).all()
        Q = torch.linalg.solve_triangular(R, Q, upper=True, left=False)
        factors.append(R)
    eye = torch.eye(gram.shape[-1], dtype=X.dtype, device=X.device)
    distance = torch.linalg.matrix_norm(gram - eye)
    if not bool(sound & (distance <= _NEAR_IDENTITY).all()):
        return None
    return Q, factors[1] @ factors[0]

r"""Orthogonalised matrices by Newton-Schulz iterations of the Gram matrix of the shorter side.

A round of the iteration is :math:`X \leftarrow X\,(a I + b\,X^T X + c\,(X^T X)^2)`. All rounds together multiply X by a
polynomial of its Gram matrix, so that the larger side occurs in two products only. A Gram matrix has the squares of the
singular values. In float32, values below 1e-3 of the norm are lost in it, while five rounds enlarge them up to 485
times. So the iteration starts again after three rounds, with the Gram matrix of the new X, whose values are 41 times
larger. Results are then wrong by 2e-5 of their norm at most, and by 8e-4 without the restart (condition 1e4, rank
deficient, one large value and many of a thousandth). Dao-AILab's Gram Newton-Schulz restarts for half precision.
"""

__all__ = ["orthogonalize", "orthogonalizing_factor"]

import torch
from torch import Tensor

from panther.errors import DTypeError, ShapeError
from panther.linalg.operand import full_precision

# Coefficients of Muon's polynomial a s + b s^3 + c s^5, whose slope at 0 is steep: five rounds bring the singular
# values from [0.01, 1] to about [0.7, 1.2], which serves as well as 1 does and costs half of the rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = (3, 2)  # before and after the restart
_ALL_ROUNDS = (sum(_ROUNDS),)


def orthogonalize(matrices: Tensor) -> Tensor:
    r"""Return matrices with the same singular vectors and with singular values between 0.6 and 1.3.

    Polynomials of Gram matrices of the smaller side multiply the matrix twice:
    :math:`M\,p_3(M^T M) \to M`, :math:`M\,p_2(M^T M)`. Directions whose singular value is below a hundredth of the
    Frobenius norm become smaller.

    Args:
        matrices: ``(*, m, n)``, any floating dtype.

    Returns:
        A tensor of the same shape and dtype; zero where the matrix is zero.

    Raises:
        ShapeError: If there are fewer than two dimensions.
        DTypeError: If the dtype is not a floating dtype.

    Cost: ``8 m n r + 28 r^3`` flops for each matrix, r = min(m, n), in float32 or wider, without TF32.

    Example:
        >>> import torch
        >>> factor = torch.randn(256, 16) * torch.logspace(0, -1, 16)
        >>> values = torch.linalg.svdvals(orthogonalize(factor))
        >>> bool((values > 0.6).all() and (values < 1.3).all())
        True
    """
    if matrices.dim() < 2:
        raise ShapeError(f"orthogonalize takes matrices (*, m, n), not a tensor of shape {tuple(matrices.shape)}")
    if not matrices.is_floating_point():
        raise DTypeError(f"orthogonalize takes real matrices of a floating dtype, not {matrices.dtype}: convert them")
    if matrices.shape[-2] < matrices.shape[-1]:
        return orthogonalize(matrices.mT).mT
    M = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    with full_precision():
        norms = torch.linalg.matrix_norm(M, keepdim=True)
        M = M / torch.where(norms > 0, norms, 1)
        for rounds in _ROUNDS:
            level, product = _polynomial(M.mT @ M, rounds)
            M = level * M + M @ product
    return M.to(matrices.dtype)


def orthogonalizing_factor(
    S: Tensor,  # (*batch, k, n)
) -> tuple[Tensor, Tensor]:  # (*batch, n, n), (*batch, 1, 1)
    r"""Return Q and norms such that ``(M / norm) @ Q`` is ``orthogonalize(M)`` for each M with the Gram matrix of S.

    Q is symmetric, as a polynomial of the Gram matrix. It is computed in float64, because after a restart in float32
    the factors of Q would commute to 4e-4 only. Float64 matrices need the restart in turn.

    Args:
        S: Float32 or float64, with :math:`S^T S = M^T M`, for example the factor R of a QR factorisation of M.

    Returns:
        Q, and the Frobenius norms, 1 for matrices of zeros; both in the dtype of S.

    Cost: ``2 k n^2 + 30 n^3`` flops in float64.
    """
    rounds_by_phase = _ROUNDS if S.dtype is torch.float64 else _ALL_ROUNDS
    dtype, S = S.dtype, S.double()
    norms = torch.linalg.matrix_norm(S, keepdim=True)
    norms = torch.where(norms > 0, norms, 1)
    S = S / norms
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    Q = eye
    for phase, rounds in enumerate(rounds_by_phase):
        level, product = _polynomial(S.mT @ S, rounds)
        factor = product + level * eye
        Q = Q @ factor if phase else factor
        if phase + 1 < len(rounds_by_phase):
            S = S @ factor
    return Q.to(dtype), norms.to(dtype)


def _polynomial(gram: Tensor, rounds: int) -> tuple[float, Tensor]:
    """Return level and product such that the rounds multiply a matrix of this Gram matrix by (level I + product).

    Without I as a tensor, sharded matrices (DTensors) work too.
    """
    level, product = 1.0, torch.zeros_like(gram)
    for left in range(rounds - 1, -1, -1):
        p = _B * gram + _C * (gram @ gram)  # The term _A I is added below.
        product = level * p + _A * product + product @ p
        level *= _A
        if left:
            twice = p @ gram
            gram = _A**2 * gram + 2 * _A * twice + twice @ p
    return level, product

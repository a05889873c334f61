r"""Orthogonalised matrices by Newton-Schulz iterations, of long matrices by those of their Gram matrix.

A round of the iteration is :math:`X \leftarrow X\,(a I + b\,X^T X + c\,(X^T X)^2)`. In bfloat16, and for matrices that
are nearly square, rounds follow one another. In float32, all rounds together multiply a longer X by a
polynomial of its Gram matrix, so that the longer side occurs in two products only. A Gram matrix has the squares of the
singular values. In float32, values below 1e-3 of the norm are lost in it, while five rounds enlarge them up to 485
times. So the iteration starts again after three rounds, with the Gram matrix of the new X, whose values are 41 times
larger. Results are then wrong by 2e-5 of their norm at most, and by 8e-4 without the restart (condition 1e4, rank
deficient, one large value and many of a thousandth). Dao-AILab's Gram Newton-Schulz restarts for half precision.
"""

__all__ = ["orthogonalize"]

import torch
from torch import Tensor

from panther._process_settings import full_precision
from panther.errors import DTypeError, ShapeError

# Coefficients of Muon's polynomial a s + b s^3 + c s^5, whose slope at 0 is steep: five rounds bring the singular
# values from [0.01, 1] to about [0.7, 1.2], which serves as well as 1 does and costs half of the rounds.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = (3, 2)  # before and after the restart
# From this ratio of the sides, polynomials of the Gram matrix take less time in float32: 0.8 of it at 4, 1.4 at 1.
_LONG = 2


def orthogonalize(matrices: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Return matrices with the same singular vectors and with singular values between 0.6 and 1.3.

    Directions whose singular value is below a hundredth of the Frobenius norm become smaller.

    Args:
        matrices: ``(*, m, n)``, any floating dtype.
        dtype: The dtype of the iteration; None is float32 or wider. In bfloat16 singular values are as good, and
            results differ by 1 to 4 % of their norm, of matrices of condition 1e4 by 6 to 12 %.

    Returns:
        A tensor of the same shape and dtype; zero where the matrix is zero.

    Raises:
        ShapeError: If there are fewer than two dimensions.
        DTypeError: If the dtype is not a floating dtype.

    Cost: about ``20 m n r + 10 r^3`` flops for each matrix, r = min(m, n); of long ones in float32
    ``8 m n r + 28 r^3``. Float32 is without TF32.

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
    m, n = matrices.shape[-2:]
    if not matrices.numel():
        return torch.empty_like(matrices)
    wide = torch.promote_types(matrices.dtype, torch.float32)
    X = matrices.to(wide)
    with full_precision():
        # Squares of entries above 1e19 are infinite in float32. After the first division, norms are 0 or at least 1.
        largest = X.abs().amax((-2, -1), keepdim=True)
        X = X / torch.where(largest > 0, largest, 1)
        X = (X / torch.linalg.matrix_norm(X, keepdim=True).clamp_(min=1)).to(dtype or wide)
        stack = (X.mT if m > n else X).reshape(-1, min(m, n), max(m, n))
        if X.dtype == wide and max(m, n) >= _LONG * min(m, n):
            for rounds in _ROUNDS:
                level, product = _polynomial(stack @ stack.mT, rounds)
                stack = level * stack + product @ stack
        else:
            stack = _iterated(stack)
    return (stack.mT if m > n else stack).reshape(matrices.shape).to(matrices.dtype)


def _iterated(X: Tensor) -> Tensor:  # (*, m, n), m <= n
    for _ in range(sum(_ROUNDS)):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), X, beta=_A)
    return X


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

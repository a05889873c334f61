r"""Leading eigenpairs of a symmetric matrix, and Nystroem's approximation of a positive semidefinite one.

Both start from an orthonormal P that spans the block Krylov space :math:`[A\Omega, A^2\Omega, \dots]` and from
:math:`Y = A P`, which is computed with that space. Rayleigh and Ritz take the eigenpairs of :math:`P^T Y`;
Nystroem's :math:`Y (P^T Y)^{-1} Y^T` is closer to a semidefinite A for the same products.
"""

__all__ = ["EighResult", "NystromResult", "nystrom", "randomized_eigh"]

import math
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from panther._docstrings import inherit_arguments
from panther.errors import check_size
from panther.linalg._rangefinder import (
    SearchOptions,
    check_n_iter,
    check_rank,
    krylov_blocks,
    sign_matrix,
)
from panther.linalg.error import ErrorEstimate, estimate_error
from panther.linalg.operand import Operand, driver
from panther.linalg.orthogonal import add_to_basis, core_svd, fix_signs, near_qr, rotate
from panther.linalg.sharded import as_square
from panther.sketch import check_seed


class EighResult(NamedTuple):
    """Truncated eigendecomposition, A about V diag(L) V^T.

    Attributes:
        L: Eigenvalues in descending order of magnitude, ``(*batch, k)``.
        V: Eigenvectors, ``(*batch, n, k)``, orthonormal columns.
    """

    L: Tensor
    V: Tensor

    def __matmul__(self, X: Tensor) -> Tensor:  # (*batch, n, l) -> (*batch, n, l)
        """Return the approximation of A times X."""
        return self.V @ (self.L[..., None] * (self.V.swapaxes(-1, -2) @ X))


class NystromResult(NamedTuple):
    """Positive semidefinite approximation, A about U diag(L) U^T.

    Attributes:
        U: Eigenvectors, ``(*batch, n, k)``, orthonormal columns.
        L: Eigenvalues in descending order, none negative, ``(*batch, k)``.
    """

    U: Tensor
    L: Tensor

    def __matmul__(self, X: Tensor) -> Tensor:  # (*batch, n, l) -> (*batch, n, l)
        """Return the approximation of A times X."""
        return self.U @ (self.L[..., None] * (self.U.swapaxes(-1, -2) @ X))


@overload
def randomized_eigh(A: Any, k: int, **options: Unpack[SearchOptions]) -> EighResult: ...
@overload
def randomized_eigh(
    A: Any, k: int, *, return_error: Literal[True], **options: Unpack[SearchOptions]
) -> tuple[Tensor, Tensor, ErrorEstimate]: ...
@driver
def randomized_eigh(
    A: Any,  # (*batch, n, n)
    k: int,
    *,
    oversample: int = 10,
    n_iter: int | Literal["auto"] = "auto",
    seed: int | None = None,
    return_error: bool = False,
) -> EighResult | tuple[Tensor, Tensor, ErrorEstimate]:
    r"""Compute the k eigenpairs of largest magnitude, of a symmetric :math:`A \approx V \,\mathrm{diag}(L)\, V^T`.

    The sign convention: in each column of V the entry of largest magnitude is positive (the first of equal entries).

    Args:
        A: Symmetric matrix or batch, (\*batch, n, n); kinds, dtypes and errors as for :mod:`panther.linalg`.
        k: Number of eigenpairs, from 0 to n.
        oversample: Dimensions of the search space beyond k, 0 or more.
        n_iter: Number of further blocks of the search space, from 0 to 100; the space is as wide as in
            :func:`~panther.linalg.randomized_svd`. "auto" is 4.
        seed: The seed of the random signs from which the search starts.
        return_error: Whether to return an estimate of :math:`\|A - V L V^T\|_F` as well.

    Returns:
        L (\*batch, k), in descending order of magnitude, and V (\*batch, n, k). With ``return_error`` the tuple of both
        and the estimate.

    Raises:
        ShapeError: If A is not square.
        ValueError: If A is not symmetric.

    Cost: products of A with d columns and one more block, where d is the dimension of the search space, by default
    ``2 (k + oversample)``, rounded up to a multiple of 80.

    Example:
        >>> A = torch.tensor([[0.0, 2.0], [2.0, -3.0]])
        >>> L, V = randomized_eigh(A, 1, seed=0)
        >>> round(L.item(), 4), torch.allclose(A @ V, V * L, atol=1e-5)
        (-4.0, True)

    Reference: Halko, Martinsson and Tropp (2011), section 5.3, doi:10.1137/090771806.
    """
    _, k, seed, P, _, core = _project(A, k, oversample, n_iter, seed)
    values, W = _core_eigh(core)
    order = values.abs().argsort(dim=-1, descending=True, stable=True)[..., :k]
    V = rotate(P, W.gather(-1, order[..., None, :].expand(*W.shape[:-1], k)))
    result = EighResult(values.gather(-1, order), V * fix_signs(V))
    return (*result, estimate_error(A, result, seed=seed)) if return_error else result


@overload
def nystrom(A: Any, k: int, **options: Unpack[SearchOptions]) -> NystromResult: ...
@overload
def nystrom(
    A: Any, k: int, *, return_error: Literal[True], **options: Unpack[SearchOptions]
) -> tuple[Tensor, Tensor, ErrorEstimate]: ...
@inherit_arguments(randomized_eigh)
@driver
def nystrom(
    A: Any,  # (*batch, n, n)
    k: int,
    *,
    oversample: int = 10,
    n_iter: int | Literal["auto"] = "auto",
    seed: int | None = None,
    return_error: bool = False,
) -> NystromResult | tuple[Tensor, Tensor, ErrorEstimate]:
    r"""Approximate a positive semidefinite matrix, :math:`A \approx U \,\mathrm{diag}(L)\, U^T`.

    The k leading eigenpairs of :math:`Y (P^T Y)^{-1} Y^T`, computed with a shift :math:`\nu = 2 \epsilon \|P^T Y\|` (or
    more, where A is semidefinite only to rounding) that is subtracted again, so that the inverse exists.

    Args:
        A: Positive semidefinite matrix or batch, (\*batch, n, n); kinds, dtypes and errors as for
            :mod:`panther.linalg`.
        return_error: Whether to return an estimate of :math:`\|A - U L U^T\|_F` as well.

    Returns:
        U (\*batch, n, k) and L (\*batch, k), descending and nonnegative. With ``return_error`` the tuple of both and
        the estimate.

    Raises:
        ValueError: If A is not symmetric, or not semidefinite on the search space.

    Cost: as :func:`~panther.linalg.randomized_eigh`, and a QR factorisation of an (n, d) matrix.

    Example:
        >>> X = torch.arange(6.0).reshape(3, 2)
        >>> U, L = nystrom(X @ X.T, 2, seed=0)
        >>> torch.allclose(U @ torch.diag(L) @ U.T, X @ X.T, atol=1e-4)
        True

    Reference: Tropp, Yurtsever, Udell and Cevher (2017), algorithm 3, arXiv:1706.05736.
    """
    operand, k, seed, P, Y, core = _project(A, k, oversample, n_iter, seed)
    values, W = _core_eigh(core)
    eps = torch.finfo(core.dtype).eps
    smallest, largest = (
        values[..., :1].clamp_max(0),
        values.abs().amax(-1, keepdim=True) if values.numel() else values[..., :1],
    )
    if bool((smallest < -max(100 * eps, operand.eps) * largest).any()):
        raise ValueError(
            f"A must be positive semidefinite and has an eigenvalue of {float(smallest.min()):.3g} or less: use "
            f"randomized_eigh, or add a multiple of the identity"
        )
    shift = torch.maximum(2 * eps * largest, -2 * smallest).clamp_min(torch.finfo(core.dtype).tiny)
    root = (values + shift).clamp_min(shift / 2).sqrt()
    Q, T, R = near_qr((Y + shift[..., None] * P) @ W / root[..., None, :])
    left, S, _ = core_svd(R)
    U = rotate(Q, T @ left[..., :k])
    result = NystromResult(U * fix_signs(U), (S.square() - shift).clamp_min(0)[..., :k])
    return (*result, estimate_error(A, result, seed=seed)) if return_error else result


def _project(
    A: Any, k: int, oversample: int, n_iter: int | str, seed: int | None
) -> tuple[Operand, int, int, Tensor, Tensor, Tensor]:
    """Return checked arguments, the orthonormal P, its image Y = A P, and the symmetric P^T Y."""
    operand = as_square(A)
    n = operand.shape[-1]
    k = check_rank(k, operand)
    width = k + check_size("oversample", oversample, least=0)
    block, blocks = krylov_blocks(width, check_n_iter(n_iter))
    seed = operand.ranks.seed(check_seed(seed))
    if block * blocks >= n:
        P = operand.eye()
        Y = operand.matmul(P)
    else:
        X = operand.matmul(sign_matrix(operand, block, seed))
        operand.check_finite(X)
        P, Y = _krylov_basis(operand, X, blocks)
    core = P.mT @ Y
    operand.check_finite(core)
    largest = core.abs().amax((-2, -1), keepdim=True) if core.numel() else 0
    if bool(((core - core.mT).abs() > math.sqrt(torch.finfo(core.dtype).eps) * largest).any()):
        raise ValueError("A must be symmetric: use (A + A.mT) / 2, or randomized_svd")
    return operand, k, seed, P, Y, (core + core.mT) / 2


def _krylov_basis(operand: Operand, X: Tensor, blocks: int) -> tuple[Tensor, Tensor]:  # X (*batch, n, b)
    """Return an orthonormal basis P of the space of X, A X, A^2 X, ..., in blocks, and its image ``A P``."""
    *batch, n, b = X.shape
    # Column-major, so that the basis so far is contiguous.
    P, Y = (X.new_empty(*batch, b * blocks, n).mT for _ in range(2))
    for start in range(0, b * blocks, b):
        new = slice(start, start + b)
        P[..., new] = add_to_basis(X, P[..., :start])
        Y[..., new] = X = operand.matmul(P[..., new])
    return P, Y


def _core_eigh(core: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of a small matrix, computed in float64, as in :func:`core_svd`."""
    values, W = torch.linalg.eigh(core.double())
    if not bool(values.to(core.dtype).isfinite().all()):
        raise ValueError(f"eigenvalues of A overflow {core.dtype}: divide A by its largest entry, or use float64")
    return values.to(core.dtype), W.to(core.dtype)

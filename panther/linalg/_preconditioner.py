"""Preconditioners for least squares: N with A N nearly orthonormal, from a factorisation of A or of its sketch.

Right-hand sides, iterates and gradients are rows, (p, n), the layout whose products are fast.
"""

__all__ = ["Preconditioner", "condition", "diagonal", "from_columns", "from_gram", "from_rows"]

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_POWERS = 5
# Up to this condition of A with columns of length one, the rounding of A^T A, in float64, leaves a preconditioner with
# which every iteration gains three digits or more.
_LARGEST_SQUARED_CONDITION = {torch.float64: 1e6, torch.float32: 1e4}


@dataclass(frozen=True)
class Preconditioner:
    """N = ``V R^-1``, for orthonormal columns V (n, r), None for the identity.

    Attributes:
        R: Upper triangular, (r, r), or the diagonal of a diagonal matrix, (r,).
        frobenius: Norm of A or its sketch, without the ridge that the norm of R includes.
        condition: The condition of R.
    """

    R: Tensor
    frobenius: float
    condition: float
    V: Tensor | None = None

    @property
    def size(self) -> float:
        """The Frobenius norm of R."""
        return float(self.R.norm())

    def to_x(self, y: Tensor) -> Tensor:  # (p, r) -> (p, n)
        """Return ``N y``."""
        y = y / self.R if self.R.ndim == 1 else _solve_rows(self.R.mT, y, upper=False)
        return y if self.V is None else y @ self.V.mT

    def to_y(self, gradient: Tensor) -> Tensor:  # (p, n) -> (p, r)
        """Return ``N^T gradient``."""
        return self._solved(self.R, gradient)

    def damped_norm(self, gradient: Tensor, shift: float) -> Tensor:  # (p, n) -> (p,)
        r"""Return the norms of :math:`(R^T R + \text{shift}^2 I)^{-1/2} V^T` times the gradients."""
        if self.R.ndim == 1:
            root = self.R.square().add(shift**2).sqrt()
        else:
            identity = torch.eye(len(self.R), dtype=self.R.dtype, device=self.R.device)
            root = torch.linalg.qr(torch.cat((self.R, shift * identity)), mode="r").R
        norms: Tensor = self._solved(root, gradient).norm(dim=1)
        return norms

    def _solved(self, R: Tensor, gradient: Tensor) -> Tensor:  # (p, n) -> (p, r)
        gradient = gradient if self.V is None else gradient @ self.V
        return gradient / R if R.ndim == 1 else _solve_rows(R, gradient)


def diagonal(s: Tensor, frobenius: float, V: Tensor | None = None) -> Preconditioner:
    """Return ``V diag(1 / s)``."""
    return Preconditioner(s, frobenius, float(s.max() / s.min()) if len(s) else 1.0, V)


def from_columns(A: Tensor, b: Tensor, root: float, seed: int) -> tuple[Preconditioner, Tensor, Tensor | None]:
    """Return preconditioner and solution (p, n) for a tall A, by QR of A below ``root`` times the identity.

    The third result is the norm of ``b - A x``, (p,), or None with a ridge or if A is rank-deficient.

    The identity stands above A, because Householder's reflections lose small rows that follow large ones in rounding.
    """
    n, frobenius = A.shape[1], float(A.norm()) if root else None
    if root:
        A = torch.cat((root * torch.eye(n, dtype=A.dtype, device=A.device), A))
        b = torch.cat((b.new_zeros(n, b.shape[1]), b))
    # LAPACK is column-major, and torch's copy into that layout takes up to 5 times as long.
    factor, tau = torch.geqrf(A.mT.contiguous().mT)
    c = torch.ormqr(factor, tau, b, transpose=True)
    R = factor[:n].mT.tril().mT
    N, x = _from_triangle(R, c[:n], float(R.norm()) if frobenius is None else frobenius, seed)
    return N, x, None if root or N.V is not None else c[n:].norm(dim=0)


def from_gram(
    gram: Tensor, product: Tensor, root: float, seed: int, dtype: torch.dtype
) -> tuple[Preconditioner, Tensor] | None:  # gram (n, n), product (n, p), both float64
    """Return preconditioner and solution (p, n) from ``A^T A`` and ``A^T b``, or None if A is too badly conditioned.

    The columns of A are scaled to length one first, which comes within a factor of sqrt(n) of the least condition that
    any scaling gives (A. van der Sluis, Numer. Math. 14, 1969, doi:10.1007/BF02165096).
    """
    frobenius = float(gram.diagonal().sum().sqrt())
    scales = (gram.diagonal() + root**2).sqrt()
    if not bool((scales.isfinite() & (scales > 0)).all()):
        return None
    scaled = gram / scales[:, None] / scales
    scaled.diagonal().fill_(1.0)
    R, info = torch.linalg.cholesky_ex(scaled, upper=True)
    if int(info) or not condition(R, seed) < _LARGEST_SQUARED_CONDITION[dtype]:
        return None
    R = R * scales
    if not (estimate := condition(R, seed)) < 0.1 / _rank_tolerance(len(R), dtype):
        return None
    N = Preconditioner(R.to(dtype), frobenius, estimate)
    return N, torch.cholesky_solve(product, R, upper=True).mT.to(dtype).contiguous()


def from_rows(A: Tensor, b: Tensor, root: float) -> tuple[Preconditioner, Tensor]:
    """Return preconditioner and solution for a wide A, by QR of its transpose and a singular value decomposition."""
    Q, R = torch.linalg.qr(A.mT)
    U, s, Vh = torch.linalg.svd(R)  # A = Vh.T diag(s) (Q U).T
    damped = torch.hypot(s, torch.full_like(s, root))
    is_significant = damped > _rank_tolerance(len(s), s.dtype) * damped[0]
    V, s, damped = (Q @ U)[:, is_significant], s[is_significant], damped[is_significant]
    return diagonal(damped, float(A.norm()), V), (b.mT @ Vh.mT[:, is_significant] * (s / damped) / damped) @ V.mT


def _rank_tolerance(n: int, dtype: torch.dtype) -> float:
    """Return the fraction of the largest singular value below which a singular value counts as rounding error."""
    return 4 * math.sqrt(n) * torch.finfo(dtype).eps


def _from_triangle(R: Tensor, c: Tensor, frobenius: float, seed: int) -> tuple[Preconditioner, Tensor]:
    """Return the preconditioner from R (n, n), and the least-norm solution (p, n) of ``R x = c``, c (n, p)."""
    tolerance = _rank_tolerance(len(R), R.dtype)
    if (estimate := condition(R, seed)) < 0.1 / tolerance:
        return Preconditioner(R, frobenius, estimate), torch.linalg.solve_triangular(R, c, upper=True).mT.contiguous()
    U, s, Vh = torch.linalg.svd(R)
    rank = int((s > tolerance * s[0]).sum())
    N = diagonal(s[:rank], frobenius, Vh[:rank].mT)
    return N, N.to_x(c.mT @ U[:, :rank])


def condition(R: Tensor, seed: int) -> float:
    """Estimate the condition of R, seldom by less than a third of it, by power and inverse power iteration."""
    if not bool((R.diagonal() != 0).all()):
        return math.inf
    generator = torch.Generator().manual_seed(seed)
    large = small = torch.randn(len(R), 4, generator=generator, dtype=torch.float64, device="cpu").to(R)
    for _ in range(_POWERS):
        large = R.mT @ _unit(R @ large)
        small = torch.linalg.solve_triangular(R.mT, _unit(small), upper=False)
        small = torch.linalg.solve_triangular(R, _unit(small), upper=True)
    estimate = float(large.norm(dim=0).max()) * float(small.norm(dim=0).max())
    return estimate if math.isfinite(estimate) else math.inf


def _solve_rows(R: Tensor, rows: Tensor, upper: bool = True) -> Tensor:  # (n, n), (p, n) -> (p, n)
    """Return ``rows R^{-1}``, computed as columns: up to 8 times as fast for few rows (MKL on AMD)."""
    solution: Tensor = torch.linalg.solve_triangular(R.mT, rows.mT, upper=not upper).mT
    return solution


def _unit(columns: Tensor) -> Tensor:
    directions: Tensor = columns / columns.norm(dim=0)
    return directions

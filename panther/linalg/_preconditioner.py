"""Preconditioners for least squares: N with A N nearly orthonormal, from a factorisation of A or of its sketch.

Right-hand sides, iterates and gradients are rows, (p, n), the layout whose products are fast.
"""

__all__ = ["Preconditioner", "Spectral", "Triangular", "from_columns", "from_rows"]

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from panther.sketch import GaussianSketch


@dataclass(frozen=True)
class Triangular:
    """N, the inverse of an upper triangular R of shape (n, n)."""

    R: Tensor
    frobenius: float  # of A, or its sketch; that of R has the ridge too
    condition: float

    @property
    def size(self) -> float:
        """The Frobenius norm of R."""
        return float(self.R.norm())

    def to_x(self, y: Tensor) -> Tensor:  # (p, n) -> (p, n)
        """Return ``N y``."""
        return torch.linalg.solve_triangular(self.R.mT, y, upper=False, left=False)

    def to_y(self, gradient: Tensor) -> Tensor:  # (p, n) -> (p, n)
        """Return ``N^T gradient``."""
        return torch.linalg.solve_triangular(self.R, gradient, upper=True, left=False)

    def damped_norm(self, gradient: Tensor, shift: float) -> Tensor:  # (p, n) -> (p,)
        r"""Return the norms of :math:`(R^T R + \text{shift}^2 I)^{-1/2}` times the gradients."""
        identity = torch.eye(len(self.R), dtype=self.R.dtype, device=self.R.device)
        root = torch.linalg.qr(torch.cat((self.R, shift * identity)), mode="r").R
        return torch.linalg.solve_triangular(root, gradient, upper=True, left=False).norm(dim=1)


@dataclass(frozen=True)
class Spectral:
    """N = ``V diag(1 / s)``, of shape (n, r): the inverse of R on the row space that V spans."""

    V: Tensor
    s: Tensor
    frobenius: float  # of A, or its sketch; that of R has the ridge too

    @property
    def condition(self) -> float:
        """Largest over smallest of s."""
        return float(self.s[0] / self.s[-1]) if len(self.s) else 1.0

    @property
    def size(self) -> float:
        """The Frobenius norm of R."""
        return float(self.s.norm())

    def to_x(self, y: Tensor) -> Tensor:  # (p, r) -> (p, n)
        """Return ``N y``."""
        return (y / self.s) @ self.V.mT

    def to_y(self, gradient: Tensor) -> Tensor:  # (p, n) -> (p, r)
        """Return ``N^T gradient``."""
        return (gradient @ self.V) / self.s

    def damped_norm(self, gradient: Tensor, shift: float) -> Tensor:  # (p, n) -> (p,)
        r"""Return the norms of :math:`(R^T R + \text{shift}^2 I)^{-1/2}` times the gradients, in the row space."""
        return ((gradient @ self.V) / self.s.square().add(shift**2).sqrt()).norm(dim=1)


Preconditioner = Triangular | Spectral


def from_columns(A: Tensor, b: Tensor, root: float, seed: int) -> tuple[Preconditioner, Tensor, Tensor | None]:
    """Return preconditioner and solution (p, n) for a tall A, by QR with ``root`` times the identity above A.

    The third result is the norm of ``b - A x``, (p,), where it can be read off: without a ridge and at full rank.

    Above, not below: rows that are larger come first, or Householder's reflections lose the others in rounding.
    """
    n, frobenius = A.shape[1], float(A.norm())
    if root:
        A = torch.cat((root * torch.eye(n, dtype=A.dtype, device=A.device), A))
        b = torch.cat((b.new_zeros(n, b.shape[1]), b))
    factor, tau = torch.geqrf(A)
    rotated = torch.ormqr(factor, tau, b, transpose=True)
    N, x = _from_triangle(factor[:n].triu(), rotated[:n], frobenius, seed)
    return N, x, None if root or isinstance(N, Spectral) else rotated[n:].norm(dim=0)


def from_rows(A: Tensor, b: Tensor, root: float) -> tuple[Preconditioner, Tensor]:
    """Return both for a wide A, by QR of its transpose and a singular value decomposition."""
    Q, R = torch.linalg.qr(A.mT)
    U, s, Vh = torch.linalg.svd(R)  # A = Vh.T diag(s) (Q U).T
    damped = torch.hypot(s, torch.full_like(s, root))
    kept = damped > _rank_tolerance(len(s), s.dtype) * damped[0]
    V, s, damped = (Q @ U)[:, kept], s[kept], damped[kept]
    return Spectral(V, damped, float(A.norm())), (b.mT @ Vh.mT[:, kept] * (s / damped) / damped) @ V.mT


def _rank_tolerance(n: int, dtype: torch.dtype) -> float:
    """Return the fraction of the largest singular value below which others count as rounding errors of QR and SVD."""
    return 4 * math.sqrt(n) * torch.finfo(dtype).eps


def _from_triangle(R: Tensor, c: Tensor, frobenius: float, seed: int) -> tuple[Preconditioner, Tensor]:
    """Return the preconditioner from R (n, n), and the least-norm solution (p, n) of ``R x = c``, c (n, p)."""
    tolerance = _rank_tolerance(len(R), R.dtype)
    condition = _condition(R, seed)
    if condition < 0.1 / tolerance:
        return Triangular(R, frobenius, condition), torch.linalg.solve_triangular(R, c, upper=True).mT.contiguous()
    U, s, Vh = torch.linalg.svd(R)
    rank = int((s > tolerance * s[0]).sum())
    N = Spectral(Vh[:rank].mT, s[:rank], frobenius)
    return N, N.to_x(c.mT @ U[:, :rank])


def _condition(R: Tensor, seed: int) -> float:
    """Bound the condition of R from below, seldom by less than a third, by power and inverse power iteration."""
    if not bool((R.diagonal() != 0).all()):
        return math.inf
    large = small = GaussianSketch(4, len(R), seed=seed, stream=1, dtype=R.dtype, device=R.device).dense()
    for _ in range(5):
        large = _unit(large @ R.mT) @ R
        small = _unit(torch.linalg.solve_triangular(R, _unit(small), upper=True, left=False))
        small = torch.linalg.solve_triangular(R.mT, small, upper=False, left=False)
        growth = float(large.norm(dim=1).max()), float(small.norm(dim=1).max())
    return math.prod(growth) if math.isfinite(math.prod(growth)) else math.inf


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)

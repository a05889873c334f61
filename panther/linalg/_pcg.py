r"""Positive definite systems with many right-hand sides, by preconditioned conjugate gradients."""

__all__ = ["NystromPreconditioner", "PCGResult", "nystrom_preconditioner", "pcg"]

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panther.errors import NumericalWarning, ShapeError, check_size
from panther.linalg._eigh import NystromResult, nystrom
from panther.linalg._lstsq import right_hand_side, scaled_columns
from panther.linalg._rp_cholesky import RPCholeskyResult
from panther.linalg.operand import check_finite, check_number, check_penalty, driver, times_two_to
from panther.linalg.sharded import as_square

# Conjugate gradients start again from the true residual if they have reduced it to this fraction.
_WORTHWHILE = 0.5


@dataclass(frozen=True)
class NystromPreconditioner:
    r"""The inverse of :math:`P = U\,\mathrm{diag}(L)\,U^T + t\,(I - U U^T) + \mu I`, which ``@`` applies.

    Attributes:
        U: Eigenvectors, ``(n, k)``, orthonormal columns.
        L: Eigenvalues in descending order, ``(k,)``.
        tail: The number t in the place of all other eigenvalues.
        shift: The number :math:`\mu`.
    """

    U: Tensor
    L: Tensor
    tail: float
    shift: float

    def __matmul__(self, X: Tensor) -> Tensor:  # (n, l) -> (n, l)
        """Return ``P^-1 X``."""
        return self.power(-1.0, X)

    def power(self, exponent: float, X: Tensor) -> Tensor:  # (n, l) -> (n, l)
        """Return ``P^exponent X``."""
        outside = (self.tail + self.shift) ** exponent
        weights = (self.L + self.shift) ** exponent - outside
        product: Tensor = outside * X + self.U @ (weights[:, None] * (self.U.mT @ X))
        return product

    def logdet(self) -> float:
        """Return the logarithm of the determinant of P."""
        n, k = self.U.shape
        return float((self.L.double() + self.shift).log().sum()) + (n - k) * math.log(self.tail + self.shift)


class PCGResult(NamedTuple):
    """The solution of a positive definite system.

    Attributes:
        x: The solution, (n,) or (n, p) as b is (n,) or (n, p).
        residual_norm: ``||b - (A + shift I) x||`` of each right-hand side, computed from x, () or (p,).
        iterations: Number of steps; of the right-hand side that needed the most.
    """

    x: Tensor
    residual_norm: Tensor
    iterations: int


@driver
def nystrom_preconditioner(A: Any, rank: int, shift: float = 0.0, *, seed: int | None = None) -> NystromPreconditioner:
    r"""Return a preconditioner for :func:`~panther.linalg.pcg` with :math:`A + \text{shift}\,I`, A semidefinite.

    It is :math:`U (\mathrm{diag}(L) + \mu I)^{-1} U^T + (L_k + \mu)^{-1} (I - U U^T)`, with the eigenpairs of a Nyström
    approximation and :math:`\mu` the shift. If few eigenvalues are above the shift and ``rank`` is more, pcg takes few
    steps.

    Args:
        A: Positive semidefinite matrix (n, n) of any kind that :mod:`panther.linalg` takes, or a result of
            :func:`~panther.linalg.rp_cholesky` or :func:`~panther.linalg.nystrom`.
        rank: Number of eigenpairs, from 1 to n; a result may have fewer.
        shift: The number that the system adds to the diagonal of A, 0 or more.
        seed: The seed of the random signs; None draws one from torch's default CPU generator.

    Raises:
        ValueError: If A is not symmetric or not semidefinite, ``shift`` is negative, or A + shift I is singular.

    Cost: about ``2 rank`` products of A with a vector (none for a result) and ``6 n rank^2`` flops; to apply it
    ``4 n rank`` for each vector.

    Example:
        >>> A, b = torch.diag(torch.arange(1.0, 501.0) ** -2), torch.ones(500)
        >>> M = nystrom_preconditioner(A, 50, 1e-4, seed=0)
        >>> plain = pcg(A, b, shift=1e-4, tol=1e-3).iterations
        >>> pcg(A, b, M, shift=1e-4, tol=1e-3).iterations < plain / 3
        True

    Reference: Frangella, Tropp and Udell (2023), "Randomized Nyström preconditioning", arXiv:2110.02820.
    """
    shift, rank = check_penalty("shift", shift), check_size("rank", rank, least=1)
    if isinstance(A, RPCholeskyResult):
        U, sizes, _ = torch.linalg.svd(torch.as_tensor(A.F), full_matrices=False)
        A = NystromResult(U, sizes.square())
    elif not isinstance(A, NystromResult):
        A = nystrom(A, rank, oversample=0, n_iter=0, seed=seed)
    A = NystromResult(*map(torch.as_tensor, A))  # which are arrays if A was one
    if A.U.ndim != 2:
        raise ShapeError(f"A is a batch, and its U has the shape {tuple(A.U.shape)}: pass one matrix at a time")
    U, L = A.U[:, :rank], A.L[:rank]
    tail = float(L[-1]) if len(L) else 0.0
    if not tail + shift > 0:
        raise ValueError(
            f"A + shift I must be positive definite, and eigenvalue {len(L)} of A is 0: use a shift above {shift} or a "
            f"rank below {rank}"
        )
    return NystromPreconditioner(U, L, tail, shift)


@driver
def pcg(
    A: Any, b: Any, preconditioner: Any = None, *, shift: float = 0.0, tol: float = 1e-6, max_iter: int | None = None
) -> PCGResult:
    r"""Solve :math:`(A + \text{shift}\,I)\,x = b` for a positive definite matrix, known by its products.

    Conjugate gradients for each right-hand side, which share the products with A. They stop by the residual of x: where
    rounding makes it larger than the residual of the recursion, they start again from x.

    Args:
        A: Symmetric matrix (n, n) of any kind that :mod:`panther.linalg` takes. ``.T`` is not needed.
        b: One right-hand side (n,), or p of them (n, p), with A's dtype and device.
        preconditioner: A positive definite matrix, near the inverse of A + shift I, or any object that multiplies
            residuals (n, p) by it with ``@``, such as :func:`~panther.linalg.nystrom_preconditioner` returns.
        shift: The number that is added to the diagonal of A, 0 or more.
        tol: Largest norm of the residual, relative to the norm of b, in (0, 1).
        max_iter: Largest number of steps; None is ``10 n``.

    Raises:
        ValueError: If A + shift I or the preconditioner is not positive definite, or ``shift`` or ``tol`` is out of
            range.

    Warns:
        NumericalWarning: If a residual stays above the tolerance.

    Cost: in each step, products of A and of the preconditioner with a vector for each right-hand side that is not
    solved; some :math:`\sqrt\kappa\,\log(2 / \text{tol}) / 2` steps, :math:`\kappa` the condition number of the
    preconditioned matrix. Memory: ``8 n p`` numbers.

    Example:
        >>> A = torch.diag(torch.arange(1.0, 101.0))
        >>> x, residual_norm, iterations = pcg(A, torch.ones(100))
        >>> torch.allclose(A @ x, torch.ones(100), atol=1e-4)
        True

    Reference: Hestenes and Stiefel (1952), doi:10.6028/jres.049.044.
    """
    operand = as_square(A, batched=False)
    b, shift = right_hand_side(b, operand), check_penalty("shift", shift)
    check_finite("b", b)
    tol = check_number("tol", tol, "positive and below 1", lambda number: 0 < number < 1, "1e-6")
    max_iter = 10 * len(b) if max_iter is None else check_size("max_iter", max_iter, least=0)
    columns, powers = scaled_columns(b[:, None] if b.ndim == 1 else b)

    def multiply(X: Tensor) -> Tensor:
        Y = operand.matmul(X) + shift * X
        operand.check_finite(Y)
        return Y

    x, norms, steps = torch.zeros_like(columns), columns.norm(dim=0), 0
    residual, targets = columns.clone(), tol * norms
    active = (norms > targets).nonzero()[:, 0]
    while len(active) and steps < max_iter:
        start = residual[:, active]
        correction, new_steps = _conjugate_gradients(
            multiply, preconditioner, start, targets[active] / 2, max_iter - steps
        )
        candidate, steps = x[:, active] + correction, steps + new_steps
        start = columns[:, active] - multiply(candidate)
        new_norms = start.norm(dim=0)
        is_better = new_norms < norms[active]
        continues = (new_norms > targets[active]) & (new_norms < _WORTHWHILE * norms[active])
        better, active = active[is_better], active[continues]
        x[:, better], residual[:, better], norms[better] = (
            part[..., is_better] for part in (candidate, start, new_norms)
        )
    if bool((norms > targets).any()):
        worst = float((norms / columns.norm(dim=0)).nan_to_num(0).max())
        warnings.warn(
            f"after {steps} steps the residual is {worst:.1e} of b, and tol={tol:.1e}: use a preconditioner, a larger "
            "shift, tol or max_iter, or float64",
            NumericalWarning,
            stacklevel=3,  # names the caller of the driver
        )
    x, norms = times_two_to(x, powers), times_two_to(norms, powers)
    return PCGResult(x[:, 0], norms[0], steps) if b.ndim == 1 else PCGResult(x, norms, steps)


def _conjugate_gradients(
    multiply: Callable[[Tensor], Tensor], M: Any, residual: Tensor, targets: Tensor, max_iter: int
) -> tuple[Tensor, int]:
    """Return solutions and the number of steps; residuals, by recursion, are at most the targets."""
    solution = x = P = torch.zeros_like(residual)
    active, rho = torch.arange(len(targets), device=residual.device), torch.ones_like(targets)
    for step in range(max_iter + 1):
        unsolved = (residual.norm(dim=0) > targets[active]) & (step < max_iter)
        if not bool(unsolved.all()):
            solution[:, active[~unsolved]] = x[:, ~unsolved]
            active, x, residual, P, rho = (part[..., unsolved] for part in (active, x, residual, P, rho))
        if not len(active):
            break
        Z = residual if M is None else M @ residual
        if Z.shape != residual.shape:
            raise ShapeError(f"preconditioner @ X must have the shape of X, {tuple(residual.shape)}, not {Z.shape}")
        previous_rho, rho = rho, _positive((residual * Z).sum(0), "preconditioner", "make it from A and this shift")
        P = Z + P * (rho / previous_rho)
        AP = multiply(P)
        alpha = rho / _positive((P * AP).sum(0), "A + shift I", "raise the shift, or use sketch_lstsq")
        x, residual = x + P * alpha, residual - AP * alpha
    return solution, step


def _positive(products: Tensor, name: str, fix: str) -> Tensor:
    if not bool((products > 0).all()):
        raise ValueError(f"{name} must be positive definite and has x^T M x = {float(products.min()):.3g}: {fix}")
    return products

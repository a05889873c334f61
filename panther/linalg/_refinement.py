r"""Least squares with a preconditioner: the products of one pass over A, and the iteration that uses them.

With N such that the singular values of A N are near one, conjugate gradients on the preconditioned normal equations
:math:`N^T (A^T A + \lambda I) N y = N^T (A^T r - \lambda x)` gain a constant factor per step for any condition of A.
They run on vectors of length n only: a step visits A once, a panel of rows at a time, and multiplies by the panel and
by its transpose while it is in cache. Rounding errors grow with the condition of A, so the iteration restarts
from the true residual and corrects x, until the backward error is as small as a direct solver's: Epperly, Meier and
Nakatsukasa (2024), arXiv:2406.03468.

Right-hand sides and iterates are rows here, (p, n), the layout whose products are fast.
"""

__all__ = ["MAX_STEPS", "Solution", "System", "refine", "smallest_singular_value", "solve_quickly"]

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from panther.linalg._preconditioner import Preconditioner
from panther.linalg.operand import Operand
from panther.sketch import GaussianSketch

# Bytes of a panel for each thread. It is still in the cache when its transpose multiplies. For several right-hand sides
# panels are larger, because the gain is small and a threaded product of matrices costs more to start.
_PANEL_BYTES = 1 << 20
_PANEL_BYTES_OF_MANY = 1 << 23
MAX_STEPS = 1000
# Steps after which the speed of convergence is estimated, and the norm of an error that shows a null space, in which a
# normal vector has a smaller component with a probability of 8e-4.
_PILOT, _NULL = 3, 1e-3


class System:
    """A, b and the ridge, with the two products that each take one pass over A."""

    def __init__(self, operand: Operand, b: Tensor, ridge: float) -> None:  # b (m, p)
        self.operand, self.b, self.ridge = operand, b, ridge
        m, n = operand.shape
        panel = torch.get_num_threads() * (_PANEL_BYTES if b.shape[1] == 1 else _PANEL_BYTES_OF_MANY)
        rows = max(16, panel // (max(n, b.shape[1], 1) * b.element_size()))
        rows = rows if b.device.type == "cpu" else max(m, 1)
        self._panels = [slice(start, start + rows) for start in range(0, m, rows)]

    def residual(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (p, n) -> (p, n), (p,)
        """Return ``A^T r - ridge x`` with ``r = b - A x``, and the norms of r."""
        A = self.operand.dense
        if A is None:
            r = self.b - self.operand.matmul(x.mT)
            return self.operand.rmatmul(r).mT - self.ridge * x, r.norm(dim=0)
        gradient, squares = -self.ridge * x, x.new_zeros(x.shape[0])
        for rows in self._panels:
            r = torch.addmm(self.b[rows].mT, x, A[rows].mT, alpha=-1)
            gradient.addmm_(r, A[rows])
            squares += r.square().sum(dim=1)
        return gradient, squares.sqrt()

    def gram(self, x: Tensor) -> Tensor:  # (p, n) -> (p, n)
        """Return ``(A^T A + ridge I) x``."""
        A = self.operand.dense
        if A is None:
            return self.operand.rmatmul(self.operand.matmul(x.mT)).mT + self.ridge * x
        out = self.ridge * x
        for rows in self._panels:
            out.addmm_(x @ A[rows].mT, A[rows])
        return out


@dataclass(frozen=True)
class Solution:
    """The result of the iteration; rows are right-hand sides."""

    x: Tensor  # (p, n)
    residual_norm: Tensor  # (p,)
    objective: Tensor  # (p,), square root of the objective
    gradient: Tensor  # (p, n), A^T r - ridge x
    distance: Tensor  # (p,), the norm of N^T times the gradient, which is about the norm of A (x - x*)
    steps: int
    excess: float  # largest backward error of the rows not within tol, in units of eps; 1 or less is accurate


def refine(system: System, N: Preconditioner, x: Tensor, tol: float, stages: int = 10) -> Solution:
    r"""Correct x from its true residual until it is accurate enough, or rounding prevents further improvement.

    A row is done when its distance is at most ``tol`` times the root of its objective, or when the estimate of its
    backward error (Karlson and Walden) with R in place of A,
    :math:`\|(R^T R + \theta^2 I)^{-1/2} A^T r\| / \|x\|` for :math:`\theta = \|r\| / \|x\|`, is at most
    :math:`\epsilon \|A\|_F`, as for direct solvers.
    """
    eps, size = torch.finfo(x.dtype).eps, N.size
    # One stage can reduce the distance to this fraction before its products with N are only rounding.
    reach = max(eps, min(2 * eps * N.condition, 1e-3 * eps**0.2))
    best: Solution | None = None
    steps = stalls = 0
    for stage in range(stages):
        gradient, residual_norm = system.residual(x)
        start = N.to_y(gradient)
        distance, norm = start.norm(dim=1), x.norm(dim=1)
        objective = torch.hypot(residual_norm, math.sqrt(system.ridge) * norm)
        allowed_distance = tol * objective
        # Two bounds of the estimate, in units of eps. The second is smaller if a large ridge determines x.
        excess = torch.minimum(distance / norm / size, gradient.norm(dim=1) / objective / N.frobenius) / eps
        selected = (excess > 1) & (distance > allowed_distance) & (norm > 0)
        for theta, rows in _groups(objective / norm, selected) if stage else ():
            estimate = N.damped_norm(gradient[rows], theta) / norm[rows] / N.frobenius / eps
            excess[rows] = torch.minimum(excess[rows], estimate)
        excess = torch.where(distance > allowed_distance, excess, 0.0)
        solution = Solution(x, residual_norm, objective, gradient, distance, steps, float(excess.max()))
        stalls = stalls + 1 if best is not None and solution.excess > best.excess / 2 else 0
        if best is None or solution.excess <= best.excess:
            best = solution
        if solution.excess <= 1 or stalls == 2 or steps >= MAX_STEPS or stage == stages - 1:
            break
        # The residual after a stage is spread evenly over all directions, so its norm is relevant.
        enough = 0.1 * eps * torch.maximum(size * norm, N.frobenius / size * objective)
        enough = torch.maximum(enough, 0.5 * allowed_distance)
        target = torch.where(excess > 1, torch.maximum(enough, reach * distance), distance)
        y, new_steps = _conjugate_gradients(system, N, start, target, MAX_STEPS - steps)
        x, steps = x + N.to_x(y), steps + new_steps
    assert best is not None
    return best


def _groups(theta: Tensor, selected: Tensor) -> list[tuple[float, Tensor]]:
    """Group the selected rows by theta within a factor of 8. Return the least theta and the rows of each group."""
    rows = selected.nonzero()[:, 0]
    octave = (theta[rows].log2() / 3).floor()
    return [(float(theta[part].min()), part) for value in octave.unique() if len(part := rows[octave == value])]


def solve_quickly(system: System, N: Preconditioner, tol: float, goal: float, limit: int, seed: int) -> Solution | None:
    """Solve to ``tol``, first to a relative ``goal``; None if A is deficient or more than ``limit`` steps are needed.

    A random vector is recovered from its product in the same passes. Its error after a few steps predicts how many more
    steps a solution takes, and at the end it contains the null space of A, where x would not have least norm.
    """
    n = system.operand.shape[1]
    # Normal, because a vector of signs is orthogonal to the difference of two columns every second time.
    probe = GaussianSketch(1, n, seed=seed, stream=3, dtype=system.b.dtype, device=system.b.device).dense()
    gradient, _ = system.residual(system.b.new_zeros(system.b.shape[1], n))
    start = N.to_y(torch.cat((gradient, system.gram(N.to_x(probe)))))
    target = start.norm(dim=1) * goal
    target[-1] = 0.1 * _NULL * start[-1].norm() / math.sqrt(n)

    def is_quick(y: Tensor) -> bool:
        error = float((y[-1] - probe[0]).norm()) / math.sqrt(n)
        return error < goal or _PILOT * math.log(goal) >= limit * math.log(min(error, 1.0))

    y, steps = _conjugate_gradients(system, N, start, target, limit, is_quick)
    if not float((y[-1] - probe[0]).norm()) < _NULL:
        return None
    solution = refine(system, N, N.to_x(y[:-1]), tol)
    return replace(solution, steps=solution.steps + steps) if solution.excess <= 1 else None


def _conjugate_gradients(
    system: System,
    N: Preconditioner,
    residual: Tensor,
    target: Tensor,
    limit: int,
    is_quick: Callable[[Tensor], bool] = lambda y: True,
) -> tuple[Tensor, int]:
    """Solve ``N^T (A^T A + ridge I) N y = residual`` by rows, to the norms in ``target``; return y and the steps.

    It stops after ``_PILOT`` steps unless ``is_quick(y)``.
    """
    y, direction, square = torch.zeros_like(residual), residual, residual.square().sum(dim=1)
    step = 0
    while step < limit and bool((active := square > target.square()).any()):
        product = N.to_y(system.gram(N.to_x(direction)))
        length = torch.where(active, square / (direction * product).sum(dim=1), 0.0)[:, None]
        y = y + length * direction
        residual = residual - length * product
        previous_square, square = square, residual.square().sum(dim=1)
        direction = residual + torch.where(active, square / previous_square, 0.0)[:, None] * direction
        step += 1
        if step == _PILOT and not is_quick(y):
            break
    return y, step


def smallest_singular_value(system: System, N: Preconditioner, seed: int, failure: float) -> float:
    r"""Bound the smallest singular value of ``A N`` from below, wrong with at most the probability ``failure``.

    It is 0 if no bound is found. After k steps of the Lanczos method from a random vector, an extreme eigenvalue of an
    r x r matrix is missed by more than a part :math:`\epsilon` of the spread with a probability of at most
    :math:`1.648 \sqrt r\, e^{-\sqrt\epsilon (2 k - 1)}` (Kuczyński and Woźniakowski, 1992, theorem 4.2).
    """
    rank = N.to_y(system.b.new_zeros(1, system.operand.shape[1])).shape[1]
    y = GaussianSketch(1, rank, seed=seed, stream=2, dtype=system.b.dtype, device=system.b.device).dense()
    basis, products = y[:0], y[:0]
    checkpoints = (16, 32, 64, 128)
    for k in range(1, min(rank, checkpoints[-1]) + 1):
        basis = torch.cat((basis, y / y.norm()))
        product = y = N.to_y(system.gram(N.to_x(basis[-1:])))
        products = torch.cat((products, product))
        for _ in range(2):
            y = y - (y @ basis.mT) @ basis
        # The bound is exact if the basis spans the whole space.
        exact = k == rank or bool(y.norm() <= torch.finfo(y.dtype).eps * product.norm())
        if exact or k in checkpoints:
            values = torch.linalg.eigvalsh(basis @ products.mT)
            low, high = float(values[0]), float(values[-1])
            missed = (math.log(1.648 * math.sqrt(rank) * 2 * len(checkpoints) / failure) / (2 * k - 1)) ** 2
            missed = 0.0 if exact else missed
            bound = low - missed * (high - low) / (1 - 2 * missed) if missed < 0.5 else 0.0
            if exact or bound >= low / 2:
                return math.sqrt(max(bound, 0.0))
    return 0.0 if rank else 1.0

r"""Logarithm of a determinant from products with random vectors, by stochastic Lanczos quadrature."""

__all__ = ["logdet"]

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from panther._docstrings import inherit_arguments
from panther.errors import NumericalWarning, check_size
from panther.linalg._trace import TraceEstimate
from panther.linalg.operand import driver
from panther.linalg.positive_definite._pcg import NystromPreconditioner, check_shift, pcg
from panther.linalg.sharded import as_square
from panther.sketch import SignSketch, check_seed

# Preconditioners are drawn with other streams, so the same seed can be used here.
_STREAM = 1 << 17
# The quadrature is compared with the one of this fraction of the steps. If later changes are estimated to be below this
# fraction of the spread over the vectors, more steps would not reduce the standard error.
_EARLIER, _NEGLIGIBLE = 0.75, 0.1
_LEAST_STEPS, _SLOWEST = 6, 0.95
# A residual below this fraction of the image of a vector is rounding.
_INVARIANT = 1e-14


@inherit_arguments(pcg)
@driver
def logdet(
    A: Any,
    probes: int = 10,
    *,
    preconditioner: NystromPreconditioner | None = None,
    shift: float = 0.0,
    max_iter: int = 300,
    seed: int | None = None,
) -> TraceEstimate:
    r"""Estimate :math:`\log\det(A + \text{shift}\,I)` of a positive definite matrix from products with vectors.

    For random signs z the mean of :math:`z^T \log(A) z` is :math:`\log\det A`, and Lanczos steps from z approximate it.
    With a preconditioner P, whose determinant is known, only :math:`\log\det P^{-1/2} A P^{-1/2}` is estimated.

    Args:
        probes: Number of random vectors, 2 or more.
        preconditioner: What :func:`~panther.linalg.nystrom_preconditioner` returns for A and this shift.
        max_iter: Largest number of Lanczos steps. Fewer are taken once they change the result by less than a tenth of
            the spread over the vectors.
        seed: The seed of the vectors; None draws one from torch's default CPU generator.

    Returns:
        ``(value, standard_error)``, each () in float64. The standard error has the spread over the vectors and the
        change that further steps would make, as estimated.

    Raises:
        TypeError: If the preconditioner is of another kind.
        ValueError: If A + shift I is not positive definite, or ``shift`` is not that of the preconditioner.

    Warns:
        NumericalWarning: If further steps would change the result by more than rounding and the vectors' spread.

    Cost: a product of A with ``probes`` vectors for each step. Memory beyond A: ``probes (5 n + max_iter^2)``
    numbers.

    Example:
        >>> A = torch.diag(torch.arange(1.0, 501.0) ** -2)
        >>> value, standard_error = logdet(A, shift=1e-2, seed=0)
        >>> bool((value - (A.diagonal() + 1e-2).log().sum()).abs() < 1e-2)
        True

    Reference: Ubaru, Chen and Saad (2017), doi:10.1137/16M1104974; Wenger et al. (2022), arXiv:2107.00243.
    """
    operand = as_square(A, batched=False)
    n = operand.shape[0]
    probes, max_iter = check_size("probes", probes, least=2), check_size("max_iter", max_iter, least=2)
    shift, seed = check_shift(shift), operand.ranks.seed(check_seed(seed))
    M = preconditioner
    if M is not None and not isinstance(M, NystromPreconditioner):
        raise TypeError(f"preconditioner must be what nystrom_preconditioner returns, not {type(M).__name__}: use that")
    if M is not None and (len(M.U) != n or M.shift != shift):
        raise ValueError(
            f"preconditioner, for n={len(M.U)} and shift={M.shift}, must be for n={n} and shift={shift}: make it again"
        )

    def multiply(V: Tensor) -> Tensor:
        V = V.to(operand.dtype)
        X = V if M is None else M.power(-0.5, V)
        X = operand.matmul(X) + shift * X
        operand.check_finite(X)
        return (X if M is None else M.power(-0.5, X)).double()

    if n == 0:
        return TraceEstimate(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    signs = SignSketch(n, probes, seed=seed, stream=_STREAM, scale=False, device=operand.device).dense().double()
    values, later_changes = _lanczos_logs(multiply, signs, max_iter)
    value = values.mean() + (0.0 if M is None else M.logdet())
    rounding = torch.finfo(operand.dtype).eps * (n + value.abs())
    if bool(later_changes > torch.maximum(values.std(), rounding)):
        warnings.warn(
            f"after max_iter={max_iter} steps log det would change by {float(later_changes):.1e} or more: use a "
            "preconditioner, a larger shift or a larger max_iter",
            NumericalWarning,
            stacklevel=3,  # names the caller of the driver
        )
    return TraceEstimate(value, (values.var() / probes + later_changes.square() + rounding.square()).sqrt())


def _lanczos_logs(multiply: Callable[[Tensor], Tensor], Z: Tensor, max_iter: int) -> tuple[Tensor, Tensor]:
    """Return the quadratures of z^T log(A) z, and how much further steps would change their mean.

    The changes between steps whose numbers grow by a constant factor fall by about a constant ratio, so that the sum of
    the later ones is a geometric series. The loss of orthogonality by rounding only delays the quadrature.
    """
    n, count = Z.shape
    V, previous_V, beta = Z / math.sqrt(n), torch.zeros_like(Z), Z.new_zeros(count)
    T, continues = Z.new_zeros(count, max_iter, max_iter), torch.ones_like(beta, dtype=torch.bool)
    values, change = beta, beta.new_tensor(math.inf)
    checks = {math.ceil(max_iter * _EARLIER**exponent) for exponent in range(60)}
    for step in range(1, max_iter + 1):
        W = multiply(V) - beta * previous_V
        alpha = (V * W).sum(0)
        W -= alpha * V
        # After the last step of a vector, whose quadrature is exact, ones on the diagonal of its matrix add nothing.
        T[:, step - 1, step - 1] = torch.where(continues, alpha, 1.0)
        size, beta = alpha.abs() + beta, W.norm(dim=0)
        continues = continues & (beta > _INVARIANT * size)
        if step in checks or not bool(continues.any()):
            previous_values, values = values, n * _log_quadratures(T[:, :step, :step])
            previous_change, change = change, (values - previous_values).mean().abs()
            ratio = (change / previous_change).nan_to_num(0.0).clamp_max(_SLOWEST)
            later_changes = change * ratio / (1 - ratio) if step > 1 else change
            if not bool(continues.any()):
                return values, torch.zeros_like(change)
            if step >= _LEAST_STEPS and bool(later_changes <= _NEGLIGIBLE * values.std() / math.sqrt(count)):
                break
        beta = beta * continues
        if step < max_iter:
            T[:, step, step - 1] = T[:, step - 1, step] = beta
        previous_V, V = V, W * (continues / beta.clamp_min(1e-300))
    return values, later_changes


def _log_quadratures(T: Tensor) -> Tensor:  # (count, k, k) -> (count,)
    """Return e_1^T log(T) e_1 of each tridiagonal matrix."""
    theta, vectors = torch.linalg.eigh(T)
    if not bool((theta > 0).all()):
        raise ValueError(
            f"A + shift I must be positive definite and has an eigenvalue of {float(theta.min()):.3g} or less: use a "
            "larger shift"
        )
    quadratures: Tensor = (vectors[..., 0, :].square() * theta.log()).sum(-1)
    return quadratures

r"""Trace and diagonal: all random vectors but one give a low-rank approximation, and the last one what that leaves.

The mean over the choice of the last vector uses every product twice. The logarithm of a determinant comes from
stochastic Lanczos quadrature.
"""

__all__ = ["TraceEstimate", "diag", "logdet", "trace"]

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panther._docstrings import inherit_arguments
from panther.errors import NumericalWarning, check_size
from panther.linalg._pcg import NystromPreconditioner, pcg
from panther.linalg._rangefinder import sign_matrix
from panther.linalg.operand import Operand, check_penalty, driver
from panther.linalg.sharded import as_square
from panther.sketch import GaussianSketch, SignSketch, check_seed

# No other driver, of preconditioners for example, draws from this stream, so the same seed can be used here.
_STREAM = 1 << 17
_LEAST_PRODUCTS = 6
# The estimates of a diagonal share all vectors but one, and their mean has up to twice the variance of independent ones
# (measured: 1.0 to 1.9 times, for flat, polynomial, exponential and stepped spectra, m from 12 to 120).
_CORRELATION = math.sqrt(2)
# Squared sine of the smallest angle between two directions that the jackknife distinguishes.
_LEAST_SQUARED_SINE = 1e-8
_TINY = 1e-300
# The quadrature is compared with the one of this fraction of the steps. If later changes are estimated to be below this
# fraction of the spread over the vectors, more steps would not reduce the standard error.
_EARLIER, _NEGLIGIBLE = 0.75, 0.1
_LEAST_STEPS, _SLOWEST = 6, 0.95
# A residual below this fraction of the image of a vector is rounding.
_INVARIANT = 1e-14


class TraceEstimate(NamedTuple):
    """An unbiased estimate with its standard error.

    Attributes:
        value: The estimate.
        standard_error: Its estimated standard deviation, of the same shape; zero for exact values.
    """

    value: Tensor
    standard_error: Tensor


@driver
def trace(A: Any, m: int, *, semidefinite: bool = False, seed: int | None = None) -> TraceEstimate:
    r"""Estimate the trace of a square matrix from m products with vectors.

    With :math:`\omega_i` random, :math:`Q_i` a basis of the products of A with all vectors except :math:`\omega_i`, and
    :math:`\mu_i = (I - Q_i Q_i^T) \omega_i` scaled to the squared norm :math:`n - m/2 + 1`, the estimate is the mean of

    .. math:: \mathrm{tr}(Q_i^T A Q_i) + \mu_i^T A \mu_i, \qquad 1 \le i \le m / 2.

    With ``semidefinite`` the approximations are Nystroem's, from m vectors, which is more accurate if the eigenvalues
    decay.

    Args:
        A: Square matrix or batch, (\*batch, n, n); kinds, dtypes and errors as for :mod:`panther.linalg`. ``.T`` is not
            needed.
        m: Number of products of A with a vector, 6 or more. From n on, the trace is exact and takes n products.
        semidefinite: Whether A is known to be symmetric positive semidefinite.
        seed: The seed of the random vectors; None draws one from torch's default CPU generator.

    Returns:
        ``(value, standard_error)``, each (\*batch,) in float64. The standard error is the jackknife's, whose square
        bounds the variance with one vector fewer from above in expectation (B. Efron and C. Stein, Ann. Statist. 9,
        1981, doi:10.1214/aos/1176345462): it is 1 to 3 times the error mostly, up to 6 times for fast
        decay, and itself uncertain if m is less than 20.

    Raises:
        ValueError: If ``semidefinite`` is stated and A has a negative eigenvalue on the vectors.

    Cost: m products and about ``4 n m^2`` flops in float64. Memory beyond A: ``2 n m`` numbers of float64.

    Example:
        >>> A = torch.diag(torch.arange(1.0, 1001.0) ** -2)
        >>> value, standard_error = trace(A, 120, seed=0)
        >>> bool((value - A.trace()).abs() < 3 * standard_error < 1e-2)
        True

    Reference: Epperly, Tropp and Webber (XTrace, 2024), arXiv:2301.07825.
    """
    operand, m, seed = _checked(A, m, seed)
    n = operand.shape[-1]
    if m >= n:
        return _exact(operand.matmul(operand.eye()).diagonal(dim1=-2, dim2=-1).double().sum(-1), operand)
    columns = m if semidefinite else m // 2
    Omega = GaussianSketch(n, columns, seed=seed, stream=_STREAM, scale=False, device=operand.device).dense().double()
    Omega *= math.sqrt(n) / Omega.norm(dim=0)
    Y = operand.matmul(Omega.to(operand.dtype)).double()
    operand.check_finite(Y)
    estimates, pairs = (_nystrom_traces if semidefinite else _projected_traces)(operand, Omega, Y)
    rounding = _rounding(Y, operand).norm(dim=-1) * math.sqrt(n)
    return TraceEstimate(estimates.mean(-1), torch.hypot(_jackknife(pairs), rounding))


@inherit_arguments(trace)
@driver
def diag(A: Any, m: int, *, symmetric: bool = False, seed: int | None = None) -> TraceEstimate:
    r"""Estimate the diagonal of a square matrix from m products with vectors.

    With :math:`\omega_i` random signs and :math:`Q_i` as for :func:`~panther.linalg.trace`, the estimate is the mean of

    .. math:: \mathrm{diag}(Q_i Q_i^T A) + \omega_i \odot (I - Q_i Q_i^T) A \omega_i, \qquad 1 \le i \le m / 2.

    Args:
        A: Square matrix or batch, (\*batch, n, n); kinds, dtypes and errors as for :mod:`panther.linalg`.
        m: Number of products of A and A^T with a vector, 6 or more. From n on, the diagonal is exact and takes n
            products.
        symmetric: Whether A is known to be symmetric, so that A itself is multiplied in the place of A^T.

    Returns:
        ``(value, standard_error)``, each (\*batch, n) in float64.

    Cost: m / 2 products with A and as many with A^T, and ``2 n m^2`` flops. Memory beyond A: ``2 n m`` numbers.

    Example:
        >>> A = torch.diag(torch.arange(1.0, 201.0) ** -2) + 1e-3
        >>> value, standard_error = diag(A, 60, seed=0)
        >>> bool((value - A.diagonal()).abs().max() < 2e-2)
        True

    Reference: Epperly, Tropp and Webber (2024), section 6, arXiv:2301.07825.
    """
    operand, m, seed = _checked(A, m, seed)
    if m >= operand.shape[-1]:
        return _exact(operand.matmul(operand.eye()).diagonal(dim1=-2, dim2=-1).double(), operand)
    signs = sign_matrix(operand, m // 2, seed)
    Y = operand.matmul(signs).double()
    operand.check_finite(Y)
    Q, R, S = _left_out(Y, operand)
    Z = (operand.matmul if symmetric else operand.rmatmul)(Q.to(operand.dtype)).double()
    operand.check_finite(Z)
    QS = Q @ S
    estimates = (Q * Z).sum(-1, keepdim=True) - QS * (Z @ S) + signs * QS * (S * R).sum(-2, keepdim=True)
    spread = estimates.std(-1) * (_CORRELATION / math.sqrt(m // 2))
    return TraceEstimate(estimates.mean(-1), torch.hypot(spread, _rounding(Y, operand)))


def _checked(A: Any, m: int, seed: int | None) -> tuple[Operand, int, int]:
    operand = as_square(A)
    return operand, check_size("m", m, least=_LEAST_PRODUCTS), operand.ranks.seed(check_seed(seed))


def _exact(value: Tensor, operand: Operand) -> TraceEstimate:
    operand.check_finite(value)
    return TraceEstimate(value, torch.zeros_like(value))


def _rounding(Y: Tensor, operand: Operand) -> Tensor:  # (*batch, n, l) -> (*batch, n)
    """Return about eps times the norms of the rows of A, from its products with vectors of norm sqrt(n)."""
    rounding: Tensor = 4 * torch.finfo(operand.dtype).eps / math.sqrt(Y.shape[-1]) * Y.norm(dim=-1)
    return rounding


def _jackknife(pairs: Tensor) -> Tensor:  # (*batch, l, l) -> (*batch,)
    """Return the standard error from the estimates j without vector i, in row i."""
    count = pairs.shape[-1]
    same = torch.eye(count, dtype=torch.bool, device=pairs.device)
    without = pairs.masked_fill(same, 0).sum(-1) / (count - 1)
    standard_error: Tensor = without.std(-1) * math.sqrt(count - 1)
    return standard_error


def _diagonal(X: Tensor) -> Tensor:
    return X.diagonal(dim1=-2, dim2=-1)


def _left_out(Y: Tensor, operand: Operand) -> tuple[Tensor, Tensor, Tensor]:  # (*batch, n, l)
    """Return Q and R of Y, and unit columns s_i with ``Q (I - s_i s_i^T) Q^T`` the projector onto all y_j but y_i.

    s_i is column i of R^-T. Singular values of R below rounding are raised to it, so that the inverse exists.
    """
    Q, R = torch.linalg.qr(Y)
    U, sizes, Vh = torch.linalg.svd(R)
    floor = torch.finfo(operand.dtype).eps * sizes[..., :1]
    S = U @ (Vh / torch.maximum(sizes, floor.clamp_min(_TINY))[..., None])
    return Q, R, S / S.norm(dim=-2, keepdim=True)


def _projected_traces(operand: Operand, Omega: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the estimates, (*batch, l), and in row i the estimates j without vector i, (*batch, l, l)."""
    Q, R, S = _left_out(Y, operand)
    Z = operand.matmul(Q.to(operand.dtype)).double()
    operand.check_finite(Z)
    H, W, T = Q.mT @ Z, Q.mT @ Omega, Z.mT @ Omega
    SW, SHS, SR = S.mT @ W, S.mT @ H @ S, (S * R).sum(-2, keepdim=True)
    SW_jj, SHS_jj = (_diagonal(X)[..., None, :] for X in (SW, SHS))
    V = W - S * SW_jj  # mu_j = omega_j - Q v_j
    left = SW_jj * SR + (V * (H @ V - T)).sum(-2, keepdim=True)
    captured = _diagonal(H).sum(-1)[..., None, None] - SHS_jj
    (n, count), squares = Omega.shape, V.square().sum(-2, keepdim=True)
    estimates = captured + (n - count + 1) / (n - squares) * left
    # Without vector i, estimate j loses a direction u as well: s_i made orthogonal to s_j.
    C = S.mT @ S
    squared_sine = (1 - C.square()).clamp_min(_LEAST_SQUARED_SINE)
    sine = squared_sine.sqrt()
    u_w = (SW - C * SW_jj) / sine
    u_H_u = (SHS_jj.mT - C * (SHS + SHS.mT) + C.square() * SHS_jj) / squared_sine
    crossed = S.mT @ (T - H @ V - H.mT @ V)
    u_crossed = (crossed - C * _diagonal(crossed)[..., None, :]) / sine
    pair_left = left + u_w * (u_crossed - C * SR / sine + u_w * u_H_u)
    return estimates[..., 0, :], captured - u_H_u + (n - count + 2) / (n - squares + u_w.square()) * pair_left


def _nystrom_traces(operand: Operand, Omega: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same from Nystroem's approximations, of A plus a multiple of the identity that is subtracted."""
    n, count = Omega.shape
    shift = torch.finfo(operand.dtype).eps * Y.norm(dim=(-2, -1), keepdim=True) / math.sqrt(count)
    shift = shift.clamp_min(_TINY)
    Y = Y + shift * Omega
    core = Omega.mT @ Y
    C, info = torch.linalg.cholesky_ex((core + core.mT) / 2, upper=True)
    if bool((info > 0).any()):
        raise ValueError("A must be positive semidefinite and has a negative eigenvalue: omit semidefinite=True")
    B = torch.linalg.solve_triangular(C, Y, upper=True, left=False)
    C_inverse = torch.linalg.solve_triangular(
        C, torch.eye(count, dtype=C.dtype, device=C.device).expand_as(C), upper=True
    )
    columns = B @ C_inverse.mT
    P, N, G = C_inverse @ C_inverse.mT, columns.mT @ columns, torch.linalg.inv(Omega.mT @ Omega).expand_as(C)
    p, q, g = (_diagonal(X)[..., None, :] for X in (P, N, G))
    total = B.square().sum((-2, -1), keepdim=True) - n * shift
    estimates = total + ((n - count + 1) * g - q) / p
    # Without vector i, the inverses P and G lose a term of rank one.
    f = P / p.mT
    pair_q, pair_p, pair_g = q - 2 * f * N + f.square() * q.mT, p - f * P, g - G.square() / g.mT
    return estimates[..., 0, :], total - (q / p).mT + ((n - count + 2) * pair_g - pair_q) / pair_p


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
    shift, seed = check_penalty("shift", shift), operand.ranks.seed(check_seed(seed))
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

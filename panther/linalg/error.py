r"""A-posteriori error of an approximation, from products with a few Gaussian probes.

For :math:`E = A - \hat A` and standard normal :math:`\omega_i`, :math:`\frac1r \sum_i \|E \omega_i\|^2` has mean
:math:`\|E\|_F^2`, and for any E and :math:`0 < x < 1`

.. math:: P\Big(\frac1r \sum_i \|E \omega_i\|^2 \le x \|E\|_F^2\Big) \le \big(x\,e^{1-x}\big)^{r/2},

Chernoff's bound for one singular value, which is the worst case: with weights :math:`\lambda_j = \sigma_j^2 /
\|E\|_F^2`, :math:`\prod_j (1 + 2 s \lambda_j) \ge 1 + 2 s`. After Halko, Martinsson and Tropp, "Finding structure with
randomness" (2011), section 4.3, doi:10.1137/090771806, and Martinsson and Tropp (2020), section 12,
doi:10.1017/S0962492920000021.
"""

__all__ = ["ErrorEstimate", "estimate_error"]

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from panther.errors import DTypeError, ShapeError, check_size
from panther.linalg.operand import Operand, as_operand, check_number, driver, power_of_two, tensor_of
from panther.linalg.sharded import ShardedOperand
from panther.sketch import check_seed

# No driver draws from this stream, so the same seed can be used here.
_STREAM = 1 << 16
# More probes hardly sharpen the bound, which is within some 3 percent with these.
_MAX_PROBES = 10_000


class ErrorEstimate(NamedTuple):
    """How far an approximation is from A.

    Attributes:
        frobenius: Estimate of the Frobenius norm of the error of each batch entry.
        upper: The Frobenius norm, and so the spectral norm, is at most this with probability ``confidence``.
        relative: ``frobenius`` over the estimate, from the same probes, of the Frobenius norm of A; zero if both are.
        confidence: Least probability, over the probes, that ``upper`` holds for one matrix of the batch.
        probes: Number of probes.
    """

    frobenius: Tensor
    upper: Tensor
    relative: Tensor
    confidence: float
    probes: int


@driver
def estimate_error(
    A: Any, approximation: Any, *, probes: int = 10, confidence: float = 0.999, seed: int | None = None
) -> ErrorEstimate:
    r"""Estimate :math:`\|A - \hat A\|_F`, with an upper bound that holds with stated probability.

    The probes are independent of the random numbers of a driver, even with the same seed. Rounding is part of the
    error: the estimate for an exact approximation is the rounding error of its products.

    Args:
        A: Matrix or batch, (\*batch, m, n), of any kind that :mod:`panther.linalg` takes; ``.T`` is not needed.
        approximation: What a driver of this package returned; or a matrix of a kind that A can have; or a tuple of two
            factors, ``(Q, B)`` for Q B, or of three, ``(U, S, V)`` for U diag(S) V^T; a result of ``torch.linalg.svd``,
            which has V^T, is known by its field ``Vh``. Factors are cast to A's dtype.
        probes: Number of Gaussian probes, 1 to 10,000. With 10, ``upper`` is about 3 times the error at a confidence of
            0.999; with 100, 1.3 times.
        confidence: Probability in (0, 1) with which ``upper`` must hold.
        seed: The seed of the probes; None draws one from torch's default CPU generator.

    Raises:
        ShapeError: If the shapes differ, or ``probes`` is outside its range.
        DTypeError: If A and the approximation are on two devices.
        ValueError: If ``confidence`` is outside (0, 1).

    Cost: ``probes`` products of A and of the approximation with a vector.

    Example:
        >>> import panther as pr
        >>> A = torch.diag(0.5 ** torch.arange(30.0))
        >>> error = estimate_error(
        ...     A, pr.linalg.randomized_svd(A, 8, seed=0), seed=1
        ... )
        >>> bool(0 < error.frobenius < error.upper < 4 * 2**-8)
        True
    """
    operand = as_operand(A)
    probes = check_size("probes", probes, least=1)
    if probes > _MAX_PROBES:
        raise ShapeError(
            f"probes={probes} must be at most {_MAX_PROBES}, with which upper is within some 3 percent: use fewer"
        )
    confidence = check_number("confidence", confidence, "between 0 and 1", lambda number: 0 < number < 1, "0.999")
    omega = operand.probes(probes, operand.ranks.seed(check_seed(seed)), _STREAM)
    approximated, ranks = _multiply(approximation, omega, operand), operand.ranks
    if isinstance(operand, ShardedOperand):
        approximated = operand.rows_of(approximated)
    exact = operand.matmul(omega)
    operand.check_finite(exact)
    if approximated.shape != exact.shape:
        raise _shape_error(operand, f"its products have the shape {tuple(approximated.shape)}")
    if not bool(approximated.isfinite().all()):
        raise ValueError("the approximation must be finite and has NaN or infinity: compute it again in float64")
    unit = torch.maximum(power_of_two(exact, ranks), power_of_two(approximated, ranks))
    exact, approximated = exact / unit, approximated / unit  # their difference may overflow otherwise
    error, norm = (ranks.norm(_frobenius(x)) / math.sqrt(probes) for x in (exact - approximated, exact))
    relative = torch.where(error > 0, error / norm, 0.0)
    frobenius = error * unit[..., 0, 0]
    upper = frobenius / math.sqrt(_quantile(1 - confidence, probes))
    return ErrorEstimate(frobenius, upper, relative, confidence, probes)


def _frobenius(x: Tensor) -> Tensor:  # (*batch, m, l) -> (*batch,)
    """Return the Frobenius norm, whose squares neither overflow nor vanish."""
    unit = power_of_two(x)
    norm: Tensor = (x / unit).flatten(-2).norm(dim=-1) * unit[..., 0, 0]
    return norm


def _quantile(failure: float, probes: int) -> float:
    """Return the x in (0, 1) with ``(x e^(1 - x))^(probes / 2) = failure``, by bisection of its logarithm."""
    target = 2 * math.log(failure) / probes
    low, high = math.exp(target - 1), 1.0  # x e >= x e^(1 - x), so the root is above exp(target - 1)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.log(middle) + 1 - middle < target else (low, middle)
    return low


def _multiply(approximation: Any, X: Tensor, operand: Operand) -> Tensor:
    """Return the product of an approximation of the operand with X."""
    if hasattr(approximation, "_fields"):  # The result of a driver, with arrays if the driver received an array.
        approximation = type(approximation)(*(_as_tensor(part) for part in approximation))
    if all(hasattr(approximation, name) for name in ("__matmul__", "shape", "dtype")):
        other = as_operand(approximation, "the approximation")
        if other.shape != operand.shape:
            raise _shape_error(operand, f"it has the shape {tuple(other.shape)}")
        _check_device(other.device, operand)
        return other.matmul(X.to(other.dtype)).to(X.dtype)
    parts = list(approximation) if isinstance(approximation, tuple | list) else []
    if hasattr(approximation, "Vh"):  # torch.linalg.svd and numpy.linalg.svd return the transpose of V
        parts[2] = parts[2].conj().swapaxes(-1, -2)
    multiplies = hasattr(approximation, "__matmul__")
    if not multiplies and len(parts) not in (2, 3):
        received = f"a {type(approximation).__name__} of {len(parts)}" if parts else type(approximation).__name__
        raise TypeError(
            f"an approximation must be what a driver returned, a matrix, or a tuple of 2 or 3 factors, not {received}: "
            "multiply its factors"
        )
    dtypes = [part.dtype for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
    factors = [] if multiplies else [_factor(part, operand) for part in parts]
    try:
        if multiplies:
            product: Tensor = approximation @ X.to(dtypes[0] if dtypes else X.dtype)
            return product.to(X.dtype)
        if len(factors) == 2:
            return factors[0] @ (factors[1] @ X)
        U, S, V = factors
        return U @ (S[..., None] * (V.mT @ X))
    except (RuntimeError, IndexError, ValueError) as error:
        reason = str(error).split("\n")[0]
        problem = f"its product with a matrix of shape {tuple(X.shape)} failed ({reason})"
        raise _shape_error(operand, problem) from error


def _as_tensor(part: Any) -> Any:
    return tensor_of(part) if isinstance(part, np.ndarray) else part


def _factor(part: Any, operand: Operand) -> Tensor:
    if not isinstance(part, Tensor | np.ndarray):
        raise TypeError(f"factors must be tensors or NumPy arrays, not {type(part).__name__}: use torch.as_tensor")
    factor: Tensor = _as_tensor(part)
    if not factor.is_floating_point():
        raise DTypeError(f"a factor is {factor.dtype} and must be real and floating: use (U, S, V) or (Q, B)")
    _check_device(factor.device, operand)
    return factor.to(operand.dtype)


def _shape_error(operand: Operand, problem: str) -> ShapeError:
    return ShapeError(
        f"the approximation of A, of shape {tuple(operand.shape)}, must have the same shape; {problem}: transpose it, "
        "or check the order of its factors"
    )


def _check_device(device: torch.device, operand: Operand) -> None:
    if device.type != operand.device.type:
        raise DTypeError(f"the approximation is on {device} and A on {operand.device}: move it there")

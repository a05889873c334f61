r"""A-posteriori error of an approximation, from products with a few Gaussian probes.

For :math:`E = A - \hat A` and standard normal :math:`\omega_i`, :math:`\frac1r \sum_i \|E \omega_i\|^2` has mean
:math:`\|E\|_F^2`, and for any E and :math:`0 < x < 1`

.. math:: P\Big(\frac1r \sum_i \|E \omega_i\|^2 \le x \|E\|_F^2\Big) \le \big(x\,e^{1-x}\big)^{r/2},

Chernoff's bound for one singular value, which is the worst case: with weights :math:`\lambda_j = \sigma_j^2 /
\|E\|_F^2`, :math:`\prod_j (1 + 2 s \lambda_j) \ge 1 + 2 s`. After Halko, Martinsson and Tropp, "Finding structure with
randomness", SIAM Rev. 53 (2011), section 4.3, doi:10.1137/090771806, and Martinsson and Tropp, "Randomized numerical
linear algebra", Acta Numer. 29 (2020), section 12, doi:10.1017/S0962492920000021.
"""

__all__ = ["ErrorEstimate", "estimate_error"]

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panther.errors import ShapeError, check_size
from panther.linalg._operand import Operand, as_operand, driver
from panther.sketch import GaussianSketch, draw_seed


class ErrorEstimate(NamedTuple):
    """How far an approximation is from A.

    Attributes:
        frobenius: Estimate of the Frobenius norm of the error, one number a batch entry.
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
    A: Any,  # (*batch, m, n)
    approximation: Any,
    *,
    probes: int = 10,
    confidence: float = 0.999,
    seed: int | None = None,
) -> ErrorEstimate:
    r"""Estimate :math:`\|A - \hat A\|_F`, with an upper bound that holds with stated probability.

    The probes must be independent of the approximation: leave ``seed`` to None, or pass another one than the driver had.

    Args:
        A: A tensor, a sparse tensor, or anything with ``.shape`` and ``@``; (\*batch, m, n).
        approximation: What a driver of this package returned; or the same kinds as A; or a tuple of two factors,
            ``(Q, B)`` for Q B, or of three, ``(U, S, V)`` for U diag(S) V^T.
        probes: Number of Gaussian probes, 1 or more. With 10, ``upper`` is about 3 times the error at a confidence of
            0.999; with 100, 1.4 times.
        confidence: Probability in (0, 1) with which ``upper`` must hold.
        seed: Of the probes; None draws one from torch's default CPU generator.

    Raises:
        ShapeError: If the shapes differ.
        DTypeError: If A is not real and floating.
        ValueError: If ``confidence`` is outside (0, 1), or a product is not finite.

    Cost: ``probes`` products of A and of the approximation with a vector.

    Example:
        >>> import panther as pr
        >>> A = torch.diag(0.5 ** torch.arange(30.0))
        >>> error = estimate_error(A, pr.linalg.randomized_svd(A, 8, seed=0), seed=1)
        >>> bool(0 < error.frobenius < error.upper < 4 * 2**-8)
        True
    """
    operand = as_operand(A)
    product = _product_of(approximation, operand)
    probes = check_size("probes", probes, least=1)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must be between 0 and 1: use 0.999, say")
    n = operand.shape[-1]
    seed = draw_seed() if seed is None else seed
    omega = GaussianSketch(n, probes, seed=seed, scale=False, dtype=operand.dtype, device=operand.device).dense()
    omega = omega.expand(*operand.shape[:-2], n, probes)
    exact = operand.matmul(omega)
    operand.check_finite(exact)
    approximated = product(omega)
    if approximated.shape != exact.shape:
        raise ShapeError(
            f"the approximation of A, of shape {tuple(operand.shape)}, must have the same shape; its products have the "
            f"shape {tuple(approximated.shape)} and those of A {tuple(exact.shape)}"
        )
    if not bool(approximated.isfinite().all()):
        raise ValueError("the approximation must be finite and has NaN or infinity: compute it again in float64")
    squares = [x.flatten(-2).norm(dim=-1) / math.sqrt(probes) for x in (exact - approximated, exact)]
    frobenius, norm = squares
    relative = torch.where(frobenius > 0, frobenius / norm, 0.0)
    upper = frobenius / math.sqrt(_quantile(1 - confidence, probes))
    return ErrorEstimate(frobenius, upper, relative, confidence, probes)


def _quantile(failure: float, probes: int) -> float:
    """The x in (0, 1) with ``(x e^(1 - x))^(probes / 2) = failure``, by bisection of its logarithm."""
    target = 2 * math.log(failure) / probes
    low, high = math.exp(target - 1), 1.0  # x e >= x e^(1 - x), so the root is above exp(target - 1)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if math.log(middle) + 1 - middle < target else (low, middle)
    return low


def _product_of(approximation: Any, operand: Operand) -> Any:
    """The function that multiplies by an approximation."""
    if hasattr(approximation, "__matmul__"):
        if hasattr(approximation, "shape"):
            return as_operand(approximation).matmul
        return lambda X: approximation @ X
    if isinstance(approximation, tuple | list) and len(approximation) == 2:
        Q, B = (part.to(operand.dtype) for part in approximation)
        return lambda X: Q @ (B @ X)
    if isinstance(approximation, tuple | list) and len(approximation) == 3:
        U, S, V = (part.to(operand.dtype) for part in approximation)
        return lambda X: U @ (S[..., None] * (V.mT @ X))
    raise TypeError(
        f"an approximation must be what a driver returned, a matrix, or a tuple of 2 or 3 factors, not "
        f"{type(approximation).__name__}: use the product of its factors"
    )

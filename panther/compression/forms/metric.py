r"""Low-rank factors in the metric of a layer's inputs and of its output's sensitivity.

With :math:`A = L L^T` and :math:`G = R^T R`, the rank-r matrix that minimises :math:`\operatorname{tr}(G \Delta A
\Delta^T)` is :math:`R^{-1} [R W L]_r L^{-1}`, where :math:`[\cdot]_r` is the truncated SVD (Eckart and Young in a
weighted norm). Where a layer has a bias, A is the covariance of its inputs and the bias takes up the change at
their mean, which is the best bias for every W.
"""

__all__ = [
    "RIDGE", "Fit", "Metric", "QuantizedFit", "QuantizedWeight", "factor", "leading_components", "metric_of",
    "wide_dtype",
]  # fmt: skip

from dataclasses import dataclass

import torch
from torch import Tensor

from panther.compression.calibration.targets import Target
from panther.compression.moments import Moments
from panther.kernels.reference.codes import spread
from panther.linalg import randomized_svd
from panther.nn.quantized.matrix import MAXIMUM_CODE

# Added to the diagonal of a moment, relative to the diagonal's mean, so that directions that do not occur in the
# batches keep some weight.
RIDGE = 1e-4
# From this size on, the randomized SVD is used if the rank is at most a quarter of the size. In float64 at 1536 it
# takes 0.17 (an eighth) and 0.6 (a quarter) of LAPACK's time, and more beyond; its error is 3 to 6 in 10,000 above the
# least.
_LARGE = 1024


@dataclass(frozen=True)
class Metric:
    """The norm in which a target's weight is approximated: float64 tensors whose first dimension is the group.

    Attributes:
        source: The weight to approximate, (groups, outer, inner).
        L: Lower triangular, with L L^T = A and its ridge; None is the identity.
        R: Upper triangular, with R^T R = G and its ridge; None is the identity.
        means: Mean of the layer's input, (groups, inner), and of its output without the bias, (groups, outer); None
            where there is no bias to take up a change, or no calibration.
    """

    source: Tensor
    L: Tensor | None
    R: Tensor | None
    means: tuple[Tensor, Tensor] | None

    @property
    def traces(self) -> tuple[float, float]:
        """Return the traces of A and of G, summed over groups."""
        groups, outer, inner = self.source.shape
        return (
            float(groups * inner) if self.L is None else self.L.square().sum().item(),
            float(groups * outer) if self.R is None else self.R.square().sum().item(),
        )


@dataclass(frozen=True)
class Fit:
    """Components of a target's weight, the most important first.

    Attributes:
        left: (groups, outer, components), float32 or wider.
        right: (groups, components, inner).
        tails: Loss at each rank from 0 on, as a squared effect on the model's output summed over groups, in float64,
            (components + 1,). It includes the components that are not stored.
        local_tails: Squared effect on the layer's own output that is lost at each rank, (components + 1,).
        rounding: Expected increase of ``tails`` at each rank if the components are rounded to int8.
        means: Mean of the layer's input, (groups, inner), and of its output without the bias, (groups, outer); None
            where there is no bias to take up a change, or no calibration.
    """

    left: Tensor
    right: Tensor
    tails: Tensor
    local_tails: Tensor
    rounding: Tensor
    means: tuple[Tensor, Tensor] | None

    def losses(self, rank: int, *, rounded: bool = False) -> tuple[float, float] | None:
        """Return the loss at a rank, and the loss in the layer's own output; None if the rank was not computed.

        ``rounded``, the loss includes the effect of rounding the components to int8.
        """
        if rank >= len(self.tails):
            return None
        loss = self.tails[rank] + (self.rounding[rank] if rounded else 0.0)
        return loss.item(), self.local_tails[rank].item()


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight on a grid: ``scales * (codes - zeros)``, with a scale and a zero for each group of a row's columns.

    The rows of a grouped convolution's matrices follow each other, as in the layer.

    Attributes:
        codes: (rows, inner), uint8.
        scales: (rows, groups of columns), bfloat16.
        zeros: (rows, groups of columns), uint8.
        group_size: Columns of a group; the last one can have fewer.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int

    def dense(self) -> Tensor:  # (rows, inner), float64
        """Return the weight ``scales * (codes - zeros)``."""
        scales, zeros = (
            spread(each.double(), self.group_size, self.codes.shape[1]) for each in (self.scales, self.zeros)
        )
        return scales * (self.codes.double() - zeros)


@dataclass(frozen=True)
class QuantizedFit:
    """A weight quantized at one width, and components of the rounding error; the first tail is the loss of codes."""

    weight: QuantizedWeight
    residual: Fit


def _tails(energy: Tensor, total: Tensor) -> Tensor:
    kept_energy = torch.cat((energy.new_zeros(1), energy.cumsum(0)))
    return (total - kept_energy).clamp_min(0)


def metric_of(target: Target, moments: Moments | None, ridge: float = RIDGE) -> Metric:
    """Return the metric of a target's moments; without moments, A and G are the identity.

    ``ridge`` is added to the diagonals, relative to their mean.
    """
    W = target.kind.matrices(target)
    if moments is None:
        return Metric(W, None, None, None)
    A, mean = moments.A, moments.mean
    # Only a bias in every layer that shares the weight can take up a change of the mean.
    if target.has_bias:
        A = A - mean[:, :, None] * mean[:, None, :]
    # Any root gives the same fit. Cholesky factors make the solves triangular, which is cheap and accurate.
    L = _root(A, ridge)
    R = None if moments.G is None else _root(moments.G, ridge).mT
    return Metric(W, L, R, (mean, (W @ mean[..., None])[..., 0]) if target.has_bias else None)


def factor(
    matrix: Tensor,  # (groups, outer, inner)
    metric: Metric,
    *,
    most: int,
    seed: int,
    dtype: torch.dtype,
) -> Fit:
    """Split a matrix into its ``most`` leading components in a metric; with 0, only the tails are computed."""
    L, R = metric.L, metric.R
    ML = matrix if L is None else matrix @ L
    M = ML if R is None else R @ ML
    left, sigma, right = _leading(M, most, seed)
    left = left * sigma[:, None, :]
    if R is not None:
        left = torch.linalg.solve_triangular(R, left, upper=True)
    # The right factors are orthonormal in the metric of A, so that `left` alone has the effect on the layer's output.
    energy, local = sigma.square(), left.square().sum((0, 1))
    if L is not None:
        right = torch.linalg.solve_triangular(L, right, upper=False, left=False)
    # Rounding to multiples of a step s gives each entry an independent error with the mean square s^2 / 12.
    a, g = metric.traces
    rounded = (_steps(left, 1) * g + _steps(right, 2) * a * energy).sum(0)
    return Fit(
        left.to(dtype),
        right.to(dtype),
        _tails(energy.sum(0), M.square().sum()),
        _tails(local, ML.square().sum()),
        torch.cat((rounded.new_zeros(1), rounded.cumsum(0))),
        metric.means,
    )


def _steps(factors: Tensor, dim: int) -> Tensor:
    return (factors.abs().amax(dim) / MAXIMUM_CODE).square() / 12


def wide_dtype(target: Target) -> torch.dtype:
    """Return the dtype of a target's components: float32, or the dtype of the weight if that is wider."""
    return torch.promote_types(target.weight.dtype, torch.float32)


def leading_components(target: Target, largest: int, uniform: float) -> int:
    """Return how many components to store, at most ``largest``, if a uniform rank would be ``uniform``."""
    if min(target.inner, target.outer) < _LARGE:
        return largest
    # A global choice rarely needs more than twice the uniform rank, and a small rank allows the randomized SVD.
    return min(largest, int(2 * uniform) // 2 * 2)


def _root(A: Tensor, ridge: float) -> Tensor:  # (groups, n, n)
    """Return the lower triangular L with L L^T = A + ridge; where A is zero, L L^T is ``ridge`` times the identity."""
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    level = diagonal.mean(-1, keepdim=True)
    level = torch.where(level > 0, level, 1.0)
    while True:
        lifted = A.clone()
        lifted.diagonal(dim1=-2, dim2=-1).copy_(diagonal + ridge * level)
        L, info = torch.linalg.cholesky_ex(lifted)
        if not info.any():
            return L
        ridge *= 10  # because rounding made an eigenvalue more negative than the ridge


def _leading(M: Tensor, most: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading singular triplets of each group, (groups, m, r), (groups, r), (groups, r, n)."""
    least = min(M.shape[-2:])
    if not most:
        return M[..., :0], M[..., 0, :0], M[..., :0, :]
    if least >= _LARGE and 4 * most <= least:
        result = randomized_svd(M, most, oversample=most // 4, n_iter=4, seed=seed)
        return result.U, result.S, result.V.mT
    left, sigma, right = torch.linalg.svd(M, full_matrices=False)
    most = min(most, least)
    return left[..., :most], sigma[..., :most], right[..., :most, :]

r"""Low-rank factors in the metric of a layer's inputs and of its output's sensitivity.

With :math:`A = L L^T` and :math:`G = R^T R`, the rank-r matrix that minimises :math:`\operatorname{tr}(G \Delta A
\Delta^T)` is :math:`R^{-1} [R W L]_r L^{-1}`, where :math:`[\cdot]_r` is the truncated SVD (Eckart and Young in a
weighted norm). Where a layer has a bias, A is the covariance of its inputs and the bias takes up the change at
their mean, which is the best bias for every W.
"""

__all__ = ["Fit", "Fits", "components", "fit_targets", "fit_weight"]

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from panther.compression.forms.options import Forms, Option
from panther.compression.moments import Moments, check_calibration, gather_moments, split_passes
from panther.compression.runner import Runner
from panther.compression.targets import LEAST_RANK, Survey, Target
from panther.linalg import randomized_svd

_log = logging.getLogger(__name__)

# Added to the diagonal of a moment, relative to its mean: directions that the batches do not show keep some weight.
_RIDGE = 1e-4
# From this size on the randomized SVD, where the rank is at most a quarter of it: in float64 at 1536 it takes 0.17 and
# 0.6 of LAPACK's time at an eighth and a quarter, more beyond; its error is 3 to 6 in 10,000 above the least.
_LARGE = 1024
_DOUBLE = torch.float64.itemsize
_SPARE = 2**30  # bytes for moments by default, where twice as many are free
_HEALING = 6  # times the trained numbers: values, gradients, two moments, the best point, a copy in half precision


@dataclass(frozen=True)
class Fit:
    """Components of a target's weight, the most important first.

    Attributes:
        left: (groups, outer, components), float32 or wider.
        right: (groups, components, inner).
        tails: Squared effect on the output, summed over groups, that is lost at each rank from 0 on, (components + 1,),
            float64; also of components that are not stored.
        local_tails: The same for the layer's own output.
        means: Mean of the layer's input, (groups, inner), and of its output without the bias, (groups, outer); None
            where there is no bias to take up a change, or no calibration.
    """

    left: Tensor
    right: Tensor
    tails: Tensor
    local_tails: Tensor
    means: tuple[Tensor, Tensor] | None

    def local_error(self, rank: int | None) -> float:
        """Return the predicted relative error of the layer's own output; None is the dense weight."""
        if rank is None:
            return 0.0
        lost, total = self.local_tails[min(rank, len(self.local_tails) - 1)].item(), self.local_tails[0].item()
        return (lost / total) ** 0.5 if total > 0 else 0.0


def _tails(energy: Tensor, total: Tensor) -> Tensor:
    kept = torch.cat((energy.new_zeros(1), energy.cumsum(0)))
    return (total - kept).clamp_min(0)


@dataclass(frozen=True)
class Fits:
    """The components of all targets, and the figures that were computed with them.

    Attributes:
        fits: Components of each target; empty for seeded sketches, which are not fitted.
        options: What each target can become, the smallest first, with losses as shares of the output's squared norm
            (zero without gradients).
        moments: Moments of each target, kept for fitting in sequence.
        passes: Passes over the batches.
        extra_bytes: Most memory needed at once for moments, components, new layers and healing.
        healing_bytes: Memory needed while healing, besides what it keeps of the original's outputs; 0 without healing.
        comparable: Whether losses are in units of the output's squared norm.
        doubts: Why the batches say too little about some layers.
    """

    fits: Mapping[Target, Fit] = field(default_factory=dict)
    options: Mapping[Target, Sequence[Option]] = field(default_factory=dict)
    moments: Mapping[Target, Moments] = field(default_factory=dict)
    passes: int = 0
    extra_bytes: int = 0
    healing_bytes: int = 0
    comparable: bool = False
    doubts: tuple[str, ...] = ()


def fit_targets(
    runner: Runner, survey: Survey, forms: Forms, limit: int | None, *, memory: int | None, keep: bool, healing: bool,
    seed: int,
) -> Fits:  # fmt: skip
    """Gather moments pass by pass, and factor every weight in their metric.

    ``limit``, the bytes that all layers may take, if that is known, bounds the components to store. ``memory`` bounds
    the bytes of moments at once, which are kept for fitting in sequence with ``keep``. ``healing`` only adds its memory
    to what is stated.
    """
    share = 1.0 if limit is None else limit / sum(target.dense_bytes for target in survey.targets)
    most = {target: components(target, share) for target in survey.targets}
    seeds = survey.seeds(seed)
    memory = runner.spare_bytes(_SPARE) if memory is None else memory
    split, largest = split_passes(survey.inputs, survey.gradients, memory)
    extra, healed = _most_bytes(most, largest, limit, keep=keep, healing=healing)
    _log.info(
        "number of weights: %d, passes: %d, batches: %d, extra memory: at most %.0f MB besides the model's own forward "
        "and backward", len(most), len(split), len(runner.batches), extra / 1e6,
    )  # fmt: skip
    # Without calibration there are no inputs, and weights are fitted in the plain metric.
    plain = survey.targets if not split else ()
    fits = {target: fit_weight(target, None, most=most[target], seed=seeds[target]) for target in plain}
    options = {target: _scored(forms.options(target), fits[target], 0.0) for target in plain}
    positions, constant = {}, set()
    kept, comparable = {}, survey.gradients and runner.loss_fn is None
    for number, inputs in enumerate(split):
        description = f"moments {number + 1}/{len(split)}"
        found, energy = gather_moments(runner, inputs, gradients=survey.gradients, seed=seed, description=description)
        for target in list(found):
            own = found.pop(target)  # so that its memory is free once it is used
            positions[target] = own.positions
            if own.constant:
                constant.add(target)
            fits[target] = fit_weight(target, own, most=most[target], seed=seeds[target])
            scale = own.positions / energy if energy > 0 and comparable else own.positions
            options[target] = _scored(forms.options(target), fits[target], scale if survey.gradients else 0.0)
            if keep:
                kept[target] = own
    doubts = check_calibration(positions, constant)
    return Fits(fits, options, kept, len(split), extra, healed, comparable, doubts)


def _scored(options: Sequence[Option], fit: Fit, scale: float) -> list[Option]:
    """Return the options that the components cover, with their losses, which are those of the fit times ``scale``."""
    return [
        replace(option, loss=fit.tails[option.rank].item() * scale, error=fit.local_error(option.rank))
        if option.rank is not None
        else option
        for option in options
        if option.rank is None or option.rank < len(fit.tails)
    ]


def _most_bytes(
    most: Mapping[Target, int], moments: int, limit: int | None, *, keep: bool, healing: bool
) -> tuple[int, int]:
    """Return the bytes of all components, and of the most that is held beside them: moments, new layers, healing.

    The second number is that of healing, which keeps outputs of the original besides.
    """
    stored = sum(_wide_dtype(target).itemsize * target.numbers(count) for target, count in most.items())
    work = max(
        _DOUBLE * target.groups * (3 * (target.inner**2 + target.outer**2) + 6 * target.inner * target.outer)
        for target in most
    )
    kept = keep * _DOUBLE * sum(target.groups * (target.inner**2 + target.outer**2) for target in most)
    new = sum(target.dense_bytes for target in most) if limit is None else limit
    widest = max(_wide_dtype(target).itemsize / target.weight.itemsize for target in most)
    healed = stored + new + int(_HEALING * widest * new) if healing else 0  # except for the hidden states
    return max(stored + moments + work + kept, stored + 2 * new + kept, healed), healed


def fit_weight(target: Target, moments: Moments | None, *, most: int, seed: int, drift: Moments | None = None) -> Fit:
    """Split a target's weight into ``most`` components in the metric of its moments, or in the plain one without.

    ``drift`` holds the moments of the layer's input once the layers before it are compressed; the weight is then fitted
    to map that input to the original's output.
    """
    W, dtype = target.matrices(), _wide_dtype(target)
    if moments is None:
        left, sigma, right = _leading(W, most, seed)
        tails = _tails(sigma.square().sum(0), W.square().sum())
        return Fit((left * sigma[:, None, :]).to(dtype), right.to(dtype), tails, tails, None)
    read = moments if drift is None else drift
    A, mean, cross, source = read.A, read.mean, read.cross, W
    # Only a bias in every layer that shares the weight can take up a change of the mean.
    biased = all(getattr(module, "bias", None) is not None for module in target.modules)
    if biased:
        A = A - _outer(mean, mean)
        cross = None if cross is None else cross - _outer(moments.mean, mean)
    # Cholesky factors rather than symmetric roots: a triangular solve is cheap and accurate, and any root will do.
    L = _root(A)
    if cross is not None:  # the regression of the original's output on the new input: W C A^-1
        source = torch.cholesky_solve((W @ cross).mT, L).mT
    R = None if moments.G is None else _root(moments.G).mT
    WL = source @ L
    M = WL if R is None else R @ WL
    left, sigma, right = _leading(M, most, seed)
    left = left * sigma[:, None, :]
    if R is not None:
        left = torch.linalg.solve_triangular(R, left, upper=True)
    local = left.square().sum((0, 1))  # the right factors are orthonormal in the metric of A
    right = torch.linalg.solve_triangular(L, right, upper=False, left=False)
    return Fit(
        left.to(dtype),
        right.to(dtype),
        _tails(sigma.square().sum(0), M.square().sum()),
        _tails(local, WL.square().sum()),
        (mean, (W @ moments.mean[..., None])[..., 0]) if biased else None,
    )


def _wide_dtype(target: Target) -> torch.dtype:
    """Return the dtype of a target's components: float32, or its own if that is wider."""
    return torch.promote_types(target.weight.dtype, torch.float32)


def components(target: Target, share: float) -> int:
    """Return how many components of a target to store where all targets may keep ``share`` of their bytes."""
    most = target.largest_rank
    if min(target.inner, target.outer) < _LARGE:
        return most
    # Twice as many as a uniform rank needs: the randomized SVD, which is faster, can be used for up to a quarter.
    return max(min(most, int(2 * share * most)) // 2 * 2, LEAST_RANK)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, :, None] * y[:, None, :]


def _root(A: Tensor) -> Tensor:  # (groups, n, n)
    """Return the lower triangular L with L L^T = A and a ridge; the identity where A is zero."""
    n = A.shape[-1]
    level = A.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = torch.where(level > 0, level, 1.0)
    eye = torch.eye(n, dtype=A.dtype, device=A.device)
    ridge = _RIDGE
    while True:
        L, info = torch.linalg.cholesky_ex(A + (ridge * level)[:, None, None] * eye)
        if not info.any():
            return L
        ridge *= 10  # rounding made an eigenvalue negative by more than the ridge


def _leading(M: Tensor, most: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading singular triplets of each group, (groups, m, r), (groups, r), (groups, r, n)."""
    least = min(M.shape[-2:])
    if least >= _LARGE and 4 * most <= least:
        result = randomized_svd(M, most, oversample=most // 4, n_iter=4, seed=seed)
        return result.U, result.S, result.V.mT
    left, sigma, right = torch.linalg.svd(M, full_matrices=False)
    most = min(most, least)
    return left[..., :most], sigma[..., :most], right[..., :most, :]

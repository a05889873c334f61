r"""Fitting low-rank factors in the metric of a layer's inputs and of its output's sensitivity.

With :math:`A = L L^T` and :math:`G = R^T R`, the rank-r matrix that minimises :math:`\operatorname{tr}(G \Delta A
\Delta^T)` is :math:`R^{-1} [R W L]_r L^{-1}`, where :math:`[\cdot]_r` is the truncated SVD (Eckart and Young in a
weighted norm). Where a layer has a bias, A is the covariance of its inputs and the bias takes up what their mean
changes, which is the best bias for every W.
"""

__all__ = ["Fit", "components", "convert", "convert_plainly", "fit", "has_bias", "inherit_flags", "wide"]

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from panther.compression.allocation import rank_limit
from panther.compression.calibration import Drifted, Statistics
from panther.compression.planning import LEAST_RANK, Target, is_conv1d
from panther.errors import PerformanceWarning
from panther.linalg import randomized_svd
from panther.nn import SKConv2d, SKLinear
from panther.nn._conv import is_channels_last
from panther.nn._fitting import split_factors

# Added to the diagonal of a moment, relative to its mean: directions that the batches do not show keep some weight.
_RIDGE = 1e-4
# From this size on the randomized SVD, where the rank is at most a quarter of it: in float64 at 1536 it takes 0.17 and
# 0.6 of LAPACK's time at an eighth and a quarter, more beyond; its error is 3 to 6 in 10,000 above the least.
_LARGE = 1024


@dataclass
class Fit:
    """Components of a target's weight, the most important first.

    Attributes:
        left: (groups, outer, components), float32 or wider.
        right: (groups, components, inner).
        energy: Square of each component's effect on the output, summed over groups, (components,), float64.
        total: The effect of all, those that are not held too.
        local: Square of each component's effect on the layer's own output, likewise.
        local_total: The effect of all on it.
        means: Mean of what the layer reads, (groups, inner), and of what it makes of it without its bias, (groups,
            outer); None where there is no bias to take up a change, or no calibration.
    """

    left: Tensor
    right: Tensor
    energy: Tensor
    total: float
    local: Tensor
    local_total: float
    means: tuple[Tensor, Tensor] | None

    @property
    def most(self) -> int:
        """The largest rank that can be had."""
        return self.left.shape[-1]

    def tails(self) -> Tensor:  # (components + 1,)
        """What is lost at each rank from 0 on, of :attr:`energy`."""
        return _tails(self.energy, self.total)

    def local_error(self, rank: int) -> float:
        """Predicted relative error of the layer's own output."""
        tail = _tails(self.local, self.local_total)[min(rank, self.most)].item()
        return (tail / self.local_total) ** 0.5 if self.local_total > 0 else 0.0


def _tails(energy: Tensor, total: float) -> Tensor:
    kept = torch.cat((energy.new_zeros(1), energy.cumsum(0)))
    return (total - kept).clamp_min(0)


def fit(target: Target, statistics: Statistics | None, *, most: int, seed: int, drifted: Drifted | None = None) -> Fit:
    """Components of a target's weight in the metric of its statistics, or in the plain one without.

    Args:
        target: The weight.
        statistics: Of its inputs, and of its gradients if there are any.
        most: Components to hold; more are of no use.
        seed: Of the randomized SVD.
        drifted: What the layer reads once those before it are compressed; the weight is then fitted to make of that
            what the original makes of the original's input.
    """
    W, dtype = target.matrices(), wide(target)
    if statistics is None:
        left, sigma, right = _leading(W, most, seed)
        energy, total = sigma.square().sum(0), W.square().sum().item()
        return Fit((left * sigma[:, None, :]).to(dtype), right.to(dtype), energy, total, energy, total, None)
    A, mean, cross = statistics.A, statistics.mean, None
    source, source_mean = W, statistics.mean
    if drifted is not None:
        A, mean, cross = drifted.A, drifted.mean, drifted.cross
    biased = has_bias(target)
    if biased:
        A = A - _outer(mean, mean)
        cross = None if cross is None else cross - _outer(source_mean, mean)
    L = _root(A)
    if cross is not None:  # the regression of the original's output on the new input: W C A^-1
        source = torch.cholesky_solve((W @ cross).mT, L).mT
    R = None if statistics.G is None else _root(statistics.G).mT
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
        sigma.square().sum(0),
        M.square().sum().item(),
        local,
        WL.square().sum().item(),
        (mean, (W @ source_mean[..., None])[..., 0]) if biased else None,
    )


def wide(target: Target) -> torch.dtype:
    """What a target's factors are held in: float32, or its own dtype if that is wider."""
    return torch.promote_types(target.weight.dtype, torch.float32)


def components(target: Target, share: float) -> int:
    """How many components of a target to hold where all may keep ``share`` of their bytes.

    All that are of use; of large weights twice what a uniform rank needs, so that from a budget of a quarter on down
    the randomized SVD finds them.
    """
    most = rank_limit(target)
    if min(target.inner, target.outer) < _LARGE:
        return most
    return max(min(most, int(2 * share * most)) // 2 * 2, LEAST_RANK)


def has_bias(target: Target) -> bool:
    """Whether every layer of a target has a bias, which can take up a change of the mean."""
    return all(getattr(module, "bias", None) is not None for module in target.modules)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, :, None] * y[:, None, :]


def _root(A: Tensor) -> Tensor:  # (groups, n, n)
    """Lower triangular L with L L^T = A and a ridge. Where A is zero, the identity."""
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
    """Leading singular triplets of each group, (groups, m, r), (groups, r), (groups, r, n)."""
    least = min(M.shape[-2:])
    if least >= _LARGE and 4 * most <= least:
        result = randomized_svd(M, most, oversample=most // 4, seed=seed)
        return result.U, result.S, result.V.mT
    left, sigma, right = torch.linalg.svd(M, full_matrices=False)
    most = min(most, least)
    return left[..., :most], sigma[..., :most], right[..., :most, :]


def convert(target: Target, found: Fit, rank: int, seed: int) -> dict[nn.Module, nn.Module]:
    """A fitted layer of even rank for each of the target's, which share their factors."""
    left, right = _balanced(found.left[..., :rank], found.right[..., :rank, :])
    change: Tensor | float = 0.0
    if found.means is not None:
        mean, exact = found.means
        change = (exact - (left.double() @ (right.double() @ mean[..., None]))[..., 0]).flatten()
    new: dict[nn.Module, nn.Module] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        for module in target.modules:
            make = _conv if isinstance(module, nn.Conv2d) else _linear
            _take(new, module, make(module, left, right, seed), change)  # type: ignore[arg-type]
    return new


def convert_plainly(target: Target, num_terms: int, low_rank: int, init: str, seed: int) -> dict[nn.Module, nn.Module]:
    """A layer for each of the target's by :meth:`SKLinear.from_linear` or :meth:`SKConv2d.from_conv`."""
    new: dict[nn.Module, nn.Module] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        for module in target.modules:
            if isinstance(module, nn.Conv2d):
                layer: SKLinear | SKConv2d = SKConv2d.from_conv(module, num_terms, low_rank, init=init, seed=seed)
            else:
                layer = SKLinear.from_linear(_as_linear(module), num_terms, low_rank, init=init, seed=seed)
            _take(new, module, layer, 0.0)
    return new


def _take(
    new: dict[nn.Module, nn.Module], module: nn.Module, layer: SKLinear | SKConv2d, change: Tensor | float
) -> None:
    """Finish the layer that replaces a module: its bias, and the factors it shares with the first one."""
    bias = getattr(module, "bias", None)
    if bias is not None:
        with torch.no_grad():
            layer.bias.copy_(bias + change)  # type: ignore[union-attr]
    first = next(iter(new.values()), layer)
    for name in ("S1", "S2", "U1", "U2") if first is not layer else ():
        if name in first._parameters:
            layer.register_parameter(name, first._parameters[name])
    new[module] = layer


def inherit_flags(replacement: Mapping[nn.Module, nn.Module]) -> None:
    """Give new layers the training mode of the old ones, and freeze what was frozen."""
    for old, new in replacement.items():
        new.train(old.training)
        for name, parameter in new.named_parameters():
            like = old._parameters["bias" if name == "bias" else "weight"]
            parameter.requires_grad_(like is not None and like.requires_grad)


def _as_linear(module: nn.Module) -> nn.Linear:
    """An nn.Linear with the weight of a module, which may be transformers' Conv1D."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    weight = nn.Parameter(weight.detach().mT if is_conv1d(module) else weight.detach())
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = weight
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach())
    return linear.train(module.training)


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with left^T left = right right^T, diagonal and falling: the factors that train best."""
    Q, R = torch.linalg.qr(left)
    P, T = torch.linalg.qr(right.mT)
    U, sigma, Vt = torch.linalg.svd(R @ T.mT, full_matrices=False)
    root = sigma.sqrt()
    return Q @ (U * root[..., None, :]), (root[..., :, None] * Vt) @ P.mT


def _nonzero(left: Tensor) -> Tensor:  # (groups, outer, r) -> (groups, r)
    """Which components are not zero to rounding; they are sorted, and their norm is the root of a singular value."""
    norms = left.square().sum(1)
    return norms > norms[:, :1] * max(left.shape[1:]) * torch.finfo(left.dtype).eps


def _linear(module: nn.Module, left: Tensor, right: Tensor, seed: int) -> SKLinear:
    weight = module._parameters["weight"]
    assert weight is not None
    (out, inner), R = (left.shape[1], right.shape[2]), -(-left.shape[2] // 2)
    bias = getattr(module, "bias", None) is not None
    layer = SKLinear(inner, out, 1, R, bias=bias, dtype=weight.dtype, device=weight.device, seed=seed)
    kept = _nonzero(left)[0]
    S1, U1, S2, U2 = split_factors(right[0, kept].mT, left[0][:, kept].mT, R, seed)
    with torch.no_grad():
        layer.S1.copy_(S1)
        layer.S2.copy_(S2)
    layer.set_fitted_({"U1": U1.to(weight.dtype), "U2": U2.to(weight.dtype)})
    return layer


def _conv(module: nn.Conv2d, left: Tensor, right: Tensor, seed: int) -> SKConv2d:
    weight = module.weight
    rows = left.shape[2]
    layer = SKConv2d(
        module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding, module.dilation,
        module.groups, module.bias is not None, module.padding_mode, sketch_size=rows * module.groups // 2,
        seed=seed, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    kept = _nonzero(left)[..., None]
    level = left.square().mean().sqrt()
    U = torch.where(kept, left.mT, level * layer.U.unflatten(0, (module.groups, -1)))  # signs, which can learn
    with torch.no_grad():
        layer.S.copy_(torch.where(kept, right, 0).reshape(layer.S.shape))
    layer.set_fitted_({"U": U.flatten(0, 1).to(weight.dtype)})
    if is_channels_last(weight):
        layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return layer

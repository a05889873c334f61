"""The low-rank form: two factors in the dtype of the weight, as a :class:`~panther.nn.LowRankLinear`.

Also seeded sketches, which :func:`panther.sketch_layers_` and ``method="random"`` make without a fit.
"""

__all__ = ["LowRank", "convert_seeded"]

import torch
from torch import Tensor, nn

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import (
    LOW_RANK,
    Form,
    FormSettings,
    Option,
    Replacement,
    TargetFit,
    register,
    replace_layers,
)
from panther.compression.forms.metric import leading_components, wide_dtype
from panther.nn import LowRankConv2d, LowRankLinear
from panther.nn.protocol import CompressedModule


class LowRank(Form):
    """Two factors of even rank, in every group of a convolution."""

    name = LOW_RANK
    layers = (LowRankLinear, LowRankConv2d)
    is_default = True
    has_rank = True

    def largest_rank(self, target: Target) -> int:
        """Return the largest rank at which the factors are smaller than the weight."""
        return target.largest_rank

    def stored_bytes(self, target: Target, rank: int, settings: FormSettings) -> int:
        """Return the bytes of both factors."""
        return target.bytes(rank)

    def num_components(self, target: Target, settings: FormSettings, share: float) -> int:
        """Return as many components as a global choice may need."""
        ranks = self.ranks(target, settings)
        return max(leading_components(target, ranks[-1], share * ranks[-1]), ranks[0])

    def loss(self, fit: TargetFit, option: Option) -> tuple[float, float] | None:
        """Return the tails at the rank."""
        return fit.components.losses(option.rank or 0)

    def convert(self, target: Target, option: Option, fit: TargetFit, settings: FormSettings, seed: int) -> Replacement:
        """Return layers with the leading components, which share their factors."""
        components, rank = fit.components, option.rank or 0
        left, right = _balanced(components.left[..., :rank], components.right[..., :rank, :])
        change: Tensor | float = 0.0
        if components.means is not None:
            mean, exact = components.means
            # In float64, and from the rounded factors, so that the bias also corrects for their rounding.
            change = (exact - (left.double() @ (right.double() @ mean[..., None]))[..., 0]).flatten()
        return replace_layers(target, lambda module: _layer(target, module, left, right, seed), change)

    def random_layer(self, target: Target, module: nn.Module, option: Option, settings: FormSettings) -> nn.Module:
        """Return a layer with normal factors."""
        like, rank, dtype = target.weight, option.rank or 0, wide_dtype(target)
        left = torch.randn(target.groups, target.outer, rank, dtype=dtype, device=like.device) / rank**0.5
        right = torch.randn(target.groups, rank, target.inner, dtype=dtype, device=like.device) / target.inner**0.5
        return _layer(target, module, left, right, 0)


register(LowRank())


def convert_seeded(target: Target, num_terms: int, low_rank: int, init: str, seed: int) -> Replacement:
    """Make a new layer for each layer of the target from a seed; see :meth:`WeightKind.seeded_layer`."""
    return replace_layers(target, lambda module: target.kind.seeded_layer(module, num_terms, low_rank, init, seed))


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors of the same product with left^T left = right right^T, a falling diagonal: these train best."""
    Q, R = torch.linalg.qr(left)
    P, T = torch.linalg.qr(right.mT)
    U, sigma, Vt = torch.linalg.svd(R @ T.mT, full_matrices=False)
    root = sigma.sqrt()
    return Q @ (U * root[..., None, :]), (root[..., :, None] * Vt) @ P.mT


def _layer(target: Target, module: nn.Module, left: Tensor, right: Tensor, seed: int) -> CompressedModule:
    """Return a layer with the factors (groups, outer, rank) and (groups, rank, inner), and a bias of zeros."""
    layer: CompressedModule = target.kind.low_rank_layer(module, left, right, seed)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer

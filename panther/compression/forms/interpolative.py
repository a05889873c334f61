"""The interpolative form: some rows or columns of the weight and the coefficients of the remaining ones."""

__all__ = ["Interpolative"]

import copy

from torch import Tensor, nn

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import Form, FormSettings, Option, Replacement, TargetFit, register, replace_layers
from panther.compression.forms.metric import leading_components
from panther.nn import InterpolativeLinear
from panther.nn.interpolative import stored_bytes


class Interpolative(Form):
    """The low-rank matrix of the same rank, in fewer numbers; linear layers only."""

    name = "interpolative"
    layers = (InterpolativeLinear,)
    is_default = True
    has_rank = True

    def accepts(self, target: Target) -> bool:
        """Return whether the weight belongs to linear layers."""
        return target.kind.is_linear

    def largest_rank(self, target: Target) -> int:
        """Return the smaller dimension of the weight."""
        return min(target.inner, target.outer)

    def stored_bytes(self, target: Target, rank: int, settings: FormSettings) -> int:
        """Return the bytes of skeleton, coefficients and order."""
        return stored_bytes(target.inner, target.outer, rank, target.weight.dtype)

    def num_components(self, target: Target, settings: FormSettings, share: float) -> int:
        """Return as many components as a global choice may need."""
        ranks = self.ranks(target, settings)
        half = (target.inner + target.outer) / 2
        # The rank r at which r (inner + outer - r) numbers are `share` of the dense ones.
        uniform = half - max(half**2 - share * target.dense_numbers, 0.0) ** 0.5
        return max(leading_components(target, ranks[-1], uniform), ranks[0])

    def loss(self, fit: TargetFit, option: Option) -> tuple[float, float] | None:
        """Return the tails at the rank."""
        return fit.components.losses(option.rank or 0)

    def convert(self, target: Target, option: Option, fit: TargetFit, settings: FormSettings, seed: int) -> Replacement:
        """Return layers with the leading components, which share skeleton, coefficients and order."""
        components, rank = fit.components, option.rank or 0
        # The bias is computed from the rounded numbers of this layer, so that it also corrects for their rounding.
        like = target.weight
        first = InterpolativeLinear(target.inner, target.outer, rank, bias=False, device=like.device, dtype=like.dtype)
        first.set_factors_(components.left[0, :, :rank], components.right[0, :rank])
        change: Tensor | float = 0.0
        if components.means is not None:
            left, right = copy.deepcopy(first).double().factors()
            change = (components.means[1][0] - left @ (right @ components.means[0][0])).detach()

        def make(module: nn.Module) -> InterpolativeLinear:
            layer = _layer(target, module, rank)
            for name in first.stored_names():
                setattr(layer, name, getattr(first, name))
            return layer

        return replace_layers(target, make, change)

    def random_layer(
        self, target: Target, module: nn.Module, option: Option, settings: FormSettings
    ) -> InterpolativeLinear:
        """Return a new layer, with the random numbers of its constructor."""
        return _layer(target, module, option.rank or 0)


register(Interpolative())


def _layer(target: Target, module: nn.Module, rank: int) -> InterpolativeLinear:
    has_bias, like = getattr(module, "bias", None) is not None, target.weight
    return InterpolativeLinear(target.inner, target.outer, rank, bias=has_bias, device=like.device, dtype=like.dtype)

"""Forms with low-rank factors in 8 bits: alone, or as a correction of what codes leave."""

__all__: list[str] = []

from torch import nn

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import Form, FormSettings, Option, Replacement, TargetFit, register
from panther.compression.forms.codes import WIDTHS, Codes, convert_quantized
from panther.compression.forms.metric import leading_components
from panther.nn import QuantizedConv2d, QuantizedLinear

# Largest rank of a correction. The rounding error has nearly equal singular values, so that higher ranks cost more
# bytes than they save.
_LARGEST_CORRECTION = 64


class CorrectedCodes(Codes):
    """Codes of one width, and a low-rank correction of their error in 8 bits."""

    is_default = False
    has_rank = True
    fits_every_kind = False

    def __init__(self, bits: int) -> None:
        """Make the form of codes with this number of bits, and a correction."""
        super().__init__(bits)
        self.name = f"int{bits}+low_rank"

    def accepts(self, target: Target) -> bool:
        """Return whether the weight is one matrix; components of several would be in none of their metrics."""
        return target.groups == 1

    def stored_bytes(self, target: Target, rank: int, settings: FormSettings) -> int:
        """Return the bytes of codes, scales, zeros and factors; an adapter has factors of the weight's dtype."""
        if settings.reader is None:
            return super().stored_bytes(target, rank, settings)
        factors = rank * (target.inner + target.outer) * target.weight.element_size()
        return super().stored_bytes(target, 0, settings) + factors

    def largest_rank(self, target: Target) -> int:
        """Return the largest rank of the correction."""
        return min(target.inner, target.outer, _LARGEST_CORRECTION)

    def correction_rank(self, target: Target, settings: FormSettings) -> int:
        """Return the largest rank of the correction."""
        return self.ranks(target, settings)[-1]


class Int8LowRank(Form):
    """Low-rank factors in 8 bits, without codes."""

    name = "int8_low_rank"
    layers = (QuantizedLinear, QuantizedConv2d)
    has_rank = True
    is_quantized = True

    def accepts(self, target: Target) -> bool:
        """Return whether the weight is one matrix; components of several would be in none of their metrics."""
        return target.groups == 1

    def largest_rank(self, target: Target) -> int:
        """Return the smaller dimension of the weight."""
        return min(target.inner, target.outer)

    def stored_bytes(self, target: Target, rank: int, settings: FormSettings) -> int:
        """Return the bytes of factors and scales."""
        return target.kind.code_bytes(target, None, rank, settings.group_size)

    def num_components(self, target: Target, settings: FormSettings, share: float) -> int:
        """Return as many components as a global choice may need."""
        ranks = self.ranks(target, settings)
        uniform = share * target.dense_bytes / (target.inner + target.outer)
        return max(leading_components(target, ranks[-1], uniform), ranks[0])

    def loss(self, fit: TargetFit, option: Option) -> tuple[float, float] | None:
        """Return the tails at the rank, and the effect of rounding the factors."""
        return fit.components.losses(option.rank or 0, rounded=True)

    def convert(self, target: Target, option: Option, fit: TargetFit, settings: FormSettings, seed: int) -> Replacement:
        """Return quantized layers that have only factors."""
        return convert_quantized(target, option, fit.components, None, settings)

    def random_layer(self, target: Target, module: nn.Module, option: Option, settings: FormSettings) -> nn.Module:
        """Return a new layer, with the random factors of its constructor."""
        layer: nn.Module = target.kind.quantized_layer(target, module, None, option.rank or 0, settings)
        return layer


register(Int8LowRank(), *map(CorrectedCodes, WIDTHS))

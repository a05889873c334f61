"""The quantized forms: codes of 2 to 8 bits with a scale and a zero for each group of a row's columns."""

__all__ = ["WIDTHS", "Codes", "convert_quantized"]

from torch import Tensor, nn

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import Form, FormSettings, Option, Replacement, TargetFit, register, replace_layers
from panther.compression.forms.metric import Fit
from panther.compression.forms.rounding import QuantizedWeight
from panther.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedExperts, QuantizedLinear
from panther.nn.quantized.grid import round_factors
from panther.nn.quantized.matrix import QuantizedMatrix

WIDTHS = (8, 6, 5, 4, 3, 2)


class Codes(Form):
    """Codes of one width, rounded with error feedback (:mod:`.rounding`)."""

    bits: int
    layers = (QuantizedLinear, QuantizedConv2d, QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedExperts)
    uses_rounding = True
    is_default = True
    is_quantized = True
    fits_every_kind = True

    def __init__(self, bits: int) -> None:
        """Make the form of codes with this number of bits."""
        self.name, self.bits = f"int{bits}", bits

    def stored_bytes(self, target: Target, rank: int, settings: FormSettings) -> int:
        """Return the bytes of codes, scales and zeros."""
        return target.kind.code_bytes(target, self.bits, rank, settings.group_size)

    def loss(self, fit: TargetFit, option: Option) -> tuple[float, float] | None:
        """Return the losses of the codes, and of a correction of rank ``option.rank`` in 8 bits."""
        if self.bits not in fit.codes:
            return None
        return fit.codes[self.bits].residual.losses(option.rank or 0, rounded=True)

    def convert(self, target: Target, option: Option, fit: TargetFit, settings: FormSettings, seed: int) -> Replacement:
        """Return quantized layers."""
        codes = fit.codes[self.bits]
        return convert_quantized(target, option, codes.residual, codes.weight, settings)

    def random_layer(self, target: Target, module: nn.Module, option: Option, settings: FormSettings) -> nn.Module:
        """Return a new layer, with the random codes of its constructor."""
        layer: nn.Module = target.kind.quantized_layer(target, module, option.bits, option.rank or 0, settings)
        return layer


register(*map(Codes, WIDTHS))


def convert_quantized(
    target: Target, option: Option, fit: Fit, weight: QuantizedWeight | None, settings: FormSettings
) -> Replacement:
    """Make a quantized layer for each layer of the target, of ``weight`` if given, and the components in int8."""
    rank = option.rank or 0
    # The components are not balanced, because the fit predicted the rounding errors of these components.
    factors = round_factors(fit.left[0, :, :rank], fit.right[0, :rank]) if rank else None
    change: Tensor | float = 0.0
    if fit.means is not None:
        mean, exact = fit.means
        change = exact.flatten()
        if weight is not None:
            matrices = weight.dense().unflatten(0, exact.shape)
            change = change - (matrices @ mean[..., None]).flatten()
        if factors is not None:  # a grouped convolution has no factors
            left, right, scales = (part.double() for part in factors)
            change = change - left @ (scales * (right @ mean[0]))

    def make(module: nn.Module) -> QuantizedMatrix:
        layer: QuantizedMatrix = target.kind.quantized_layer(target, module, option.bits, rank, settings)
        if weight is not None:
            layer.set_codes_(weight.codes, weight.scales, weight.zeros)
        if factors is not None:
            layer.set_factors_(*factors)
        return layer

    return replace_layers(target, make, change, share_buffers=True)

"""Make sketched and quantized layers that replace dense layers: from fits, in sequence, or from a seed alone."""

__all__ = [
    "Replacement", "convert", "convert_all", "convert_in_sequence", "convert_interpolative", "convert_quantized",
    "convert_seeded", "convert_target", "inherit_flags", "random_layer",
]  # fmt: skip

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from panther._torch import buffers_of, parameters_of
from panther.compression.fits import Fit, factor, metric_of, wide_dtype
from panther.compression.forms.fitting import Fits
from panther.compression.forms.options import DENSE, INTERPOLATIVE, LOW_RANK, Choice, Forms, Option
from panther.compression.forms.quantization import QuantizedWeight
from panther.compression.forms.quantized import QuantizedFit, fit_quantized
from panther.compression.moments import gather_drift
from panther.compression.runner import Runner
from panther.compression.targets import Survey, Target, replace_modules
from panther.errors import PerformanceWarning
from panther.nn import InterpolativeLinear, QuantizedConv2d, QuantizedLinear, SKConv2d, SKLinear
from panther.nn.base import CompressedModule
from panther.nn.convolution import is_channels_last
from panther.nn.factors import split_factors
from panther.nn.quantized.grid import round_factors

Replacement = dict[nn.Module, nn.Module]
"""The new layer of each old layer."""


def convert_all(survey: Survey, fits: Fits, choice: Choice, seed: int) -> Replacement:
    """Make the new layers of the chosen forms: fitted ones, or seeded sketches where nothing was fitted."""
    new: Replacement = {}
    for target, target_seed in survey.seeds(seed).items():
        new |= convert_target(target, fits, choice[target], target_seed)
    return new


def convert_target(target: Target, fits: Fits, option: Option, seed: int) -> Replacement:
    """Make the new layers of one weight; ``seed`` is the seed of this weight, not the call's."""
    new: Replacement = {}
    if target in fits.fits:
        quantized_fit = None if option.bits is None else fits.quantized[target][option.bits]
        new = _convert_fitted(target, option, fits.fits[target], quantized_fit, fits.group_size, seed)
    elif option.rank is not None:
        new = convert_seeded(target, 1, option.rank // 2, "random", seed)
    return _rounding_inputs(new, fits.activations)


def convert_in_sequence(runner: Runner, survey: Survey, fits: Fits, choice: Choice, seed: int) -> Replacement:
    """Make the new layers one after another, each fitted to its input in the model with the earlier new layers."""
    seeds = survey.seeds(seed)
    new: Replacement = {}
    for number, targets in enumerate(fits.inputs):
        choices = [(target, option) for target in targets if (option := choice[target]).form != DENSE]
        if not choices:
            continue
        compressed = partial(replace_modules, runner.model, dict(new))
        description = f"sequential {number + 1}/{len(fits.inputs)}"
        drift = gather_drift(runner, targets, fits.moments, compressed, description)
        for target, option in choices:
            metric = metric_of(target, fits.moments[target], drift[target] if drift else None, fits.ridge)
            target_seed, rank, dtype = seeds[target], option.rank or 0, wide_dtype(target)
            quantized, components = None, rank
            if option.bits is not None:
                quantized_fits = fit_quantized(
                    metric, [option.bits], fits.group_size, most=rank, seed=target_seed, dtype=dtype
                )
                quantized, components = quantized_fits[option.bits], 0
            fit = factor(metric.source, metric, most=components, seed=target_seed, dtype=dtype)
            new |= _convert_fitted(target, option, fit, quantized, fits.group_size, target_seed)
    return _rounding_inputs(new, fits.activations)


def _convert_fitted(
    target: Target, option: Option, fit: Fit, quantized: QuantizedFit | None, group_size: int | None, seed: int
) -> Replacement:
    if option.form == DENSE:
        return {}
    if option.form == LOW_RANK:
        return convert(target, fit, option.rank or 0, seed)
    if option.form == INTERPOLATIVE:
        return convert_interpolative(target, fit, option.rank or 0)
    return convert_quantized(
        target,
        option.rank or 0,
        fit if quantized is None else quantized.residual,
        None if quantized is None else quantized.weight,
        option.bits,
        group_size,
    )


def convert(target: Target, fit: Fit, rank: int, seed: int) -> Replacement:
    """Make a fitted layer of even rank for each layer of the target; the new layers share their factors."""
    left, right = _balanced(fit.left[..., :rank], fit.right[..., :rank, :])
    change: Tensor | float = 0.0
    if fit.means is not None:
        mean, exact = fit.means
        # In float64, and from the rounded factors, so that the bias also corrects for their rounding.
        change = (exact - (left.double() @ (right.double() @ mean[..., None]))[..., 0]).flatten()

    def make(module: nn.Module) -> SKLinear | SKConv2d:
        return _conv(module, left, right, seed) if isinstance(module, nn.Conv2d) else _linear(module, left, right, seed)

    return _replacement(target, make, change)


def convert_interpolative(target: Target, fit: Fit, rank: int) -> Replacement:
    """Make an interpolative layer for each layer of the target; they share skeleton, coefficients and order."""
    # The bias is computed from the rounded numbers of this layer, so that it also corrects for their rounding.
    like = target.weight
    first = InterpolativeLinear(target.inner, target.outer, rank, bias=False, device=like.device, dtype=like.dtype)
    first.set_factors_(fit.left[0, :, :rank], fit.right[0, :rank])
    change: Tensor | float = 0.0
    if fit.means is not None:
        left, right = copy.deepcopy(first).double().factors()
        change = (fit.means[1][0] - left @ (right @ fit.means[0][0])).detach()

    def make(module: nn.Module) -> InterpolativeLinear:
        biased = getattr(module, "bias", None) is not None
        layer = InterpolativeLinear(target.inner, target.outer, rank, bias=biased, device=like.device, dtype=like.dtype)
        for name in first.stored_names():
            setattr(layer, name, getattr(first, name))
        return layer

    return _replacement(target, make, change)


def convert_quantized(
    target: Target, rank: int, fit: Fit, weight: QuantizedWeight | None, bits: int | None, group_size: int | None
) -> Replacement:
    """Make a quantized layer for each layer of the target, of ``weight`` if given, and ``rank`` components in int8."""
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

    def make(module: nn.Module) -> QuantizedLinear | QuantizedConv2d:
        layer = _quantized(target, module, rank, bits, group_size)
        if weight is not None:
            layer.set_codes_(weight.codes, weight.scales, weight.zeros)
        if factors is not None:
            layer.set_factors_(*factors)
        return layer

    return _replacement(target, make, change)


def convert_seeded(target: Target, num_terms: int, low_rank: int, init: str, seed: int) -> Replacement:
    """Make a new layer for each layer of the target, by ``from_linear`` or ``from_conv``.

    ``low_rank`` is the rank in every group of a convolution.
    """

    def make(module: nn.Module) -> SKLinear | SKConv2d:
        if isinstance(module, nn.Conv2d):
            return SKConv2d.from_conv(module, num_terms, low_rank * target.groups, init=init, seed=seed)
        return SKLinear.from_linear(_as_linear(module), num_terms, low_rank, init=init, seed=seed)

    return _replacement(target, make)


def random_layer(target: Target, module: nn.Module, option: Option, forms: Forms) -> nn.Module:
    """Make a layer of random numbers in a form: as fast as a fitted layer, with outputs as large as its inputs."""
    like, rank, dtype = target.weight, option.rank or 0, wide_dtype(target)
    if option.form == LOW_RANK:
        left = torch.randn(target.groups, target.outer, rank, dtype=dtype, device=like.device) / rank**0.5
        right = torch.randn(target.groups, rank, target.inner, dtype=dtype, device=like.device) / target.inner**0.5
        return _conv(module, left, right, 0) if isinstance(module, nn.Conv2d) else _linear(module, left, right, 0)
    if option.form == INTERPOLATIVE:
        biased = getattr(module, "bias", None) is not None
        return InterpolativeLinear(target.inner, target.outer, rank, bias=biased, device=like.device, dtype=like.dtype)
    layer = _quantized(target, module, rank, option.bits, forms.group_size)
    return _rounding_inputs({module: layer}, forms.activations)[module]


def _rounding_inputs(new: Replacement, activations: str | None) -> Replacement:
    """Set ``activations`` of the quantized linear layers, in place, and return the layers."""
    for layer in new.values():
        if isinstance(layer, QuantizedLinear):
            layer.activations = activations
    return new


def _quantized(
    target: Target, module: nn.Module, rank: int, bits: int | None, group_size: int | None
) -> QuantizedLinear | QuantizedConv2d:
    if isinstance(module, nn.Conv2d):
        return QuantizedConv2d._in_place_of(module, bits=bits, group_size=group_size, low_rank=rank)
    return QuantizedLinear(
        target.inner, target.outer, bits, group_size=group_size, low_rank=rank,
        bias=getattr(module, "bias", None) is not None, device=target.weight.device, dtype=target.weight.dtype,
    )  # fmt: skip


def _replacement(
    target: Target, make: Callable[[nn.Module], CompressedModule], change: Tensor | float = 0.0
) -> Replacement:
    """Make a new layer for each layer of the target.

    Each new layer has the bias of its old layer plus ``change``. All share the factors and codes of the first one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # the report lists the speed of every layer
        new = {module: make(module) for module in target.modules}
    first = new[target.modules[0]]
    for module, layer in new.items():
        bias = getattr(module, "bias", None)
        if bias is not None:
            with torch.no_grad():
                layer.get_parameter("bias").copy_(bias + change)
        for name in parameters_of(first).keys() - {"bias"}:
            layer.register_parameter(name, parameters_of(first)[name])
        if isinstance(first, QuantizedLinear | QuantizedConv2d):
            buffers_of(layer).update(buffers_of(first))
    return dict(new)


def inherit_flags(replacement: Mapping[nn.Module, nn.Module]) -> None:
    """Give new layers the training mode of the old ones and the ``requires_grad`` flags of their parameters."""
    for old, new in replacement.items():
        new.train(old.training)
        for name, parameter in new.named_parameters():
            like = parameters_of(old)["bias" if name == "bias" else "weight"]
            parameter.requires_grad_(like is not None and like.requires_grad)


def _as_linear(module: nn.Module) -> nn.Linear:
    """Return the module itself, or an nn.Linear with the weight and bias of transformers' Conv1D."""
    if isinstance(module, nn.Linear):
        return module
    weight, bias = module.get_parameter("weight").detach(), module.get_parameter("bias").detach()
    linear = nn.Linear(weight.shape[0], weight.shape[1], device="meta")  # takes no memory
    linear.weight, linear.bias = nn.Parameter(weight.mT), nn.Parameter(bias)
    return linear.train(module.training)


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors of the same product with left^T left = right right^T, a falling diagonal: these train best."""
    Q, R = torch.linalg.qr(left)
    P, T = torch.linalg.qr(right.mT)
    U, sigma, Vt = torch.linalg.svd(R @ T.mT, full_matrices=False)
    root = sigma.sqrt()
    return Q @ (U * root[..., None, :]), (root[..., :, None] * Vt) @ P.mT


def _nonzero(left: Tensor) -> Tensor:  # (groups, outer, r) -> (groups, r)
    """Return which components are not zero to rounding.

    The components are sorted, and the norm of each is the root of a singular value.
    """
    norms = left.square().sum(1)
    return norms > norms[:, :1] * max(left.shape[1:]) * torch.finfo(left.dtype).eps


def _linear(module: nn.Module, left: Tensor, right: Tensor, seed: int) -> SKLinear:
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None) is not None
    inner, out, R = right.shape[2], left.shape[1], -(-left.shape[2] // 2)
    # On the meta device, because values would be drawn only to be replaced below.
    layer = SKLinear(inner, out, 1, R, bias=bias, dtype=weight.dtype, device="meta", seed=seed)
    # Columns that stay zero would never learn; split_factors gives them zero S and random signs in U.
    nonzero = _nonzero(left)[0]
    S1, U1, S2, U2 = split_factors(right[0, nonzero].mT, left[0][:, nonzero].mT, R, seed)
    layer.S1, layer.S2 = nn.Parameter(S1.to(weight.dtype)), nn.Parameter(S2.to(weight.dtype))
    if bias:
        layer.bias = nn.Parameter(weight.new_zeros(out))
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
    nonzero = _nonzero(left)[..., None]
    level = left.square().mean().sqrt()
    # Rows of zeros in both factors would never learn, so the rows of U get random signs.
    U = torch.where(nonzero, left.mT, level * layer.U.unflatten(0, (module.groups, -1)))
    with torch.no_grad():
        layer.S.copy_(torch.where(nonzero, right, 0).reshape(layer.S.shape))
    layer.set_fitted_({"U": U.flatten(0, 1).to(weight.dtype)})
    if is_channels_last(weight):
        layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return layer

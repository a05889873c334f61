"""The low-rank form: two factors in the dtype of the weight, as a fitted :class:`~panther.nn.SKLinear`.

Also seeded sketches, which :func:`panther.sketch_layers_` and ``method="random"`` make without a fit.
"""

__all__ = ["convert_low_rank", "convert_seeded"]

import torch
from torch import Tensor, nn

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import LOW_RANK, Form, FormSettings, Option, TargetFit, register
from panther.compression.forms.metric import Fit, leading_components, wide_dtype
from panther.compression.forms.replacement import Replacement, replace_layers
from panther.nn import SKConv2d, SKLinear
from panther.nn.conv.product import is_channels_last
from panther.nn.factors import split_factors


class LowRank(Form):
    """Two factors of even rank, in every group of a convolution."""

    name = LOW_RANK
    layers = (SKLinear, SKConv2d)
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
        """Return layers with the leading components."""
        return convert_low_rank(target, fit.components, option.rank or 0, seed)

    def random_layer(self, target: Target, module: nn.Module, option: Option, settings: FormSettings) -> nn.Module:
        """Return a layer with normal factors."""
        like, rank, dtype = target.weight, option.rank or 0, wide_dtype(target)
        left = torch.randn(target.groups, target.outer, rank, dtype=dtype, device=like.device) / rank**0.5
        right = torch.randn(target.groups, rank, target.inner, dtype=dtype, device=like.device) / target.inner**0.5
        return _layer(module, left, right, 0)


register(LowRank())


def convert_low_rank(target: Target, fit: Fit, rank: int, seed: int) -> Replacement:
    """Make a fitted layer of even rank for each layer of the target; the new layers share their factors."""
    left, right = _balanced(fit.left[..., :rank], fit.right[..., :rank, :])
    change: Tensor | float = 0.0
    if fit.means is not None:
        mean, exact = fit.means
        # In float64, and from the rounded factors, so that the bias also corrects for their rounding.
        change = (exact - (left.double() @ (right.double() @ mean[..., None]))[..., 0]).flatten()
    return replace_layers(target, lambda module: _layer(module, left, right, seed), change)


def convert_seeded(target: Target, num_terms: int, low_rank: int, init: str, seed: int) -> Replacement:
    """Make a new layer for each layer of the target, by ``from_linear`` or ``from_conv``.

    ``low_rank`` is the rank in every group of a convolution.
    """

    def make(module: nn.Module) -> SKLinear | SKConv2d:
        if isinstance(module, nn.Conv2d):
            return SKConv2d.from_conv(module, num_terms, low_rank * target.groups, init=init, seed=seed)
        return SKLinear.from_linear(_as_linear(module), num_terms, low_rank, init=init, seed=seed)

    return replace_layers(target, make)


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


def _layer(module: nn.Module, left: Tensor, right: Tensor, seed: int) -> SKLinear | SKConv2d:
    return _conv(module, left, right, seed) if isinstance(module, nn.Conv2d) else _linear(module, left, right, seed)


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

"""Weights of nn.Linear, and of transformers' Conv1D, whose weight is transposed."""

__all__ = ["DOUBLE", "LinearKind", "MatrixKind", "is_conv1d"]

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from panther.compression.calibration.targets import Target, WeightKind, register_kind
from panther.compression.forms.base import FormSettings
from panther.compression.forms.codes import sensitivity
from panther.compression.forms.metric import metric_of
from panther.compression.moments import Moments, Sums
from panther.nn import LowRankLinear, MonarchLinear, QuantizedLinear, SKLinear
from panther.nn.factors import overrides_forward
from panther.nn.quantized import stored_bytes
from panther.nn.quantized.matrix import QuantizedMatrix

DOUBLE = torch.float64.itemsize


class MatrixKind(WeightKind):
    """Weights that multiply rows of their input, and are fitted in one metric of inputs and outputs.

    A kind of such weights has to define ``classes`` and :meth:`quantized_layer`. If the weight does not multiply the
    last dimension of the input, it also defines :meth:`input_rows` and :meth:`gradient_rows`.
    """

    def sums(self, targets: Sequence[Target], gradients: bool, device: torch.device) -> Any:
        """Return the sums of products of inputs, and of gradients."""
        return Sums(targets, gradients, device)

    def moments_bytes(self, targets: Sequence[Target], gradients: bool) -> int:
        """Return the bytes of A, which targets share without gradients, and of the G of each."""
        A = targets[0].groups * targets[0].inner ** 2 * (len(targets) if gradients else 1)
        return DOUBLE * (A + gradients * sum(target.groups * target.outer**2 for target in targets))

    def sensitivity(self, target: Target, moments: Moments | None, ridge: float) -> float:
        """Return the loss of codes, up to a factor that depends on their width alone."""
        return sensitivity(metric_of(target, moments, ridge=ridge))

    def code_bytes(self, target: Target, width: int | None, rank: int, group_size: int | None) -> int:
        """Return the bytes of codes, scales, zeros and the factors of a correction, as ``QuantizedMatrix`` has them."""
        rows = target.groups * target.outer
        return stored_bytes(target.inner, rows, width, group_size=group_size, low_rank=rank)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer whose weight is (in, out)."""
    kind = type(module)  # compared by name, because this check must not import transformers
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


class LinearKind(MatrixKind):
    """A matrix (out, in) that multiplies the last dimension of the input."""

    classes: tuple[type[nn.Module], ...] = (nn.Linear,)
    takes_every_form = True
    is_linear = True

    def holds(self, module: nn.Module) -> bool:
        """Return whether a layer is an nn.Linear or a Conv1D."""
        return super().holds(module) or is_conv1d(module)

    def why_never_called(self, module: nn.Module) -> str | None:
        """Return the reason for the output projection of torch's attention."""
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return "belongs to nn.MultiheadAttention, which reads its weight and never calls it"
        return None

    def can_share(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether the layers are nn.Linear of one class."""
        return len(set(map(type, modules))) == 1 and isinstance(modules[0], nn.Linear)

    def shape(self, module: nn.Module) -> tuple[int, int, int]:
        """Return one group, and the features of input and output."""
        rows, columns = module.get_parameter("weight").shape
        return (1, rows, columns) if is_conv1d(module) else (1, columns, rows)

    def matrices(self, target: Target) -> Tensor:  # (1, outer, inner), float64
        """Return the weight as (out, in)."""
        weight = target.weight.detach().to(torch.float64)
        return (weight.mT if is_conv1d(target.modules[0]) else weight)[None]

    def quantized_layer(
        self, target: Target, module: nn.Module, bits: int | None, rank: int, settings: FormSettings
    ) -> QuantizedMatrix:
        """Return a QuantizedLinear."""
        layer = QuantizedLinear(
            target.inner, target.outer, bits, group_size=settings.group_size, low_rank=rank,
            bias=getattr(module, "bias", None) is not None, device=target.weight.device, dtype=target.weight.dtype,
        )  # fmt: skip
        layer.activations = settings.activations
        return layer

    def low_rank_layer(self, module: nn.Module, left: Tensor, right: Tensor, seed: int) -> LowRankLinear:
        """Return a LowRankLinear."""
        weight, has_bias = module.get_parameter("weight"), getattr(module, "bias", None) is not None
        # On the meta device, because values would be drawn only to be replaced below.
        options: Any = {"bias": has_bias, "device": "meta", "dtype": weight.dtype}
        layer = LowRankLinear(right.shape[2], left.shape[1], left.shape[2], **options).to_empty(device=weight.device)
        return layer.set_factors_(left[0], right[0], seed)

    def seeded_layer(
        self, module: nn.Module, num_terms: int, low_rank: int, init: str, seed: int
    ) -> SKLinear | LowRankLinear:
        """Return a layer that ``from_linear`` makes."""
        linear = _as_linear(module)
        if init == "svd":
            return LowRankLinear.from_linear(linear, 2 * num_terms * low_rank, seed=seed)
        return SKLinear.from_linear(linear, num_terms, low_rank, init=init, seed=seed)

    def monarch_layer(self, module: nn.Module, fraction: float, seed: int) -> MonarchLinear:
        """Return the layer that ``from_linear`` makes."""
        return MonarchLinear.from_linear(_as_linear(module), fraction=fraction, seed=seed)


def _as_linear(module: nn.Module) -> nn.Linear:
    """Return an nn.Linear with the weight and bias of a subclass that overrides the forward, or of a Conv1D."""
    if not isinstance(module, nn.Linear):
        weight, bias = module.get_parameter("weight").detach(), module.get_parameter("bias").detach()
        linear = nn.Linear(weight.shape[0], weight.shape[1], device="meta")  # takes no memory
        linear.weight, linear.bias = nn.Parameter(weight.mT), nn.Parameter(bias)
        return linear.train(module.training)
    if overrides_forward(module, nn.Linear):  # `include` names its type
        module = copy.copy(module)
        module.__class__ = nn.Linear
    return module


register_kind(LinearKind())

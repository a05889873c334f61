"""Conversion of compressed layers to nn.Linear, convolutions and embeddings, for tools that know only these."""

__all__ = ["LinearsReport", "ReplacedLayer", "expanded", "plain_pairs", "reason_to_skip", "to_linears_"]

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from panther._model_libraries import layers_replaced
from panther._text import counted, format_table
from panther._torch import buffers_of, parameters_of
from panther.nn.base import CompressedModule, keep_own_forward
from panther.nn.conv import SKConv1d, SKConv2d, SKConv3d
from panther.nn.conv.padded import dense_conv
from panther.nn.factors import overrides_forward
from panther.nn.interpolative import InterpolativeLinear
from panther.nn.linear import SKLinear
from panther.nn.low_rank import LowRankConv2d, LowRankLinear
from panther.nn.quantized import (
    QuantizedConv2d,
    QuantizedEmbedding,
    QuantizedEmbeddingBag,
    QuantizedExperts,
    QuantizedLinear,
)
from panther.nn.quantized.matrix import QuantizedMatrix
from panther.nn.quantized.stacked import StackedExperts, put_layer
from panther.nn.sketch_record import plain_state

_CONVOLUTIONS = (SKConv1d, SKConv2d, SKConv3d, LowRankConv2d, QuantizedConv2d)
_TABLES = (QuantizedEmbedding, QuantizedEmbeddingBag)
_KNOWN = (*_CONVOLUTIONS, *_TABLES, SKLinear, LowRankLinear, QuantizedLinear, QuantizedExperts, InterpolativeLinear)


class ReplacedLayer(NamedTuple):
    """A layer that :func:`panther.to_linears_` replaced."""

    name: str
    """The name in the model. A layer with more than one name is listed under each name."""
    kind: str
    """The class of the replaced layer."""
    became: str
    """The replacement."""
    bytes_before: int
    """Bytes of the parameters and persistent buffers of the replaced layer."""
    bytes_after: int
    """Bytes of the parameters and persistent buffers of the replacement."""


@dataclass(frozen=True)
class LinearsReport:
    """The result of :func:`panther.to_linears_`, as a table if printed."""

    replaced: tuple[ReplacedLayer, ...]
    skipped: tuple[tuple[str, str], ...]
    """Names of the compressed layers that were not replaced, each with the reason."""

    def __str__(self) -> str:
        """Return a line for each layer."""
        lines = [f"replaced {counted(len(self.replaced), 'layer')}, skipped {len(self.skipped)}"]
        if self.replaced:
            heading = ("layer", "kind", "became", "bytes before", "bytes after")
            rows = [(*layer[:3], f"{layer.bytes_before:,}", f"{layer.bytes_after:,}") for layer in self.replaced]
            lines.append(format_table([heading, *rows], "<<<>>"))
        lines += [f"skipped: {name}, {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


class ConvPair(nn.Sequential):
    """Two convolutions, the first without bias and the second of width 1, that replace one.

    It has the weight and the bias of the convolution that it replaces, because models read them (ViT reads the dtype).
    """

    @property
    def weight(self) -> Tensor:  # (out, in / groups, *kernel_size)
        """The product of both weights, for inspection; computed at each access."""
        first, second = self
        kernel, mix = first.get_parameter("weight"), second.get_parameter("weight")
        groups: Any = first.groups
        inner, outer = (each.flatten(1).unflatten(0, (groups, -1)) for each in (kernel, mix))
        return torch.reshape(outer @ inner, (len(mix), *kernel.shape[1:]))

    @property
    def bias(self) -> Tensor | None:  # (out,)
        """The bias of the second convolution."""
        return self[1].bias  # type: ignore[return-value]


class LinearPair(nn.Sequential):
    """Two linear layers, the first without bias, that replace one: ``x -> (x A^T) B^T + bias``.

    It has the sizes, weight and bias of the nn.Linear that it replaces, because models and tools read them (T5 reads
    the dtype of a weight), and torch's nn.TransformerEncoderLayer calls it in evaluation too.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_forward_pre_hook(keep_own_forward)

    @property
    def weight(self) -> Tensor:  # (out, in)
        """The product of both weights, for inspection; computed at each access."""
        first, second = self
        return second.get_parameter("weight") @ first.get_parameter("weight")

    @property
    def bias(self) -> Tensor | None:  # (out,)
        """That of the second layer."""
        return self[1].bias  # type: ignore[return-value]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self[0].in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self[1].out_features  # type: ignore[return-value]


def to_linears_(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> LinearsReport:
    r"""Replace every compressed layer of a model by plain layers of torch.nn with the same output, in place.

    Tools that look for nn.Linear (torchao, PEFT, exporters, other runtimes) then find them. A
    :class:`~panther.nn.LowRankLinear` of rank r becomes ``nn.Linear(in, r, bias=False)`` and ``nn.Linear(r, out)`` in
    an nn.Sequential, and an :class:`~panther.nn.SKLinear` of rank R two layers of rank 2R. A low-rank or sketched
    convolution becomes a convolution to its inner channels and one of width 1. A :class:`~panther.nn.QuantizedLinear`
    becomes the nn.Linear of its weight, or the pair of its factors if it has no codes; a
    :class:`~panther.nn.QuantizedConv2d` likewise, but with groups always the nn.Conv2d of its weight. A
    :class:`~panther.nn.QuantizedEmbedding` becomes the nn.Embedding of its weight, and a
    :class:`~panther.nn.QuantizedExperts` the parameter that it replaced. An
    :class:`~panther.nn.InterpolativeLinear` becomes two layers of its rank, which together take more numbers than it.
    Layers that shared their tensors, such as an embedding and a head, share their weight.
    Nothing else is changed, and outputs are equal up to rounding. A pair has the product of its weights as ``weight``,
    computed at each access, for models that read it. Signs of seeded layers become weights like any
    other: they are stored, and would be trained; to continue training a seeded layer, keep it.

    Args:
        model: A model, changed in place. Wrap a single compressed layer, as in ``nn.Sequential(layer)``.
        filter_fn: Called with each compressed layer and its name; layers for which it is false are neither changed
            nor reported. None selects all layers.

    Returns:
        The replaced layers, and the layers that were not replaced, with the reasons.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``model`` is itself a compressed layer.

    Cost: a copy of the factors. If a layer's sketch is larger than its dense weight, so is the pair; see the report.

    Example:
        >>> import torch, panther as pr
        >>> model = torch.nn.Sequential(
        ...     pr.nn.SKLinear(256, 128, 4), torch.nn.ReLU()
        ... )
        >>> x = torch.randn(2, 256)
        >>> before = model(x)
        >>> print(pr.to_linears_(model))
        replaced 1 layer, skipped 0
        layer  kind      became                          bytes before  bytes after
        0      SKLinear  Linear(256, 8), Linear(8, 128)         6,688       12,800
        >>> torch.allclose(model(x), before, atol=1e-5)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"to_linears_ takes a model, not {type(model).__name__}")
    if isinstance(model, CompressedModule):
        raise ValueError(
            f"to_linears_ replaces layers inside a model, and this is a {type(model).__name__} itself: pass "
            "nn.Sequential(layer), and take its first entry"
        )
    layers = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, CompressedModule) and (filter_fn is None or filter_fn(module, name))
    ]
    new: dict[nn.Module, nn.Module] = {}
    reasons: dict[nn.Module, str] = {}
    shared: dict[tuple[int, ...], Sequence[nn.Parameter]] = {}
    for _, module in layers:  # If a conversion fails, no layer has been replaced.
        if module in new or module in reasons:
            continue
        if reason := reason_to_skip(module):
            reasons[module] = reason
        else:
            new[module] = _plain_layers(module, shared)
    replaced = []
    for name, module in layers:
        if module in reasons:
            continue
        put_layer(model, name, new[module])
        replaced.append(
            ReplacedLayer(name, type(module).__name__, _described(new[module]), _bytes(module), _bytes(new[module]))
        )
    layers_replaced(model)
    return LinearsReport(
        tuple(replaced), tuple((name, reasons[module]) for name, module in layers if module in reasons)
    )


def plain_pairs(model: nn.Module) -> list[str]:
    """Return the names of the pairs of plain layers that ``to_linears_`` put in the place of compressed layers."""
    return [name for name, module in model.named_modules() if isinstance(module, (ConvPair, LinearPair))]


def expanded(model: nn.Module) -> nn.Module:
    """Return a model after ``to_linears_``, or the plain layers of a model that is itself a compressed layer."""
    if not isinstance(model, CompressedModule):
        to_linears_(model)
        return model
    container = nn.Sequential(model)
    to_linears_(container)
    return container[0]


def reason_to_skip(module: CompressedModule) -> str | None:
    """Return why a layer cannot be replaced, with the remedy, or None if it can."""
    kind = next((kind for kind in _KNOWN if isinstance(module, kind)), None)
    if kind is None:
        return f"a {type(module).__name__}, for which no plain layers are known"
    held = {**parameters_of(module), **buffers_of(module), **module.__dict__}
    if any(type(held.get(name)) not in (Tensor, nn.Parameter) for name in module.stored_names()):
        return "its factors are sharded or parametrized: call unshard_module or remove_parametrizations first"
    return f"a subclass of {kind.__name__} with a forward of its own" if overrides_forward(module, kind) else None


def _plain_layers(module: Any, shared: dict[tuple[int, ...], Sequence[nn.Parameter]]) -> nn.Module:
    """Return the plain layers of a compressed layer. They share weights if the compressed layers share factors."""
    if isinstance(module, QuantizedMatrix) and (module.bits is not None or getattr(module, "groups", 1) > 1):
        new: nn.Module = module.to_dense()
        new.get_parameter("weight").requires_grad_(_is_trained(module))
        last = new
    else:
        new = _conv_pair(module) if isinstance(module, _CONVOLUTIONS) else _linear_pair(module)
        last = new[1]
    key = tuple(id(getattr(module, name)) for name in module.stored_names())
    weights = shared.setdefault(key, [p for name, p in new.named_parameters() if name.endswith("weight")])
    layers = [layer for layer in new.modules() if "weight" in parameters_of(layer)]
    for layer, weight in zip(layers, weights, strict=True):
        layer.register_parameter("weight", weight)
    if module.bias is not None:
        last.register_parameter("bias", nn.Parameter(module.bias.detach().clone(), module.bias.requires_grad))
    return new.train(module.training)


def _linear_pair(module: SKLinear | LowRankLinear | QuantizedLinear | InterpolativeLinear) -> LinearPair:
    with torch.no_grad():
        if isinstance(module, QuantizedLinear):
            outer, inner = module.wide_factors(module.dtype)
            trained = _is_trained(module)
        elif isinstance(module, InterpolativeLinear | LowRankLinear):
            outer, inner = (factor.clone() for factor in module.factors())
            trained = next(module.parameters()).requires_grad
        else:
            layer = module.to_low_rank()
            inner, outer = _balanced(layer.down.mT, layer.up.mT)
            trained = module.S1.requires_grad
    rank = len(inner)
    # The meta device avoids drawing weights, which takes time and advances the generator.
    first = nn.Linear(module.in_features, rank, bias=False, device="meta")
    second = nn.Linear(rank, module.out_features, bias=module.bias is not None, device="meta")
    first.weight, second.weight = _parameter(inner, trained), _parameter(outer, trained)
    return LinearPair(first, second)


def _is_trained(module: QuantizedMatrix) -> bool:
    """Return whether the plain weight of a quantized layer is trained: unless the layer's parameters are frozen."""
    return all(parameter.requires_grad for parameter in module.parameters())


def _balanced(inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:  # (R, in), (out, R)
    """Move powers of two from the outer to the inner factor, so that columns of the outer factor have similar norms.

    Tools that round weights use one scale per row. Rows of a seeded layer contain signs and much smaller factors. In
    int8 the output's error is 6 % without this step and 0.6 % with it.
    """
    norms = torch.linalg.vector_norm(outer.double(), dim=0)
    exponents = torch.where(norms > 0, norms, 1).log2().round()
    exponents = (exponents - exponents.median()).clamp(-6, 6)  # a smaller range than float16's
    powers = exponents.exp2().to(outer.dtype)
    return inner * powers[:, None], outer / powers


def _conv_pair(module: SKConv1d | SKConv2d | SKConv3d | LowRankConv2d | QuantizedConv2d) -> ConvPair:
    groups = module.groups
    with torch.no_grad():
        if isinstance(module, QuantizedConv2d):  # without groups
            mix, right = module.wide_factors(module.dtype)
            kernel, trained = module._unfolded(right), _is_trained(module)
        elif isinstance(module, LowRankConv2d):
            kernel, trained = module.down, module.down.requires_grad
            mix = module.up.unflatten(0, (groups, -1)).mT.reshape(module.out_channels, -1)
        else:
            power, trained = _root_power_of_two(module.scale), module.S.requires_grad
            kernel = module.S * (module.scale / power)
            mix = (module.U * power).unflatten(0, (groups, -1)).mT.reshape(module.out_channels, -1)
        rows = len(kernel)
        mix = mix.reshape(*mix.shape, *[1] * module.dim)
    first = dense_conv(
        module.dim, module.in_channels, rows, module.kernel_size, module.stride, padding=module.padding,
        dilation=module.dilation, groups=groups, bias=False, padding_mode=module.padding_mode, device="meta",
    )  # fmt: skip
    second = dense_conv(
        module.dim, rows, module.out_channels, 1, groups=groups, bias=module.bias is not None, device="meta"
    )
    first.weight, second.weight = (_parameter(t, trained) for t in (kernel, mix))
    return ConvPair(first, second)


def _root_power_of_two(scale: float) -> float:
    """Return the power of two next to the square root of a scale. It is 1 for the scale of a fitted layer."""
    return 2.0 ** round(math.log2(scale) / 2)


def _parameter(tensor: Tensor, trained: bool) -> nn.Parameter:
    last = tensor.dim() > 3 and tensor.is_contiguous(memory_format=torch.channels_last) and tensor.shape[1] > 1
    copied = tensor.detach().clone(memory_format=torch.preserve_format if last else torch.contiguous_format)
    return nn.Parameter(copied, trained)


def _described(module: nn.Module) -> str:
    if isinstance(module, StackedExperts):
        return f"Parameter({', '.join(map(str, module.weight.shape))})"
    layers = module if isinstance(module, nn.Sequential) else [module]
    sizes = ("in_features", "out_features", "in_channels", "out_channels", "num_embeddings", "embedding_dim")
    sizes_by_layer = (
        (layer, [str(getattr(layer, size)) for size in sizes if hasattr(layer, size)]) for layer in layers
    )
    return ", ".join(f"{type(layer).__name__}({', '.join(layer_sizes)})" for layer, layer_sizes in sizes_by_layer)


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in plain_state(module).values())

"""Conversion of compressed layers to nn.Linear, convolutions and embeddings, for tools that know only these."""

__all__ = ["LinearPair", "LinearsReport", "ReplacedLayer", "expanded", "plain_pairs", "reason_to_skip", "to_linears_"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from panther._model_libraries import layers_replaced
from panther._text import counted, format_table
from panther._torch import buffers_of, parameters_of
from panther.nn.factors import overrides_forward
from panther.nn.pairs import ConvPair, LinearPair
from panther.nn.protocol import CompressedModule, allowed_layers, compressed_layers
from panther.nn.quantized.stacked import StackedExperts, put_layer
from panther.nn.sketch_record import plain_state


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
    computed at each access, for models that read it. Sketches of seeded layers become weights like any
    other, sparse ones with their zeros, so that the pair takes twice the numbers and products of a sparse layer. They
    are stored, and would be trained; to continue training a seeded layer, keep it.

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
        for name, module in compressed_layers(model, remove_duplicate=False)
        if filter_fn is None or filter_fn(module, name)
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
    allowed_kinds = [kind for kind in type(module).__mro__ if allowed_layers().get(kind.__name__) is kind]
    if not allowed_kinds:
        return f"a {type(module).__name__}, for which no plain layers are known"
    tensors = {**parameters_of(module), **buffers_of(module), **vars(module)}
    if any(type(tensors.get(name)) not in (Tensor, nn.Parameter) for name in module.stored_names()):
        return "its factors are sharded or parametrized: call unshard_module or remove_parametrizations first"
    # A subclass that is allowed in files too, and does not say what its plain layers are, may compute something else.
    kind = next((kind for kind in allowed_kinds if "plain" in vars(kind)), allowed_kinds[-1])
    return f"a subclass of {kind.__name__} with a forward of its own" if overrides_forward(module, kind) else None


def _plain_layers(module: CompressedModule, shared: dict[tuple[int, ...], Sequence[nn.Parameter]]) -> nn.Module:
    """Return the plain layers of a compressed layer. They share weights if the compressed layers share factors."""
    new = module.plain()
    key = tuple(id(tensor) for tensor in module.stored().values())
    weights = shared.setdefault(key, [p for name, p in new.named_parameters() if name.endswith("weight")])
    layers = [layer for layer in new.modules() if "weight" in parameters_of(layer)]
    for layer, weight in zip(layers, weights, strict=True):
        layer.register_parameter("weight", weight)
    return new.train(module.training)


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

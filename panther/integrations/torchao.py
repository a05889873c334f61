"""torchao on models with sketched layers: quantize their factors, and report which layers were not quantized."""

__all__ = ["quantize_"]

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from panther.errors import check_version, require_extra
from panther.nn.linears import LinearsReport, ReplacedLayer, to_linears_
from panther.nn.protocol import compressed_layers

torchao: Any = require_extra("torchao", "torchao")
check_version("torchao", torchao.__version__, 0)
_quantization: Any = require_extra("torchao.quantization", "torchao")


def quantize_(
    model: nn.Module, config: Any, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> LinearsReport:
    """Replace sketched linear layers by pairs of nn.Linear and quantize all linear layers by torchao, in place.

    torchao's ``quantize_`` silently skips modules that are not an nn.Linear. This function reports every linear layer,
    as replaced or as skipped with the reason. Layers of codes (:class:`~panther.nn.QuantizedLinear` with ``bits``) are
    skipped, because they have few bits already.

    Args:
        model: A model, changed in place; see :func:`panther.to_linears_`, which comes first.
        config: A configuration of torchao, such as ``Int8WeightOnlyConfig()``.
        filter_fn: Called with each nn.Linear and its name, including the layers of the pairs ("name.0" and "name.1");
            if it returns False, the layer is kept. None quantizes all layers.

    Returns:
        A report of every linear layer.

    Raises:
        TypeError: If ``config`` is not a configuration of torchao.
        ConfigError: If torchao is not installed, or its version is not supported.

    Cost: the sum of the costs of :func:`panther.to_linears_` and of torchao's ``quantize_``.

    Example:
        >>> import torch, panther as pr
        >>> from torchao.quantization import Int8WeightOnlyConfig
        >>> model = torch.nn.Sequential(
        ...     pr.nn.SKLinear(256, 128, 16),
        ...     torch.nn.ReLU(),
        ...     torch.nn.Linear(128, 64),
        ... )
        >>> print(quantize_(model, Int8WeightOnlyConfig()))
        replaced 3 layers, skipped 0
        layer  kind    became      bytes before  bytes after
        0.0    Linear  Int8Tensor        32,768        8,352
        0.1    Linear  Int8Tensor        16,384        4,736
        2      Linear  Int8Tensor        32,768        8,512
    """
    base = _quantization.quant_api.AOBaseConfig
    if not isinstance(config, base):
        kind_name = config.__name__ if isinstance(config, type) else type(config).__name__
        raise TypeError(
            f"config must be an instance of a configuration of torchao, such as Int8WeightOnlyConfig(), not {kind_name}"
        )
    pairs = to_linears_(model, lambda layer, _: layer.dense_class is nn.Linear and layer.bits is None)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    before = {name: (type(module.weight), _bytes(module.weight)) for name, module in linears}
    _quantization.quantize_(
        model,
        config,
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and (filter_fn is None or filter_fn(module, name)),
    )
    replaced, skipped = [], list(pairs.skipped)
    for name, module in linears:
        kind, size = before[name]
        if type(module.weight) is kind:
            reason = (
                "filter_fn is false" if filter_fn is not None and not filter_fn(module, name) else "torchao left it"
            )
            skipped.append((name, reason))
        else:
            became = type(module.weight).__name__
            replaced.append(ReplacedLayer(name, type(module).__name__, became, size, _bytes(module.weight)))
    skipped += [
        (name, f"codes of {layer.bits} bits already")
        for name, layer in compressed_layers(model)
        if layer.record_mode == "quantized" and layer.dense_class is nn.Linear
    ]
    return LinearsReport(tuple(replaced), tuple(skipped))


def _bytes(weight: Tensor) -> int:
    """Return the bytes of a tensor; for a quantized tensor, the bytes of the tensors that it consists of."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    names, _ = weight.__tensor_flatten__()
    return sum(_bytes(getattr(weight, name)) for name in names)

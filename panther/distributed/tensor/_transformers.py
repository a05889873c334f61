"""Blocks whose sharding is known, by the model's own plan or by the class of a feed-forward block.

Models of transformers have a plan, ``_tp_plan``, which maps globs of layer names to ``"colwise"`` or ``"rowwise"``; any
other model may have this attribute too. It promises that the forward of a block works on some of its heads or features,
for example by reshaping to ``(-1, head_dim)``. Other attention is not sharded, because a forward that uses the number
of all heads would give wrong results without an error.
"""

__all__ = ["Block", "declared_blocks", "is_elementwise", "is_linear", "reason_against_pair"]

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from panther.nn import LowRankLinear, MonarchLinear, SKLinear

# Between the layers of a sharded pair, every rank has a part of the features. Elementwise functions are correct on a
# part; other functions, such as a softmax or a sum, would be wrong without an error. Therefore only tested code is
# accepted: modules by their class, and blocks of classes whose forward was read and is tested.
_MODULES = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Softsign,
    nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.ReLU6, nn.LogSigmoid, nn.Dropout, nn.Identity,
)  # fmt: skip
_FUNCTIONS = (F.relu, F.gelu, F.silu, F.mish, F.elu, F.leaky_relu, torch.relu, torch.tanh, torch.sigmoid)
_TORCH_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# Classes of transformers whose forward applies only an activation and dropout between the layers of the pair.
_TRANSFORMERS_BLOCKS = (
    "BartDecoderLayer", "BartEncoderLayer", "BertLayer", "CLIPMLP", "ElectraLayer", "FFN", "OPTDecoderLayer",
    "RobertaLayer", "T5DenseActDense", "T5DenseGatedActDense", "ViTMLP", "WhisperDecoderLayer", "WhisperEncoderLayer",
)  # fmt: skip


def is_elementwise(module: nn.Module) -> bool:
    """Return whether a module is known to be an elementwise function without parameters."""
    if type(module).forward is nn.Sequential.forward:
        return all(map(is_elementwise, module.children()))
    is_activation = type(module).__module__ == "transformers.activations" and next(module.parameters(), None) is None
    return is_activation or type(module) in _MODULES


def reason_against_pair(block: nn.Module) -> str | None:
    """Return why two layers of a block cannot be sharded as a pair, or None if there is no reason."""
    kind = type(block)
    if kind.forward is nn.Sequential.forward:
        return None  # the caller has checked the modules between the layers
    tested = kind.__name__ in _TRANSFORMERS_BLOCKS and kind.__module__.startswith("transformers.models.")
    if not (tested or kind in _TORCH_BLOCKS) or "forward" in vars(block):
        return f"{kind.__name__} is not known to be elementwise between its layers: use an nn.Sequential or a _tp_plan"
    for name, module in block.named_modules():
        # On each rank, an activation with parameters, such as nn.PReLU, would get only a part of its gradient.
        checked = "act" in name.rpartition(".")[2] or next(module.parameters(), None) is None
        if checked and next(module.children(), None) is None and not is_elementwise(module):
            return f"its block's {name!r}, a {type(module).__name__}, is not known to be elementwise"
        for key, value in vars(module).items():
            if "act" in key and callable(value) and value not in _FUNCTIONS:
                return f"its block's function {key!r} is not known to be elementwise"
    return None


_ATTENTION = ("self_attn", "attention", "attn")
_FEED_FORWARD = ("mlp", "feed_forward")
_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}

_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("head_dim", "attention_head_size", "head_size")


@dataclass(frozen=True)
class Block:
    """An attention or feed-forward block, by the names of its layers in the model."""

    layers: tuple[str, ...]
    reason: str = ""
    """The reason why the layers are sharded or not; empty for a pair."""
    rowwise: str = ""
    """The layer whose inputs are sharded, while the outputs of the remaining layers are; empty if none is sharded."""
    norms: tuple[str, ...] = ()
    """Norms of single heads, which are replicated, and whose gradients are summed."""


class _RefusedError(Exception):
    """The block cannot be sharded; the message is for the report."""


def declared_blocks(model: nn.Module, ranks: int) -> Iterator[Block]:
    """Yield the attention and feed-forward blocks that the model's own plan names."""
    modules = dict(model.named_modules())
    declared: dict[str, dict[str, str]] = {}
    for prefix, owner in modules.items():
        for pattern, style in (getattr(owner, "_tp_plan", None) or {}).items():
            for name in fnmatch.filter(modules, f"{prefix}.{pattern}" if prefix else pattern):
                declared.setdefault(name.rpartition(".")[0], {})[name] = style
    for parent, styles in declared.items():
        # A block is sharded completely or not at all, because a single layer of a pair would get a part of its inputs.
        kind = parent.rpartition(".")[2]
        if kind not in (*_ATTENTION, *_FEED_FORWARD) and not set(styles.values()) <= _STYLES:
            continue  # embeddings and output layers, which are planned by their sizes
        rows = [name for name, style in styles.items() if style == "rowwise"]
        norms = tuple(name for name, style in styles.items() if style == "replicated_with_grad_allreduce")
        layers = tuple(name for name in styles if name not in norms)
        try:
            if len(rows) != 1 or not set(styles.values()) <= _STYLES:
                style_names = ", ".join(dict.fromkeys(styles.values()))
                raise _RefusedError(f"the model's plan has styles for it that cannot be combined: {style_names}")
            ins, output = [modules[name] for name in layers if name != rows[0]], modules[rows[0]]
            if kind in _ATTENTION:
                heads = _check_heads(modules[parent], ins, output, [modules[name] for name in norms], ranks)
                reason = f"the model's plan: {heads // ranks} of {heads} heads a rank"
            else:
                _check_feed_forward(modules[parent], ins, output)
                reason = "the model's plan"
        except _RefusedError as error:
            yield Block(layers, str(error))
        else:
            yield Block(layers, reason, rows[0], norms)


def _check_heads(block: nn.Module, ins: list[Any], output: Any, norms: list[nn.Module], ranks: int) -> int:
    """Return the number of heads of an attention, or refuse it."""
    config = getattr(block, "config", None)
    heads = _first(block, _COUNTS) or getattr(config, "num_attention_heads", None)
    # With grouped queries there are fewer key heads, and every rank needs the keys of its queries.
    key_heads: Any = _first(block, _KEY_COUNTS) or getattr(config, "num_key_value_heads", None) or heads
    width = _first(block, _WIDTHS)
    if heads is None or width is None:
        raise _RefusedError("the number of heads, or their size, is not an attribute of the attention")
    if heads % ranks or key_heads % ranks:
        counts = f"{heads} heads" if heads == key_heads else f"{heads} heads and {key_heads} key heads"
        raise _RefusedError(f"its attention has {counts}, which are not a multiple of the {ranks} ranks")
    linear = all(map(is_linear, (*ins, output)))
    if not linear or any(size % (width * ranks) for size in (*(x.out_features for x in ins), output.in_features)):
        raise _RefusedError(f"the projections are not linear layers of heads of size {width}")
    if any(tuple(p.shape) != (width,) for norm in norms for p in norm.parameters()):
        raise _RefusedError("a norm acts on more than one head")
    _check_nothing_else(block, [*ins, output, *norms])
    return heads


def _check_feed_forward(block: nn.Module, ins: list[Any], output: Any) -> None:
    """Refuse a block whose widths do not fit, or whose modules other than its layers are not elementwise."""
    layers = [*ins, output]
    if not all(map(is_linear, layers)) or {layer.out_features for layer in ins} != {output.in_features}:
        raise _RefusedError("the widths of the block's layers do not fit")
    _check_nothing_else(block, layers)
    for name, module in block.named_children():
        if module not in layers and not is_elementwise(module):
            raise _RefusedError(f"the block's {name!r} is not elementwise")


def _check_nothing_else(block: nn.Module, layers: list[Any]) -> None:
    """Refuse tensors that do not belong to ``layers``, because they may apply to all heads or features."""
    inside = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        if id(tensor) not in inside:
            raise _RefusedError(f"the block has the tensor {name!r} beside its layers, which may apply to all heads")


def _first(block: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((vars(block)[name] for name in names if type(vars(block).get(name)) is int), None)


def is_linear(module: Any) -> bool:
    """Return whether a module is exactly a linear layer; the forward of a subclass would be replaced by sharding."""
    return type(module) in (nn.Linear, SKLinear, LowRankLinear, MonarchLinear)

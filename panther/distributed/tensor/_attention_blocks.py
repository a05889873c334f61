"""Attention with projections of its own, recognised by names: whose heads can be cut over ranks, and what changes.

Projections of queries, keys and values then give the features of some heads, the one of the output takes them, and what
is between must not notice. What a forward does with numbers of heads is read off its source: it may reshape to
``(-1, head_dim)``, or use a number of heads that is an attribute of the module, which is divided then. Where it reads
anything else that grows with the heads, the block is left alone.
"""

__all__ = ["Attention", "find_attention"]

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from panther.nn import SKLinear

# Projections of queries, keys and values; the one of the output; and the module among these that has the heads.
_NAMES = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj"), ""),  # Llama and its kin, OPT, CLIP, ViT
    (("query", "key", "value"), ("dense", "out", "out_proj", "proj"), ""),
    (("self.query", "self.key", "self.value"), ("output.dense",), "self"),  # BERT
    (("attention.query", "attention.key", "attention.value"), ("output.dense",), "attention"),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",), ""),  # DistilBERT
    (("q", "k", "v"), ("o", "out", "proj"), ""),
    (("wq", "wk", "wv"), ("wo",), ""),
    (("to_q", "to_k", "to_v"), ("to_out", "to_out.0"), ""),
)
_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "num_query_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_head", "dim_head", "d_k")
_ALL_HEADS = ("all_head_size", "inner_dim", "attn_dim")
_BY_HEAD = ("position_bias", "relative_position", "alibi")  # arguments of a forward


@dataclass(frozen=True)
class Attention:
    """A block, by names in the model."""

    queries: str
    keys: str
    values: str
    output: str
    inner: str
    """The module that has the heads."""
    reason: str | None = None
    """Why it cannot be cut."""
    heads: int = 0
    attributes: dict[str, int] = field(default_factory=dict)
    """Attributes of the inner module, and what they are on each rank."""
    norms: tuple[str, ...] = ()
    """Norms of single heads, whose gradients ranks have to sum."""

    @property
    def projections(self) -> tuple[str, ...]:
        """The four of them."""
        return self.queries, self.keys, self.values, self.output


def find_attention(model: nn.Module, ranks: int) -> Iterator[Attention]:
    """Blocks with separate projections, cuttable over so many ranks or with the reason why not."""
    for prefix, module in model.named_modules():
        for inputs, outputs, inner in _NAMES:
            output = next((name for name in outputs if _is_linear(_child(module, name))), None)
            if output is None or not all(_is_linear(_child(module, name)) for name in inputs):
                continue
            dot = f"{prefix}." if prefix else ""
            queries, keys, values, last = (dot + name for name in (*inputs, output))
            block, where = (_child(module, inner), dot + inner) if inner else (module, prefix)
            parts = [_child(module, name) for name in (*inputs, output)]
            try:
                heads, attributes, norms = _adapted(block, parts, ranks)
            except _CannotCutError as error:
                yield Attention(queries, keys, values, last, where, str(error))
            else:
                inside = f"{where}." if where else ""
                norms = [inside + name for name in norms]
                yield Attention(queries, keys, values, last, where, None, heads, attributes, tuple(norms))
            break


class _CannotCutError(Exception):
    """The reason."""


def _adapted(block: nn.Module, parts: list[Any], ranks: int) -> tuple[int, dict[str, int], list[str]]:
    """Number of heads, attributes with what they become, and norms of single heads."""
    q, k, v, o = parts
    own = {key: value for key, value in vars(block).items() if type(value) is int}
    heads, width = _heads_and_width(own, q.out_features)
    key_heads, rest = divmod(k.out_features, width)
    if rest or k.out_features != v.out_features or o.in_features != q.out_features:
        raise _CannotCutError(f"has projections that are not of heads of width {width}")
    if heads % ranks or key_heads % ranks:
        of = f"{heads} heads" if heads == key_heads else f"{heads} heads and {key_heads} of keys"
        raise _CannotCutError(f"has {of}, which {ranks} ranks do not divide")
    norms = _norms(block, parts, width)
    for name, buffer in block.named_buffers():
        if any(size in (heads, key_heads) for size in buffer.shape) and not _is_in(block, parts, name):
            raise _CannotCutError(f"has the buffer {name!r}, which may be one of all heads")
    arguments, names, configured = _reads(type(block))
    if found := [name for name in arguments if any(part in name for part in _BY_HEAD)]:
        raise _CannotCutError(f"takes {found[0]!r}, which is one of all heads")
    if found := [name for name in configured if "head" in name and "dim" not in name and "size" not in name]:
        raise _CannotCutError(f"reads {found[0]!r} from its config")
    attributes, growing = {}, (heads, key_heads, heads * width, key_heads * width)
    for name, value in own.items():
        if name in (*_COUNTS, *_KEY_COUNTS):
            if value not in (heads, key_heads):
                raise _CannotCutError(f"has {name}={value}, which is no number of its heads")
            attributes[name] = value // ranks
        elif name in _ALL_HEADS and value in (heads * width, key_heads * width):
            attributes[name] = value // ranks
        elif name in names and name not in (*_WIDTHS, "layer_idx") and value in growing:
            raise _CannotCutError(f"reads {name}={value}, which may be of all heads")
    if not attributes and not any(name in own for name in _WIDTHS):
        raise _CannotCutError("has its number of heads under no known name")
    return heads, attributes, norms


def _heads_and_width(own: dict[str, int], features: int) -> tuple[int, int]:
    heads = next((own[name] for name in _COUNTS if name in own), None)
    width = next((own[name] for name in _WIDTHS if name in own), None)
    if heads is None and width is None:
        raise _CannotCutError("has its number of heads under no known name")
    heads = heads or features // (width or 1)
    width = width or features // max(heads, 1)
    if heads * width != features or not heads:
        raise _CannotCutError(f"has {heads} heads of width {width}, and queries of {features} features")
    return heads, width


def _norms(block: nn.Module, parts: list[Any], width: int) -> list[str]:
    """Modules with parameters besides the projections, if all are of single heads."""
    found = []
    for name, module in block.named_modules():
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not parameters or module in parts:
            continue
        if not name or any(tuple(parameter.shape) != (width,) for parameter in parameters):
            raise _CannotCutError(f"has parameters besides its projections{f', in {name!r}' if name else ''}")
        found.append(name)
    return found


def _is_in(block: nn.Module, parts: list[Any], name: str) -> bool:
    return block.get_submodule(name.rpartition(".")[0]) in parts


def _reads(cls: type[nn.Module]) -> tuple[set[str], set[str], set[str]]:
    """Arguments of a forward, and what it and the methods it calls read of the module and of its config."""
    names: set[str] = set()
    configured: set[str] = set()
    todo, done = ["forward"], set()
    arguments = set(inspect.signature(cls.forward).parameters)
    while todo:
        method = todo.pop()
        done.add(method)
        function = inspect.unwrap(getattr(cls, method))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError) as error:
            raise _CannotCutError(f"has a {method} whose source cannot be read") from error
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
                if inspect.isfunction(getattr(cls, node.attr, None)) and node.attr not in (*done, *todo):
                    todo.append(node.attr)
            elif isinstance(node.value, ast.Attribute) and node.value.attr == "config":
                configured.add(node.attr)
    return arguments, names, configured


def _child(module: nn.Module, name: str) -> Any:
    child: Any = module
    for part in name.split("."):
        child = child._modules.get(part) if isinstance(child, nn.Module) else None
    return child


def _is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, SKLinear)

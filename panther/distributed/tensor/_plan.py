"""What of a model is cut over ranks, and how: pairs of linear layers, attention, large tables and output layers."""

__all__ = ["Plan", "plan_automatically", "shared_parameters"]

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.modules.conv import _ConvNd

from panther.distributed.comm._chunks import chunk_sizes
from panther.distributed.tensor._attention import cannot_cut_heads
from panther.distributed.tensor._attention_blocks import find_attention
from panther.distributed.tensor._elementwise import is_of_single_entries, why_not_a_pair
from panther.distributed.tensor.styles import ColwiseSKParallel, HeadwiseParallel, RowwiseSKParallel
from panther.errors import ShapeError
from panther.nn import RandMultiHeadAttention, SKConv1d, SKConv2d, SKConv3d, SKLinear

# Feed-forward blocks by the names of their layers: those that widen, whose outputs are cut, and the one that narrows.
# Whether only functions of single entries stand between them, a trace of the block tells.
_FEED_FORWARD = (
    (("linear1",), "linear2"),  # torch
    (("gate_proj", "up_proj"), "down_proj"),  # Llama and its kin
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("w1",), "w2"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("up",), "down"),
    (("intermediate.dense",), "output.dense"),  # BERT
    (("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX
    (("wi_0", "wi_1"), "wo"),  # T5
    (("wi",), "wo"),
    (("c_fc",), "c_proj"),
)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_CONVOLUTIONS = (_ConvNd, SKConv1d, SKConv2d, SKConv3d)

_LARGE = 4096
"""Rows of a table, or outputs of a layer without a partner, from which cutting them pays."""


@dataclass
class Plan:
    """Styles by name, reasons by name, and what has to be done besides."""

    styles: dict[str, ParallelStyle] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of modules, what they are on each rank."""
    summed: set[str] = field(default_factory=set)
    """Modules that are copied, and whose gradients are summed."""
    plain: set[str] = field(default_factory=set)
    """Modules whose parameters others read."""


def shared_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Where parameters are that several modules have, as names of modules and of parameters in them."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((prefix, name))
    return [places for places in owners.values() if len(places) > 1]


def plan_automatically(model: nn.Module, ranks: int, *, sequence_parallel: bool) -> Plan:
    """Styles for what can be cut, and the reasons why the rest of the layers that might be is not."""
    plan, several, tied = Plan(), _in_several_places(model), _shared(model)
    _plan_attention(plan, model, ranks, several, set(tied))
    _plan_pairs(plan, model, ranks, several, set(tied))
    _plan_large(plan, model, ranks, several, tied)
    if sequence_parallel:
        _plan_sequences(plan, model, several | set(tied))
    for name, module in model.named_modules():
        if name in plan.why:
            continue
        if _is_linear(module):
            plan.why[name] = "has no partner across functions of single entries"
        elif isinstance(module, _CONVOLUTIONS):
            plan.why[name] = "channels are not cut"
    return plan


def _in_several_places(model: nn.Module) -> set[str]:
    """First names of modules that have several."""
    uses: dict[nn.Module, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[module] = uses.get(module, 0) + 1
    return {name for name, module in model.named_modules() if uses[module] > 1}


def _shared(model: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Modules that share a parameter with others, by name."""
    return {name: places for places in shared_parameters(model) for name, _ in places}


def _plan_attention(plan: Plan, model: nn.Module, ranks: int, several: set[str], tied: set[str]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, RandMultiHeadAttention | nn.MultiheadAttention):
            reason = cannot_cut_heads(module, ranks)
            if reason is None:
                reason = _elsewhere([name], several, tied)
            if reason is None:
                plan.styles[name] = HeadwiseParallel()
                plan.why[name] = f"{module.num_heads // ranks} of {module.num_heads} heads a rank"
                if isinstance(module, nn.MultiheadAttention) and module._qkv_same_embed_dim:
                    plan.why[name] += "; its packed projection is whole on each"
            else:
                plan.why[name] = reason
    for block in find_attention(model, ranks):
        reason = block.reason
        if reason is None:
            reason = _elsewhere([block.inner, *block.projections], several, tied)
        if reason is not None:
            plan.why |= {name: f"its attention {reason}" for name in block.projections}
            continue
        heads = f"{block.heads // ranks} of {block.heads} heads a rank"
        for name in block.projections:
            plan.styles[name] = RowwiseSKParallel() if name == block.output else ColwiseSKParallel()
            plan.why[name] = heads
        plan.attributes[block.inner] = block.attributes
        plan.summed |= set(block.norms)
        plan.why |= dict.fromkeys(block.norms, f"acts on {heads}; gradients are summed")


def _elsewhere(names: list[str], several: set[str], tied: set[str]) -> str | None:
    if several.intersection(names):
        return "stands in several places"
    return "shares a parameter with another layer" if tied.intersection(names) else None


def _plan_pairs(plan: Plan, model: nn.Module, ranks: int, several: set[str], tied: set[str]) -> None:
    for owner, firsts, last in _pairs(model):
        layers = [*firsts, last]
        modules: list[Any] = [model.get_submodule(name) for name in layers]
        if any(name in plan.styles for name in layers):
            continue
        widths = {module.out_features for module in modules[:-1]}
        width, taken = next(iter(widths)), modules[-1].in_features
        reason = _elsewhere(layers, several, tied)
        if reason is not None:
            pass
        elif widths != {taken}:
            reason = f"gives {', '.join(map(str, sorted(widths)))} features, and {last!r} takes {taken}"
        elif not _can_cut(width, ranks):
            reason = f"has {width} features between, too few for {ranks} ranks"
        elif (why := why_not_a_pair(model.get_submodule(owner), modules[:-1], modules[-1])) is not None:
            reason = why
            if why.startswith("its block reads"):
                plan.plain |= set(layers)
        else:
            for name in firsts:
                plan.styles[name], plan.why[name] = ColwiseSKParallel(), f"paired with {last!r}"
            plan.styles[last] = RowwiseSKParallel()
            plan.why[last] = f"paired with {' and '.join(map(repr, firsts))}"
            continue
        for name in layers:
            plan.why[name] = reason


def _pairs(model: nn.Module) -> Iterator[tuple[str, list[str], str]]:
    """Names of a block, of layers in it whose outputs are to be cut, and of the one whose inputs are."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        layers = {name: child for name, child in module.named_modules() if name.count(".") < 2}
        for firsts, last in _FEED_FORWARD:
            if all(_is_linear(layers.get(name)) for name in (*firsts, last)):
                yield prefix, [dot + name for name in firsts], dot + last
                break
        if type(module).forward is nn.Sequential.forward:
            before: str | None = None
            for name, child in module.named_children():
                if _is_linear(child):
                    if before is None:
                        before = name
                    else:
                        yield prefix, [dot + before], dot + name
                        before = None
                elif not is_of_single_entries(child):
                    before = None


def _plan_large(plan: Plan, model: nn.Module, ranks: int, several: set[str], tied: dict[str, Any]) -> None:
    """Tables of many rows, and layers of many outputs, alone or sharing their weight."""
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        if name in plan.styles or name in plan.why or type(module) not in (nn.Embedding, nn.Linear, SKLinear):
            continue
        table = type(module) is nn.Embedding
        places = [other for other, _ in tied.get(name, [(name, "weight")])]
        rows = module.num_embeddings if table else module.out_features
        with_ = f", with {', '.join(repr(other) for other in places if other != name)}" if len(places) > 1 else ""
        if rows < _LARGE or (not table and rows <= 4 * module.in_features):
            if table:
                plan.why[name] = f"its {rows} rows are fewer than {_LARGE}"
        elif several.intersection(places):
            plan.why[name] = "stands in several places"
        elif table and (module.sparse or module.max_norm is not None or module.scale_grad_by_freq):
            plan.why[name] = "has max_norm, scale_grad_by_freq or sparse gradients"
        elif with_ and not all(type(modules[other]) in (nn.Embedding, nn.Linear) for other in places):
            plan.why[name] = f"shares a parameter{with_}"
        elif with_ and any(other in plan.why and other not in plan.styles for other in places):
            plan.why[name] = f"shares a parameter{with_}, which is not cut"
        elif not _can_cut(rows, ranks):
            plan.why[name] = f"has {rows} rows, too few for {ranks} ranks"
        elif table:
            plan.styles[name] = RowwiseSKParallel()
            plan.why[name] = f"{_LARGE} rows or more{with_}"
        else:
            plan.styles[name] = ColwiseSKParallel(output_layouts=Replicate())
            plan.why[name] = f"{_LARGE} outputs or more, which are gathered{with_}"


def _plan_sequences(plan: Plan, model: nn.Module, elsewhere: set[str]) -> None:
    """In an nn.Sequential, cut the sequence between pairs where only norms and functions of single entries stand."""
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Sequential):
            continue
        dot = f"{prefix}." if prefix else ""
        before: str | None = None
        norms: list[str] = []
        for name, child in module.named_children():
            style = plan.styles.get(dot + name)
            if isinstance(style, RowwiseSKParallel) and _is_linear(child):
                before, norms = dot + name, []
            elif isinstance(style, ColwiseSKParallel) and before is not None:
                plan.styles[before] = RowwiseSKParallel(output_layouts=Shard(1))
                plan.styles[dot + name] = ColwiseSKParallel(input_layouts=Shard(1), output_layouts=style.output_layouts)
                plan.summed |= set(norms)
                plan.why |= dict.fromkeys(norms, "acts on a part of the sequence; gradients are summed")
                before = None
            elif isinstance(child, _NORMS) and dot + name not in elsewhere:
                norms.append(dot + name)
            elif not is_of_single_entries(child):
                before = None


def _is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, SKLinear)


def _can_cut(size: int, ranks: int) -> bool:
    try:
        chunk_sizes(size, ranks)
    except ShapeError:
        return False
    return True

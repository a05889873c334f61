"""Plan which modules of a model are sharded, and how, by the modules' names; nothing is changed.

The following planners run in this order, and the first one that decides about a layer wins: attention modules, the
model's own plan, pairs of linear layers, embeddings and output layers with many rows. The remaining modules are
replicated.
"""

__all__ = ["ModulePlan", "Plan", "plan_automatically", "plan_by_names", "shared_parameters", "tie_"]

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from panther._torch import parameters_of
from panther.distributed.tensor._attention import heads_refusal
from panther.distributed.tensor._transformers import (
    Block,
    declared_blocks,
    is_elementwise,
    is_linear,
    reason_against_pair,
)
from panther.distributed.tensor.styles import ColwiseSKParallel, HeadwiseParallel, RowwiseSKParallel
from panther.errors import ShapeError
from panther.nn import RandMultiHeadAttention
from panther.nn.protocol import CompressedModule

# Feed-forward blocks by the names of their layers: the widening layers, which are sharded column-wise, and the
# narrowing layer. `_transformers.py` lists the classes that have only elementwise functions between these layers.
_FEED_FORWARD = (
    (("linear1",), "linear2"),  # torch
    (("fc1",), "fc2"),  # BART, CLIP, OPT, ViT, Whisper
    (("lin1",), "lin2"),  # DistilBERT
    (("intermediate.dense",), "output.dense"),  # BERT, ELECTRA, RoBERTa
    (("wi_0", "wi_1"), "wo"),  # T5, with a gate and without
    (("wi",), "wo"),
)
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_NO_PARTNER = "no linear layer is known to follow or precede it with only elementwise functions between"

_LARGE = 4096
"""Smallest number of rows of an embedding, or of outputs of a layer without a partner, for which sharding pays off."""


@dataclass(frozen=True)
class ModulePlan:
    """The decision about one module."""

    reason: str
    style: ParallelStyle | None = None
    """The style with which the module is sharded; None replicates it."""
    summed: bool = False
    """Whether the gradients of a replicated module are summed over the ranks, because ranks have different inputs."""


Plan = dict[str, ModulePlan]


@dataclass(frozen=True)
class _Survey:
    """Facts about the model that all planners use."""

    model: nn.Module
    ranks: int
    modules: dict[str, Any]
    names: dict[nn.Module, str]
    repeated: frozenset[nn.Module]
    """Modules that are used in more than one place of the model, so that they have more than one name."""
    shared: dict[str, list[str]]
    """For each module that shares a parameter, the names of all modules that have it."""

    def obstacle(self, *names: str) -> str | None:
        """Return why layers cannot be sharded, independent of what they compute, or None."""
        if any(self.model.get_submodule(name) in self.repeated for name in names):
            return "is used in several places of the model"
        return "shares a parameter with another layer" if any(name in self.shared for name in names) else None

    def form_obstacle(self, dims: Mapping[str, int]) -> str | None:
        """Return why the form of a layer cannot be sharded along the dimension of its weight, or None."""
        for name, dim in dims.items():
            layer = self.modules[name]
            if isinstance(layer, CompressedModule) and (reason := layer.why_not_sharded(dim, self.ranks)):
                return f"{name!r} cannot have its {'inputs' if dim else 'outputs'} sharded: {reason}"
        return None


def shared_parameters(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return the places of each parameter that is shared by modules, as pairs of module and parameter names."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((prefix, name))
    return [places for places in owners.values() if len(places) > 1]


def tie_(model: nn.Module, tied: list[list[tuple[str, str]]]) -> None:
    """Share the parameters of :func:`shared_parameters` again, after every module got a separate parameter."""
    for (first, first_name), *further_places in tied:
        shared = getattr(model.get_submodule(first), first_name)
        for owner, name in further_places:
            model.get_submodule(owner).register_parameter(name, shared)


def plan_automatically(model: nn.Module, ranks: int) -> Plan:
    """Return a decision, with the reason, about every module that can be sharded over ``ranks`` ranks."""
    modules = dict(model.named_modules())
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    names = {module: name for name, module in modules.items()}
    repeated = frozenset(module for module, count in uses.items() if count > 1)
    shared = {name: [other for other, _ in places] for places in shared_parameters(model) for name, _ in places}
    survey = _Survey(model, ranks, modules, names, repeated, shared)
    plan = _plan_attention(survey)
    for block in (*declared_blocks(model, ranks), *_pairs(survey)):
        _add_block(plan, survey, block)
    _add_many_rows(plan, survey)
    for name, module in modules.items():
        if is_linear(module):
            plan.setdefault(name, ModulePlan(_NO_PARTNER))
        elif isinstance(module, _CONVOLUTIONS) or getattr(module, "dense_class", None) in _CONVOLUTIONS:
            plan.setdefault(name, ModulePlan("channels of convolutions are not sharded"))
        elif isinstance(module, CompressedModule):
            plan.setdefault(name, ModulePlan(f"the form of a {type(module).__name__} is not sharded"))
    return plan


def _is_sharded(plan: Plan, name: str) -> bool:
    return name in plan and plan[name].style is not None


def _plan_attention(survey: _Survey) -> Plan:
    plan = {}
    for name, module in survey.modules.items():
        if isinstance(module, nn.MultiheadAttention):
            plan[name] = ModulePlan("its projections are packed: use RandMultiHeadAttention, or separate projections")
        elif isinstance(module, RandMultiHeadAttention):
            refusal = heads_refusal(module, survey.ranks) or survey.obstacle(name)
            reason = f"{module.num_heads // survey.ranks} of {module.num_heads} heads a rank"
            plan[name] = ModulePlan(refusal) if refusal else ModulePlan(reason, HeadwiseParallel())
    return plan


def _add_block(plan: Plan, survey: _Survey, block: Block) -> None:
    # A layer can be named more than once, because transformers repeats the plan of a model in every outer model.
    if any(_is_sharded(plan, name) for name in block.layers):
        return
    dims = {name: int(name == block.rowwise) for name in block.layers}
    if refusal := survey.obstacle(*block.layers) or survey.form_obstacle(dims) if block.rowwise else block.reason:
        for name in block.layers:
            plan.setdefault(name, ModulePlan(refusal))
        return
    firsts = tuple(name for name in block.layers if name != block.rowwise)
    for name in block.layers:
        by_rows = name == block.rowwise
        reason = block.reason or f"paired with {' and '.join(map(repr, firsts if by_rows else [block.rowwise]))}"
        plan[name] = ModulePlan(reason, RowwiseSKParallel() if by_rows else ColwiseSKParallel())
    for name in block.norms:
        plan[name] = ModulePlan(f"acts on single heads ({block.reason}); its gradients are summed", summed=True)


def _pairs(survey: _Survey) -> Iterator[Block]:
    """Yield pairs of linear layers: neighbours in an nn.Sequential, and feed-forward blocks by their names."""
    for owner, *aliases in _candidates(survey.model):
        layers = tuple(survey.names[survey.model.get_submodule(name)] for name in aliases)
        *firsts, last = (survey.modules[name] for name in layers)
        widths = {first.out_features for first in firsts}
        if widths != {last.in_features}:
            outputs = ", ".join(map(str, sorted(widths)))
            refusal: str | None = f"has {outputs} outputs, and {layers[-1]!r} has {last.in_features} inputs"
        elif not _can_shard(last.in_features, survey.ranks):
            refusal = f"has only {last.in_features} features, too few for {survey.ranks} ranks"
        else:
            refusal = reason_against_pair(survey.modules[owner])
        yield Block(layers, refusal) if refusal else Block(layers, rowwise=layers[-1])


def _candidates(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Yield candidates as names: the block, its layers to shard column-wise, and the layer to shard row-wise."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for firsts, last in _FEED_FORWARD:
            layers = [dot + name for name in (*firsts, last)]
            if all(is_linear(modules.get(name)) for name in layers):
                yield prefix, *layers
                break
        if type(module).forward is nn.Sequential.forward:
            previous_layer: str | None = None
            for name, child in module.named_children():
                if is_linear(child) and previous_layer is not None:
                    yield prefix, previous_layer, dot + name
                    previous_layer = None
                elif is_linear(child):
                    previous_layer = dot + name
                elif not is_elementwise(child):
                    previous_layer = None


def _add_many_rows(plan: Plan, survey: _Survey) -> None:
    """Shard embeddings of many rows, and layers of many outputs, even if they share their weight."""
    for name, module in survey.modules.items():
        table = type(module) is nn.Embedding
        if name in plan or not (table or is_linear(module)):
            continue
        places = survey.shared.get(name, [name])
        rows = module.num_embeddings if table else module.out_features
        with_ = f", with {', '.join(repr(other) for other in places if other != name)}" if len(places) > 1 else ""
        refusal = None
        if rows < _LARGE or (not table and rows <= 4 * module.in_features):
            if table:
                plan[name] = ModulePlan(f"its {rows} rows are fewer than {_LARGE}")
            continue
        if any(survey.modules[place] in survey.repeated for place in places):
            refusal = "is used in several places of the model"
        elif table and (module.sparse or module.max_norm is not None or module.scale_grad_by_freq):
            refusal = "has max_norm, scale_grad_by_freq or sparse gradients"
        elif with_ and not all(type(survey.modules[other]) in (nn.Embedding, nn.Linear) for other in places):
            refusal = f"shares a parameter{with_}"
        elif with_ and any(other in plan and not _is_sharded(plan, other) for other in places):
            refusal = f"shares a parameter{with_}, which is not sharded"
        elif not _can_shard(rows, survey.ranks):
            refusal = f"has {rows} rows, too few for {survey.ranks} ranks"
        else:
            refusal = survey.form_obstacle({name: 0})
        if refusal is not None:
            plan[name] = ModulePlan(refusal)
        elif table:
            plan[name] = ModulePlan(f"{_LARGE} rows or more{with_}", RowwiseSKParallel())
        else:
            style = ColwiseSKParallel(output_layouts=Replicate())
            plan[name] = ModulePlan(f"{_LARGE} outputs or more, which are gathered{with_}", style)


def _can_shard(size: int, ranks: int) -> bool:
    # torch.chunk makes fewer chunks than ranks if the last chunks would be empty.
    return size > 0 and -(-size // -(-size // ranks)) == ranks


def plan_by_names(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> Plan:
    """Give every module whose name matches a glob its style."""
    names = [name for name, _ in model.named_modules() if name]
    plan: Plan = {}
    for pattern, style in styles.items():
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ShapeError(
                f"plan names {pattern!r}, and no module matches it: the modules are {', '.join(names[:10])}"
            )
        plan |= dict.fromkeys(matched, ModulePlan(f"by the plan's {pattern!r}", style))
    # A style gives its layer a separate parameter, which can be shared again only if the shards are equal.
    for places in shared_parameters(model):
        dims = {_sharded_dim(model.get_submodule(owner), plan.get(owner)) for owner, _ in places}
        if len(dims) > 1 or dims == {"unknown"}:
            raise ShapeError(
                f"{', '.join(repr(owner) for owner, _ in places)} share a parameter, and the plan does not shard it in "
                "one way: name all of them, with styles that shard it in the same way, or none"
            )
    return plan


def _sharded_dim(module: nn.Module, planned: ModulePlan | None) -> int | str | None:
    """Return the dimension along which a style shards a layer's weight."""
    if planned is None:
        return None
    if not isinstance(planned.style, ColwiseSKParallel | ColwiseParallel | RowwiseParallel):
        return "unknown"
    by_rows = isinstance(planned.style, RowwiseSKParallel | RowwiseParallel) == isinstance(module, nn.Embedding)
    return 0 if by_rows else 1

"""Tensor parallelism of a whole model, in six steps. Each step visits the modules once.

1. Check the arguments and the model: plain, neither sharded nor wrapped.
2. Plan: which modules are sharded, how and why (`_plan.py`). Nothing is changed.
3. Agree: ranks compare models and plans, in one exchange, and get the weights and sketches of the first rank.
4. Shard each module of the plan, without sending anything: every rank takes its shard of what it has.
5. Replicate the rest: put its parameters on the mesh, so that one gradient norm or checkpoint covers the model.
6. Report what was done to every module that has parameters.
"""

__all__ = ["ModulePlacement", "TensorParallelReport", "tensor_parallel"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from panther._text import format_table
from panther.distributed.comm.nodes import warn_across_nodes
from panther.distributed.sync.replicas import broadcast_model, built
from panther.distributed.tensor._module import ShardedModule, replicate_
from panther.distributed.tensor._plan import (
    ModulePlan,
    Plan,
    plan_automatically,
    plan_by_names,
    shared_parameters,
    tie_,
)
from panther.distributed.tensor._shared_input import share_input_
from panther.distributed.tensor.styles import PantherStyle
from panther.distributed.tensor.unshard import plain_class, remember_
from panther.errors import DistributedError, ShapeError

# The layers that Panther shards know their own; of torch's styles only these two change a layer.
_ACTIONS: dict[type, str] = {ColwiseParallel: "outputs sharded", RowwiseParallel: "inputs sharded"}


class ModulePlacement(NamedTuple):
    """How a module was placed on the mesh."""

    name: str
    kind: str
    action: str
    """``"outputs sharded"``, ``"inputs sharded"``, ``"rows sharded"``, ``"heads sharded"``, ``"sharded"`` with the
    module that it belongs to, ``"replicated"``, or the name of the plan's style."""
    reason: str


@dataclass(frozen=True)
class TensorParallelReport:
    """What :func:`tensor_parallel` did to every module that has parameters; ``print`` shows it."""

    placements: tuple[ModulePlacement, ...]
    """A row for each module with parameters."""
    model: nn.Module = field(repr=False, compare=False)
    """The sharded model."""

    def __str__(self) -> str:
        """Return a table with a line for each module."""
        return format_table([("module", "kind", "action", "reason"), *self.placements])


def tensor_parallel(
    model: nn.Module | Callable[[], nn.Module],
    mesh: DeviceMesh,
    plan: str | Mapping[str, ParallelStyle] = "auto",
) -> TensorParallelReport:
    """Shard a model's layers over the ranks of a mesh axis, in place. Every rank must call it.

    ``"auto"`` shards the following, and replicates the rest, which each rank computes in full:

    - blocks that the model's own plan names: an attribute ``_tp_plan`` of the model, or of a module in it, with
      ``"colwise"`` or ``"rowwise"`` by globs of layer names, as transformers' models have it;
    - attention by whole heads, if these are a multiple of the ranks: :class:`~panther.nn.RandMultiHeadAttention`,
      nn.MultiheadAttention (whose packed projection is replicated), and that of some classes of transformers
      without a plan, such as BERT's. Attributes that count heads become each rank's own;
    - pairs of linear layers, sketched or dense, with only elementwise functions between them: neighbours in an
      nn.Sequential, and the feed-forward blocks of torch's transformer layers and of transformers' common classes.
      The outputs of the first and the inputs of the second are sharded, split as by :func:`torch.chunk`, so that one
      sum is sent for each pair. Layers of one input, such as the projections of queries, keys and values, share its
      collective;
    - embeddings of 4096 rows or more, and linear layers without a partner that have as many outputs and more than four
      times as many as inputs; these outputs are gathered. Weights that such layers share stay shared.

    Where it is not certain that a part of the features or heads is enough, a block is replicated, and the report says
    why. Weights, sketches and random features are those of the axis's first rank. Where dropout acts on replicated
    tensors, ranks must draw the same random numbers: seed them equally along the axis. :func:`unshard_module` returns
    the plain model.

    Args:
        model: The model, built with the same sizes on every rank, on its device. Or a model on the meta device, or a
            function that builds one, which is called with ``torch.device("meta")``: it is sharded as it is, and
            :func:`materialize_` fills ``report.model`` shard by shard.
        mesh: One-dimensional, ``mesh["tp"]``.
        plan: ``"auto"``, or styles by globs of names: :class:`ColwiseSKParallel`, :class:`RowwiseSKParallel`,
            :class:`HeadwiseParallel`, or torch's.

    Returns:
        What was done to every module that has parameters of its own, and why.

    Raises:
        TypeError: If ``model``, ``mesh`` or a style is of another type.
        ShapeError: If ``mesh`` has several dimensions, a name of the plan matches nothing, a layer that it names has
            fewer outputs or inputs than ranks, or it shards a shared parameter in different ways.
        ValueError: If ``plan`` is another string.
        DistributedError: If there is no process group, or the model is sharded already or was given to data_parallel
            before: tensor parallelism comes first.

    Cost: one exchange of a digest between the ranks, and a broadcast of the model.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> layers = [pr.nn.SKLinear(256, 512, 4), nn.ReLU(), pr.nn.SKLinear(512, 256, 4), nn.LayerNorm(256)]
        >>> model = nn.Sequential(*layers)
        >>> report = tensor_parallel(model, pr.distributed.make_mesh(tp=1)["tp"])
        >>> [(entry.name, entry.action) for entry in report.placements]
        [('0', 'outputs sharded'), ('2', 'inputs sharded'), ('3', 'replicated')]
        >>> pr.distributed.shutdown()
    """
    model = built(model)
    _check(model, mesh, plan)
    decisions = plan_automatically(model, mesh.size()) if isinstance(plan, str) else plan_by_names(model, plan)
    broadcast_model(model, mesh.get_group(), "tensor_parallel", lambda: plan_in_words(decisions))
    return shard_model_(model, mesh, decisions)


def shard_model_(model: nn.Module, mesh: DeviceMesh, decisions: Plan) -> TensorParallelReport:
    """Do steps 4 to 6 of :func:`tensor_parallel`, on a model that is equal on all ranks already; nothing is sent."""
    warn_across_nodes("tensor parallelism", mesh.get_group())
    tied = shared_parameters(model)  # before anything is sharded, which gives every layer parameters of its own
    _shard(model, mesh, decisions)
    replicated = _replicate(model, mesh, decisions)
    tie_(model, tied)
    return _report(model, decisions, replicated)


def _check(model: nn.Module, mesh: Any, plan: Any) -> None:
    """Step 1: raise unless the arguments fit together, and the model is plain."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"tensor_parallel takes an nn.Module, not {model!r}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"tensor_parallel takes a DeviceMesh, such as make_mesh(tp=2)['tp'], not {mesh!r}")
    if mesh.ndim != 1:
        raise ShapeError(f"tensor_parallel takes one mesh axis, and the mesh has {mesh.mesh_dim_names}: use mesh['tp']")
    if not isinstance(plan, Mapping) and plan != "auto":
        raise ValueError(f"plan={plan!r} must be 'auto', or a mapping of names to styles")
    for name, style in () if isinstance(plan, str) else plan.items():
        if not isinstance(style, ParallelStyle):
            raise TypeError(f"style of {name!r} must be a ParallelStyle, such as ColwiseSKParallel(), not {style!r}")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise DistributedError(
            "the model is in DistributedDataParallel, which would not see that its layers are sharded: call "
            "tensor_parallel first, on the plain model, then data_parallel with strategy='fsdp' or 'replicate'"
        )
    named = (*model.named_parameters(), *model.named_buffers())
    if sharded := [name for name, tensor in named if isinstance(tensor, DTensor)]:
        raise DistributedError(
            f"{len(sharded)} of the model's tensors are on a mesh already, such as {sharded[0]!r}: call "
            "tensor_parallel once and before data_parallel, with a plan for all layers, or on unshard_module(model)"
        )


def plan_in_words(decisions: Plan) -> dict[str, str]:
    """Describe a plan, so that ranks can compare theirs."""
    return {f"style of {name!r} ": type(made.style).__name__ for name, made in decisions.items() if made.style}


def _shard(model: nn.Module, mesh: DeviceMesh, decisions: Plan) -> None:
    """Step 4: shard the modules that have a style, and set what they and others need for it."""
    for name, made in decisions.items():
        module = model.get_submodule(name)
        if isinstance(made.style, PantherStyle):
            made.style.shard_(module, mesh)
        elif made.style is not None:
            parallelize_module(module, mesh, made.style)
        if made.attributes:
            remember_(module, **{key: getattr(module, key) for key in made.attributes})
            vars(module).update(made.attributes)
    for together in dict.fromkeys(made.together for made in decisions.values() if made.together):
        share_input_([model.get_submodule(name) for name in together])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):  # DTensor and the collectives do not take nested tensors
            remember_(module, use_nested_tensor=module.use_nested_tensor)
            module.use_nested_tensor = False


def _replicate(model: nn.Module, mesh: DeviceMesh, decisions: Plan) -> dict[str, str | None]:
    """Step 5: put all remaining parameters on the mesh; return, by module, why its own stay plain, if they do."""
    done = {}
    # A list: replicating a module changes its class while the modules are gone through.
    for name, module in list(model.named_modules()):
        made = decisions.get(name, ModulePlan(""))
        if made.style is not None or all(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            continue  # sharded, by itself or with the module that it belongs to; or without parameters
        done[name] = replicate_(module, mesh, made.summed)
    return done


def _report(model: nn.Module, decisions: Plan, replicated: Mapping[str, str | None]) -> TensorParallelReport:
    """Step 6: tell what was done to every module that has parameters or a style."""
    placements = []
    for name, module in model.named_modules():
        made, kind = decisions.get(name, ModulePlan("")), plain_class(module).__name__
        parameters = list(module.parameters(recurse=False))
        if made.style is not None:
            action = module.action if isinstance(module, ShardedModule) else _ACTIONS.get(type(made.style))
            placements.append(ModulePlacement(name, kind, action or type(made.style).__name__, made.reason))
        elif name in replicated:
            reasons = made.reason or "replicated on every rank", replicated[name]
            placements.append(ModulePlacement(name, kind, "replicated", "; ".join(filter(None, reasons))))
        elif parameters:  # placed together with the module that contains it, which reads them
            sharded = any(not p.is_replicate() for tensor in parameters for p in tensor.placements)
            reason = f"with {name.rpartition('.')[0]!r}"
            placements.append(ModulePlacement(name, kind, "sharded" if sharded else "replicated", reason))
    return TensorParallelReport(tuple(placements), model)

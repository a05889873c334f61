"""Tensor parallelism of an entire model, in six steps. Each step visits the modules once.

1. Check the arguments, and that the model is neither sharded nor wrapped.
2. Plan which modules are sharded, how and why (`sharding_plan.py`). Nothing is changed.
3. Agree: ranks compare models and plans, in one exchange, and get the weights and sketches of the first rank.
4. Shard each module of the plan, without sending anything: every rank takes its shards of the full tensors.
5. Replicate the rest: put its parameters on the mesh, so that one gradient norm or checkpoint covers the model.
6. Report the placement of every module that has parameters.
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
from panther.distributed.sync.replicas import broadcast_model, built, warn_of_pickled_shards
from panther.distributed.tensor._linear import share_input_
from panther.distributed.tensor._module import ShardedModule, replicate_
from panther.distributed.tensor.sharding_plan import (
    ModulePlan,
    Plan,
    plan_automatically,
    plan_by_names,
    shared_parameters,
    tie_,
)
from panther.distributed.tensor.styles import PantherStyle
from panther.distributed.tensor.unshard import plain_class, remember_
from panther.errors import DistributedError, ShapeError

# Actions of the two styles of torch that shard a layer; layers that Panther shards have an attribute action.
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
    """The placement by :func:`tensor_parallel` of every module that has parameters; ``print`` shows a table."""

    placements: tuple[ModulePlacement, ...]
    """The placement of each module with parameters."""
    model: nn.Module = field(repr=False, compare=False)
    """The sharded model."""

    def __str__(self) -> str:
        """Return a table with a line for each module."""
        return format_table([("module", "kind", "action", "reason"), *self.placements])


def tensor_parallel(
    model: nn.Module | Callable[[], nn.Module], mesh: DeviceMesh, plan: str | Mapping[str, ParallelStyle] = "auto"
) -> TensorParallelReport:
    """Shard a model's layers over the ranks of a mesh axis, in place. Every rank must call it.

    ``"auto"`` shards the following, and replicates the rest, which each rank computes in full:

    - blocks that the model's own plan names: an attribute ``_tp_plan`` of the model, or of a module in it, with
      ``"colwise"`` or ``"rowwise"`` by globs of layer names, as in models of transformers;
    - :class:`~panther.nn.RandMultiHeadAttention` by heads, if their number is a multiple of the ranks
      (nn.MultiheadAttention, whose projections are packed, is replicated);
    - pairs of linear layers, sketched or dense, with only elementwise functions between them: neighbours in an
      nn.Sequential, and the feed-forward blocks of torch's transformer layers and of transformers' common classes.
      The outputs of the first layer and the inputs of the second one are sharded, split as by :func:`torch.chunk`, so
      that one sum is sent for each pair. Dense layers with the same input, such as the projections of queries, keys
      and values, share a collective;
    - embeddings of 4096 rows or more, and linear layers without a partner that have 4096 outputs or more and more than
      four times as many outputs as inputs; these outputs are gathered. Weights that such layers share stay shared.

    If it is not certain that a block can work on a part of the features or heads, it is replicated, and the report
    states why. All ranks get the weights, sketches and random features of the axis's first rank. If dropout acts on
    replicated tensors, ranks must draw the same random numbers: seed them equally along the axis.
    :func:`unshard_module` returns the plain model.

    Args:
        model: The model, built with the same sizes on every rank, on its device. Or a model on the meta device, or a
            function that builds one, which is called with ``torch.device("meta")``: it is sharded without values, and
            :func:`materialize_` fills ``report.model`` shard by shard.
        mesh: One-dimensional, ``mesh["tp"]``.
        plan: ``"auto"``, or styles by globs of names: :class:`ColwiseSKParallel`, :class:`RowwiseSKParallel`,
            :class:`HeadwiseParallel`, or torch's.

    Returns:
        A report of the placement of every module that has its own parameters, with the reasons.

    Raises:
        TypeError: If ``model``, ``mesh`` or a style has a different type.
        ShapeError: If ``mesh`` has more than one dimension, a name of the plan matches nothing, a layer that it names
            has fewer outputs or inputs than ranks, or it shards a shared parameter in different ways.
        ValueError: If ``plan`` is a different string.
        DistributedError: If there is no process group, or the model is sharded already or was given to data_parallel
            before: tensor parallelism comes first.

    Cost: one exchange of a digest between the ranks, and a broadcast of the model.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> layers = [
        ...     pr.nn.SKLinear(256, 512, 4),
        ...     nn.ReLU(),
        ...     pr.nn.SKLinear(512, 256, 4),
        ...     nn.LayerNorm(256),
        ... ]
        >>> model = nn.Sequential(*layers)
        >>> report = tensor_parallel(
        ...     model, pr.distributed.make_mesh(tp=1)["tp"]
        ... )
        >>> [(entry.name, entry.action) for entry in report.placements]
        [('0', 'outputs sharded'), ('2', 'inputs sharded'), ('3', 'replicated')]
        >>> pr.distributed.shutdown()
    """
    model = built(model)
    _check(model, mesh, plan)
    decisions = plan_automatically(model, mesh.size()) if isinstance(plan, str) else plan_by_names(model, plan)
    broadcast_model(model, mesh.get_group(), "tensor_parallel", lambda: describe_plan(decisions))
    return shard_model_(model, mesh, decisions)


def shard_model_(model: nn.Module, mesh: DeviceMesh, decisions: Plan) -> TensorParallelReport:
    """Do steps 4 to 6 of :func:`tensor_parallel`, on a model that is equal on all ranks already; nothing is sent."""
    warn_of_pickled_shards()
    tied = shared_parameters(model)  # before sharding, which gives every layer separate parameters
    _shard(model, mesh, decisions)
    replicated = _replicate(model, mesh, decisions)
    tie_(model, tied)
    return _report(model, decisions, replicated)


def _check(model: nn.Module, mesh: Any, plan: Any) -> None:
    """Step 1: raise unless the arguments are valid, and the model is neither sharded nor wrapped."""
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
    tensors = (*model.named_parameters(), *model.named_buffers())
    if sharded := [name for name, tensor in tensors if isinstance(tensor, DTensor)]:
        raise DistributedError(
            f"{len(sharded)} of the model's tensors are on a mesh already, such as {sharded[0]!r}: call "
            "tensor_parallel once and before data_parallel, with a plan for all layers, or on unshard_module(model)"
        )


def describe_plan(decisions: Plan) -> dict[str, str]:
    """Describe a plan, so that ranks can compare their plans."""
    return {f"style of {name!r} ": type(entry.style).__name__ for name, entry in decisions.items() if entry.style}


def _shard(model: nn.Module, mesh: DeviceMesh, decisions: Plan) -> None:
    """Step 4: shard the modules that have a style."""
    for name, entry in decisions.items():
        module = model.get_submodule(name)
        if isinstance(entry.style, PantherStyle):
            entry.style.shard_(module, mesh)
        elif entry.style is not None:
            parallelize_module(module, mesh, entry.style)
    for module in model.modules():
        share_input_(module)
        if isinstance(module, nn.TransformerEncoder):  # DTensor and the collectives do not take nested tensors
            remember_(module, use_nested_tensor=module.use_nested_tensor)
            module.use_nested_tensor = False


def _replicate(model: nn.Module, mesh: DeviceMesh, decisions: Plan) -> dict[str, str | None]:
    """Step 5: put all remaining parameters on the mesh; return, by module, why parameters stay plain, or None."""
    replicated = {}
    # A list, because replicating a module changes its class during the iteration.
    for name, module in list(model.named_modules()):
        entry = decisions.get(name, ModulePlan(""))
        if entry.style is not None or all(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            continue  # the module is sharded, by itself or with its parent, or it has no parameters
        replicated[name] = replicate_(module, mesh, entry.summed)
    return replicated


def _report(model: nn.Module, decisions: Plan, replicated: Mapping[str, str | None]) -> TensorParallelReport:
    """Step 6: report the placement of every module that has parameters or a style."""
    placements = []
    for name, module in model.named_modules():
        entry, kind = decisions.get(name, ModulePlan("")), plain_class(module).__name__
        parameters = list(module.parameters(recurse=False))
        if entry.style is not None:
            action = module.action if isinstance(module, ShardedModule) else _ACTIONS.get(type(entry.style))
            placements.append(ModulePlacement(name, kind, action or type(entry.style).__name__, entry.reason))
        elif name in replicated:
            reasons = entry.reason or "replicated on every rank", replicated[name]
            placements.append(ModulePlacement(name, kind, "replicated", "; ".join(filter(None, reasons))))
        elif parameters:  # placed with the parent module, which reads the parameters
            sharded = any(not p.is_replicate() for tensor in parameters for p in tensor.placements)
            reason = f"with {name.rpartition('.')[0]!r}"
            placements.append(ModulePlacement(name, kind, "sharded" if sharded else "replicated", reason))
    return TensorParallelReport(tuple(placements), model)

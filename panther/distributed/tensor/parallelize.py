"""Tensor parallelism of a whole model: which layers pair up, and what is done to every module."""

__all__ = ["Placed", "TensorParallelReport", "tensor_parallel"]

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from panther._text import format_table
from panther.distributed.sync.replicas import broadcast_model
from panther.distributed.tensor._attention import HeadwiseRandAttention
from panther.distributed.tensor._linear import ColwiseLinear, RowwiseLinear, VocabularyEmbedding
from panther.distributed.tensor._packed_attention import HeadwiseMultiheadAttention
from panther.distributed.tensor._plan import Plan, plan_automatically, shared_parameters
from panther.distributed.tensor._record import remember_
from panther.distributed.tensor._sk_linear import ColwiseSKLinear, RowwiseSKLinear, copy_
from panther.distributed.tensor.styles import ColwiseSKParallel, RowwiseSKParallel
from panther.errors import DistributedError, ShapeError


class Placed(NamedTuple):
    """What was done to a module."""

    name: str
    kind: str
    action: str
    """``"outputs cut"``, ``"inputs cut"``, ``"rows cut"``, ``"heads cut"``, ``"cut"`` with the module that it is in,
    ``"copied"``, or the style of the plan."""
    reason: str


@dataclass(frozen=True)
class TensorParallelReport:
    """What :func:`tensor_parallel` did to every module that has parameters; ``print`` shows it."""

    placed: tuple[Placed, ...]

    def __str__(self) -> str:
        """A line a module."""
        rows = [("module", "kind", "action", "reason"), *self.placed]
        return format_table(rows)


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: str | Mapping[str, ParallelStyle] = "auto",
    *,
    sequence_parallel: bool = False,
) -> TensorParallelReport:
    """Share a model's layers over the ranks of a mesh axis, in place. Every rank must call it.

    ``"auto"`` cuts, and copies the rest, which each rank computes whole:

    - pairs of linear layers, sketched or dense, between which only functions of single entries stand: neighbours in an
      nn.Sequential, and feed-forward blocks that name their layers as torch's and common transformers do (linear1 and
      linear2; gate_proj, up_proj and down_proj; fc1 and fc2; ...) and whose forward, which is traced, does nothing else
      there. The outputs of the first and the inputs of the second are cut, as :func:`torch.chunk` cuts them, so that
      one sum a pair is all that is sent;
    - attention by whole heads, if the ranks divide them: :class:`~panther.nn.RandMultiHeadAttention`,
      nn.MultiheadAttention (whose packed projection stays whole on every rank), and blocks that
      name their projections as transformers do (q_proj, k_proj, v_proj and o_proj; query, key, value and dense; ...).
      Attributes that count heads become each rank's own;
    - tables of 4096 rows or more (nn.Embedding), and linear layers without a partner of so many outputs and more than
      four times their inputs, whose outputs are gathered. Weights that such layers share stay shared.

    Weights, sketches and random features are those of the axis's first rank. Ranks must draw the same random numbers
    where dropout acts on what is not cut: seed them alike along the axis. :func:`unshard_module` undoes it all.

    Args:
        model: Built alike on every rank, on its device.
        mesh: One-dimensional, ``mesh["tp"]``.
        plan: ``"auto"``, or styles by globs of names: :class:`ColwiseSKParallel`, :class:`RowwiseSKParallel`,
            :class:`HeadwiseParallel`, or torch's.
        sequence_parallel: Whether to cut the sequence, the second dimension, where in an nn.Sequential only norms and
            functions of single entries stand between two pairs; for inputs (batch, sequence, features).

    Returns:
        What was done to every module that has parameters of its own, and why.

    Raises:
        ShapeError: If ``mesh`` is none, or has several dimensions, a name of the plan matches nothing, a layer that it
            names has fewer outputs or inputs than ranks, or it cuts a parameter that layers share in several ways.
        ValueError: If ``plan`` is another string, or ``sequence_parallel`` is asked for beside a plan of styles.
        DistributedError: If there is no process group, or the model is cut already, or was given to data_parallel
            before: tensor parallelism comes first.

    Example:
        >>> import panther as pr, torch
        >>> pr.distributed.init()
        >>> layers = [pr.nn.SKLinear(256, 512, 4), nn.ReLU(), pr.nn.SKLinear(512, 256, 4), nn.LayerNorm(256)]
        >>> model = nn.Sequential(*layers)
        >>> report = tensor_parallel(model, pr.distributed.make_mesh(tp=1)["tp"])
        >>> [(entry.name, entry.action) for entry in report.placed]
        [('0', 'outputs cut'), ('2', 'inputs cut'), ('3', 'copied')]
        >>> pr.distributed.shutdown()
    """
    if not isinstance(mesh, DeviceMesh):
        raise ShapeError(f"tensor_parallel takes a DeviceMesh, such as make_mesh(tp=2)['tp'], and was given {mesh!r}")
    _check_plain(model)
    if mesh.ndim != 1:
        raise ShapeError(f"tensor_parallel takes one mesh axis, and the mesh has {mesh.mesh_dim_names}: use mesh['tp']")
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(f"plan={plan!r} must be 'auto', or a mapping of names to styles")
    if sequence_parallel and not isinstance(plan, str):
        raise ValueError("sequence_parallel=True goes with plan='auto': give the styles of a plan Shard(1) as a layout")
    if isinstance(plan, str):
        made = plan_automatically(model, mesh.size(), sequence_parallel=sequence_parallel)
    else:
        made = _named(model, plan)
    broadcast_model(
        model,
        mesh.get_group(),
        "tensor_parallel",
        lambda: {f"style of {name!r} ": type(style).__name__ for name, style in made.styles.items()},
    )
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    tied = shared_parameters(model)
    parallelize_module(model, mesh, dict(made.styles))
    for name, attributes in made.attributes.items():
        module = model.get_submodule(name)
        remember_(module, **{key: getattr(module, key) for key in attributes})
        vars(module).update(attributes)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):  # collectives know no nested tensors
            remember_(module, use_nested_tensor=module.use_nested_tensor)
            module.use_nested_tensor = False
    placed = [
        Placed(name, kinds[name], *_place(name, module, mesh, made))
        for name, module in list(model.named_modules())
        if name in made.styles or any(parameter is not None for parameter in module._parameters.values())
    ]
    _tie(model, tied)
    return TensorParallelReport(tuple(placed))


def _check_plain(model: nn.Module) -> None:
    """Raise if a model is cut, sharded or wrapped."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise DistributedError(
            "the model is in DistributedDataParallel, which would not see its layers being cut: call tensor_parallel "
            "first, on the plain model, then data_parallel with strategy='fsdp' or 'replicate'"
        )
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise DistributedError(
            "the model is sharded for data parallelism, and its shards cannot be cut: call tensor_parallel first, then "
            "data_parallel"
        )
    tensors = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    cut = [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
    if cut:
        raise DistributedError(
            f"{len(cut)} of the model's tensors are on a mesh already, such as {cut[0]!r}: call tensor_parallel once, "
            "with a plan for all that is to be cut, or on unshard_module(model)"
        )


def _place(name: str, module: nn.Module, mesh: DeviceMesh, plan: Plan) -> tuple[str, str]:
    """What was done to a module, copying it if nothing was, and why."""
    if name in plan.styles:
        named = type(plan.styles[name]).__name__
        action = next((action for kind, action in _ACTIONS.items() if isinstance(module, kind)), None)
        return action or _ACTIONS_OF_STYLES.get(type(plan.styles[name]), named), plan.why[name]
    if all(parameter is None or isinstance(parameter, DTensor) for parameter in module._parameters.values()):
        owner = name.rpartition(".")[0]
        while owner and owner not in plan.styles:
            owner = owner.rpartition(".")[0]
        parts = [placement for p in module._parameters.values() if p is not None for placement in p.placements]  # type: ignore[attr-defined]
        action = "copied" if all(isinstance(placement, Replicate) for placement in parts) else "cut"
        return action, f"with {owner!r}" if owner in plan.styles else "with the module that it is part of"
    if name in plan.plain:
        return "copied", f"{plan.why[name]}; its parameters stay plain tensors"
    how = copy_(module, mesh, name in plan.summed)
    return "copied", plan.why.get(name, how) if "plain" not in how else f"{plan.why.get(name, '')} {how}".strip()


_ACTIONS: dict[type, str] = {
    ColwiseSKLinear: "outputs cut",
    ColwiseLinear: "outputs cut",
    RowwiseSKLinear: "inputs cut",
    RowwiseLinear: "inputs cut",
    VocabularyEmbedding: "rows cut",
    HeadwiseRandAttention: "heads cut",
    HeadwiseMultiheadAttention: "heads cut",
}
_ACTIONS_OF_STYLES: dict[type, str] = {ColwiseParallel: "outputs cut", RowwiseParallel: "inputs cut"}


def _named(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> Plan:
    names = [name for name, _ in model.named_modules() if name]
    made = Plan()
    for pattern, style in plan.items():
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ShapeError(f"plan names {pattern!r}, which matches no module of {', '.join(names[:10])}")
        for name in matched:
            made.styles[name], made.why[name] = style, f"by the plan's {pattern!r}"
    for places in shared_parameters(model):
        cut = {_cut_dim(model.get_submodule(owner), made.styles.get(owner)) for owner, _ in places}
        if len(cut) > 1 or (cut == {"unknown"}):
            raise ShapeError(
                f"{', '.join(repr(owner) for owner, _ in places)} share a parameter, and the plan does not cut it in "
                "one way: name all of them, with styles that cut it alike, or none"
            )
    return made


def _cut_dim(module: nn.Module, style: ParallelStyle | None) -> int | str | None:
    """The dimension along which a style cuts a layer's weight."""
    if style is None:
        return None
    if not isinstance(style, ColwiseSKParallel | ColwiseParallel | RowwiseParallel):
        return "unknown"
    by_rows = isinstance(style, RowwiseSKParallel | RowwiseParallel) == isinstance(module, nn.Embedding)
    return 0 if by_rows else 1


def _tie(model: nn.Module, tied: list[list[tuple[str, str]]]) -> None:
    """Let parameters that were shared be shared again: every layer has been given one of its own."""
    for places in tied:
        owners: list[tuple[Any, str]] = [(model.get_submodule(owner), name) for owner, name in places]
        for owner, name in owners[1:]:
            owner.register_parameter(name, getattr(*owners[0]))

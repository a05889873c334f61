"""Build a distributed model from settings, in seven steps.

1. Arrange the ranks on a mesh, and group the ranks that split the data.
2. Plan: check the model for every strategy, and decide which layers are sharded (`tensor/sharding_plan.py`) and where
   stages begin (`pipeline/stages.py`), while layers are full. Nothing is changed.
3. Agree: ranks compare models, settings and plans, in one exchange, and get the weights and sketches of the first rank.
   This is the only broadcast of the model; later steps send none of its tensors.
4. Shard layers along tp. This comes before data parallelism, because only FSDP can shard a shard again.
5. Recompute: wrap the blocks that the backward pass computes again.
6. Split the model into the stages of this rank along pp.
7. Replicate or shard the model, or each of its stages, along dp.
"""

__all__ = ["Groups", "Parallelized", "parallelize"]

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from panther.distributed.comm.mesh import get_world_size, make_mesh
from panther.distributed.comm.ranks import flatten_mesh, mesh_of_group, require_process_group, transport
from panther.distributed.data.comm_hooks import register_hook, register_replica_hook
from panther.distributed.data.strategies import (
    DATA_PARALLEL_MODELS,
    check_model,
    fsdp_blocks,
    fully_shard_,
    shard_axis,
    wrap_in_ddp,
)
from panther.distributed.parallelize.config import ParallelismConfig
from panther.distributed.parallelize.layout import Layout
from panther.distributed.pipeline.balance import SCHEDULES
from panther.distributed.pipeline.stage_modules import StageModules
from panther.distributed.sync.replicas import broadcast_model, built
from panther.distributed.tensor.activation_checkpoint import checkpoint_blocks_
from panther.distributed.tensor.parallelize import TensorParallelReport, describe_plan, shard_model_
from panther.distributed.tensor.sharding_plan import Plan, plan_automatically, plan_by_names
from panther.errors import ShapeError

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from panther.distributed.pipeline.stages import StagePlan


class Groups(NamedTuple):
    """The process groups of a rank."""

    data: dist.ProcessGroup
    """The ranks that have the same stages and shards, and split the data."""
    tensor: dist.ProcessGroup | None
    """The ranks that share the layers of this rank; None if the mesh has no axis tp."""


class Parallelized(NamedTuple):
    """A distributed model, and how it is distributed."""

    model: nn.Module
    """The model to train, wrapped if the strategy is ``"ddp"``; or this rank's stages, as a :class:`StageModules`."""
    stages: "list[PipelineStage]"
    """The stages of this rank; empty without a pipeline."""
    mesh: DeviceMesh
    groups: Groups
    report: TensorParallelReport | None
    """The report of tensor parallelism, or None."""
    layout: Layout


class _ModelPlan(NamedTuple):
    """The layers to shard along tp, and the stages, or None without a pipeline."""

    layers: Plan
    stages: "StagePlan | None"


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    config: ParallelismConfig,
    *,
    styles: Mapping[str, ParallelStyle] | None = None,
    all_axes: bool = False,
) -> Parallelized:
    """Distribute a model over all ranks, in place. Every rank must call it, with a model built with the same sizes.

    ``styles`` are for tensor parallelism, by globs of layer names; None plans as :func:`tensor_parallel` does. With
    ``all_axes`` the mesh has the axes dp, pp and tp even if the model is only replicated or sharded along dp.
    """
    require_process_group()
    model, layout = built(model), config.layout(get_world_size())
    mesh, data_axes, groups = _arrange(layout, all_axes)
    plan = _agree(model, config, partial(_plan, model, config, layout, styles))
    report = shard_model_(model, mesh["tp"], plan.layers) if layout.tp > 1 else None
    checkpoint_blocks_(model, fsdp_blocks(model), config.activation_checkpointing)
    stages = plan.stages.stages(model, mesh["pp"].get_group()) if plan.stages else []
    model = _replicate_or_shard(model, stages, config, data_axes, groups.data)
    return Parallelized(model, stages, mesh, groups, report, layout)


def _arrange(layout: Layout, all_axes: bool) -> tuple[DeviceMesh, DeviceMesh, Groups]:
    """Step 1: return the mesh, its axes of data parallelism, and the groups."""
    world = dist.group.WORLD
    assert world is not None
    replicas = layout.replicate if layout.replicate > 1 else None
    if all_axes or layout.shares_layers:
        mesh = make_mesh(dp=layout.dp, pp=layout.pp, tp=layout.tp, replicate=replicas)
    elif replicas is not None:
        mesh = make_mesh(dp=layout.dp, replicate=replicas)
    else:
        mesh = mesh_of_group(world, transport(None).type, "dp")  # which needs no other group
    axes = mesh["dp"] if replicas is None else mesh["replicate", "dp"]
    data = world
    if layout.shares_layers:
        data = (axes if replicas is None else flatten_mesh(axes, "data")).get_group()
    return mesh, axes, Groups(data, mesh["tp"].get_group() if "tp" in (mesh.mesh_dim_names or ()) else None)


def _plan(
    model: nn.Module, config: ParallelismConfig, layout: Layout, styles: Mapping[str, ParallelStyle] | None
) -> _ModelPlan:
    """Step 2: check the model for every strategy, and decide about its layers and stages."""
    if layout.strategy is not None:
        check_model(model, layout.strategy)
    layers: Plan = {}
    if layout.tp > 1:
        layers = plan_automatically(model, layout.tp) if styles is None else plan_by_names(model, styles)
    return _ModelPlan(layers, _plan_stages(model, config, layout.pp) if layout.pp > 1 else None)


def _plan_stages(model: nn.Module, config: ParallelismConfig, ranks: int) -> "StagePlan":
    from panther.distributed.pipeline.stages import plan_stages  # here, because torch's pipelines are slow to import

    layers = config.pipeline_layers
    n = ranks * SCHEDULES[config.schedule].stages_per_rank
    if layers is None and not isinstance(model, nn.Sequential):
        raise ShapeError(
            f"a pipeline splits an nn.Sequential, not a {type(model).__name__}: make the model one, or name its "
            "ModuleList in pipeline_layers"
        )
    trained = [child for child in model.children() if any(p.requires_grad for p in child.parameters())]
    if layers is None and len(trained) < n:
        raise ShapeError(
            f"every one of {n} stages must have something to train, and {len(trained)} of the model's children "
            "have parameters that require a gradient: use fewer stages"
        )
    return plan_stages(model, n, ranks, layers=layers, sample_input=config.sample_input)


def _agree(model: nn.Module, config: ParallelismConfig, plan: Callable[[], _ModelPlan]) -> _ModelPlan:
    """Step 3: compare what ranks plan, and broadcast the model. An error of one rank's plan is raised on all ranks."""
    plans: list[_ModelPlan] = []

    def describe() -> dict[str, Any]:
        plans[:] = [plan()]
        (layers, stages) = plans[0]
        return {**vars(config), "sample_input": stages and stages.sample, **describe_plan(layers)}

    broadcast_model(model, dist.group.WORLD, "parallelize", describe)  # type: ignore[arg-type]
    return plans[0]


def _replicate_or_shard(
    model: nn.Module,
    stages: "list[PipelineStage]",
    config: ParallelismConfig,
    axes: DeviceMesh,
    group: dist.ProcessGroup,
) -> nn.Module:
    """Step 7: apply data parallelism, and return the model to train."""
    if config.data_parallel == "ddp":
        options: dict[str, Any] = {} if config.bucket_cap_mb is None else {"bucket_cap_mb": config.bucket_cap_mb}
        options |= {name: getattr(config, name) for name in ("find_unused_parameters", "gradient_as_bucket_view")}
        model = wrap_in_ddp(model, group, init_sync=False, **options)
        if config.comm_hook is not None:
            register_hook(model, config.comm_hook, vars(config))
    elif config.data_parallel is not None:
        options = {"mixed_precision": config.mixed_precision, "cpu_offload": config.cpu_offload}
        if not config.reshard_after_forward:
            options["reshard_after_forward"] = False  # FSDP2's default keeps only the root unit gathered
        shards = axes if config.comm_hook is None else shard_axis(axes)
        for module in [stage.submod for stage in stages] or [model]:
            fully_shard_(module, shards, config.data_parallel, one_block=bool(stages), **options)
        if config.comm_hook is not None:
            register_replica_hook(model, config.comm_hook, vars(config), axes)
    if stages:
        return StageModules(stage.submod for stage in stages)
    if config.data_parallel is not None:
        DATA_PARALLEL_MODELS.add(model)
    return model

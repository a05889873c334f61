"""Distribute a model by a layout of a plan."""

__all__ = ["build"]

from typing import Any

from torch import nn

from panther.distributed.advisor.cost.layout import Layout
from panther.distributed.comm.mesh import get_world_size, make_mesh
from panther.distributed.comm.ranks import require_process_group
from panther.distributed.data.sharded_blocks import fsdp_blocks
from panther.distributed.data.strategies import data_parallel
from panther.distributed.hybrid.trainer import HybridParallelTrainer
from panther.distributed.tensor.activation_checkpoint import checkpoint_blocks_
from panther.distributed.tensor.parallelize import tensor_parallel
from panther.errors import DistributedError


def build(model: nn.Module, layout: Layout, mixed_precision: str | None, activation_checkpointing: str) -> Any:
    """Distribute the model by the layout, in place; see :meth:`ParallelismPlan.apply`."""
    require_process_group()
    if get_world_size() != layout.world:
        raise DistributedError(
            f"the plan is for {layout.world} ranks ({layout}) and the world size is {get_world_size()}: plan for "
            f"gpus={get_world_size()}, or start {layout.world} processes"
        )
    if layout.pp > 1:
        config = {
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
            "data_parallel_size": layout.dp,
            "num_microbatches": layout.num_microbatches,
            "schedule": layout.schedule,
            "data_parallel": layout.strategy,
            "mixed_precision": mixed_precision,
            "activation_checkpointing": activation_checkpointing,
        }
        return HybridParallelTrainer(model, config)
    mesh = make_mesh(dp=layout.dp, tp=layout.tp, replicate=layout.replicate if layout.replicate > 1 else None)
    if layout.tp > 1:
        tensor_parallel(model, mesh["tp"])
    checkpoint_blocks_(model, fsdp_blocks(model), activation_checkpointing)
    if layout.strategy is None:
        return model
    axes = mesh["replicate", "dp"] if layout.replicate > 1 else mesh["dp"]
    half = None if layout.strategy == "ddp" else mixed_precision
    return data_parallel(model, axes, layout.strategy, mixed_precision=half)

"""Sketched models on many processes, on torch's own engines."""

# Written out, because type checkers do not read a computed list. A test compares it with the table below.
__all__ = [
    "AdvancedDistributedTrainer", "ClusterSpec", "ColwiseSKParallel", "CommunicationCounter", "CommunicationProfile",
    "ContextParallelReport", "DeviceUtilization", "DistributedInfo", "DistributedLauncher",
    "DistributedMetricsCollector", "DistributedSketchedModel", "HeadwiseParallel", "HybridParallelTrainer",
    "LaunchConfig", "MicrobatchPipelineTrainer", "ModelStats", "ParallelismConfig", "ParallelismPlan",
    "PipelineParallelSketchedModel", "PipelineSchedule", "ReduceOp", "RowwiseSKParallel", "TensorParallelModel",
    "TensorParallelReport", "TensorParallelSKLinear", "all_gather", "all_reduce", "broadcast",
    "checkpoint", "choose_parallelism_strategy", "cleanup_distributed", "context_parallel", "data_parallel",
    "get_distributed_info", "get_rank", "get_world_size", "init", "inner_product_policy", "launch",
    "launch_distributed_training", "make_mesh", "make_schedule", "materialize_", "no_sync", "plan_parallelism",
    "profile_communication_overhead", "reduce_scatter", "setup_distributed", "shutdown", "split_stages",
    "sync_sketches", "tensor_parallel", "unshard_module", "verify_sketches",
]  # fmt: skip

from importlib import import_module
from typing import TYPE_CHECKING, Any

from panther._hints import missing_name

if TYPE_CHECKING:
    from . import checkpoint
    from .advisor.cluster import ClusterSpec
    from .advisor.model_stats import ModelStats
    from .advisor.plan import ParallelismPlan, plan_parallelism
    from .comm.bandwidth import CommunicationProfile, DeviceUtilization, profile_communication_overhead
    from .comm.collectives import ReduceOp, all_gather, all_reduce, broadcast, reduce_scatter
    from .comm.mesh import DistributedInfo, get_distributed_info, get_rank, get_world_size, make_mesh
    from .comm.process_group import cleanup_distributed, init, setup_distributed, shutdown
    from .comm.traffic import CommunicationCounter
    from .context import ContextParallelReport, context_parallel
    from .data.strategies import data_parallel, no_sync
    from .guide.hybrid import HybridParallelTrainer
    from .guide.layers import (
        DistributedSketchedModel,
        PipelineParallelSketchedModel,
        TensorParallelModel,
        TensorParallelSKLinear,
    )
    from .guide.metrics import DistributedMetricsCollector, choose_parallelism_strategy
    from .guide.trainers import AdvancedDistributedTrainer, MicrobatchPipelineTrainer
    from .launcher.config import LaunchConfig
    from .launcher.function import launch
    from .launcher.script import DistributedLauncher, launch_distributed_training
    from .materialize import materialize_
    from .parallelize.config import ParallelismConfig
    from .pipeline.schedules import PipelineSchedule, make_schedule
    from .pipeline.stages import split_stages
    from .sync.sketches import sync_sketches, verify_sketches
    from .tensor.activation_checkpoint import inner_product_policy
    from .tensor.parallelize import TensorParallelReport, tensor_parallel
    from .tensor.styles import ColwiseSKParallel, HeadwiseParallel, RowwiseSKParallel
    from .tensor.unshard import unshard_module

# PEP 562: torch's pipelines and DTensor take as long to import as torch itself, and a launcher needs neither.
_MODULES = {
    "advisor.cluster": ("ClusterSpec",),
    "advisor.model_stats": ("ModelStats",),
    "advisor.plan": ("ParallelismPlan", "plan_parallelism"),
    "comm.bandwidth": ("CommunicationProfile", "DeviceUtilization", "profile_communication_overhead"),
    "comm.collectives": ("ReduceOp", "all_gather", "all_reduce", "broadcast", "reduce_scatter"),
    "comm.mesh": ("DistributedInfo", "get_distributed_info", "get_rank", "get_world_size", "make_mesh"),
    "comm.process_group": ("cleanup_distributed", "init", "setup_distributed", "shutdown"),
    "comm.traffic": ("CommunicationCounter",),
    "context": ("ContextParallelReport", "context_parallel"),
    "data.strategies": ("data_parallel", "no_sync"),
    "guide.hybrid": ("HybridParallelTrainer",),
    "guide.layers": (
        "DistributedSketchedModel",
        "PipelineParallelSketchedModel",
        "TensorParallelModel",
        "TensorParallelSKLinear",
    ),
    "guide.metrics": ("DistributedMetricsCollector", "choose_parallelism_strategy"),
    "guide.trainers": ("AdvancedDistributedTrainer", "MicrobatchPipelineTrainer"),
    "launcher.function": ("launch",),
    "launcher.config": ("LaunchConfig",),
    "launcher.script": ("DistributedLauncher", "launch_distributed_training"),
    "materialize": ("materialize_",),
    "parallelize.config": ("ParallelismConfig",),
    "pipeline.schedules": ("PipelineSchedule", "make_schedule"),
    "pipeline.stages": ("split_stages",),
    "sync.sketches": ("sync_sketches", "verify_sketches"),
    "tensor.activation_checkpoint": ("inner_product_policy",),
    "tensor.parallelize": ("TensorParallelReport", "tensor_parallel"),
    "tensor.styles": ("ColwiseSKParallel", "HeadwiseParallel", "RowwiseSKParallel"),
    "tensor.unshard": ("unshard_module",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return import_module(f"{__name__}.checkpoint")
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise missing_name(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

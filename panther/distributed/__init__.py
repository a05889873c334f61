"""Sketched models on many processes, on torch's own engines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import checkpoint
    from ._unsharding import unshard_module
    from .advanced import AdvancedDistributedTrainer
    from .advisor import choose_parallelism_strategy
    from .bandwidth import CommunicationProfile, profile_communication_overhead
    from .cluster import ClusterSpec
    from .collectives import all_gather, all_reduce, broadcast, reduce_scatter
    from .data import data_parallel
    from .hybrid import HybridParallelTrainer
    from .launcher import LaunchConfig, LaunchError, LaunchResult, launch_distributed_training
    from .launching import cleanup_distributed, init, launch, setup_distributed, shutdown
    from .mesh import DistributedInfo, get_distributed_info, get_rank, get_world_size, make_mesh
    from .metrics import DistributedMetricsCollector
    from .microbatches import MicrobatchPipelineTrainer, PipelineParallelSketchedModel
    from .model_stats import ModelStats
    from .models import DistributedSketchedModel
    from .pipelining import PipelineSchedule, make_schedule
    from .plan import ParallelismPlan, plan_parallelism
    from .planning import TensorParallelReport, tensor_parallel
    from .profiling import CommunicationCounter, comm_bytes
    from .stages import split_stages
    from .sync import sync_sketches, verify_sketches
    from .tensor import (
        ColwiseSKParallel,
        HeadwiseParallel,
        RowwiseSKParallel,
        TensorParallelModel,
        TensorParallelSKLinear,
    )

# PEP 562: torch's pipelines and DTensor take as long to import as torch itself, and a launcher needs neither.
_MODULES = {
    "_unsharding": ("unshard_module",),
    "advanced": ("AdvancedDistributedTrainer",),
    "advisor": ("choose_parallelism_strategy",),
    "bandwidth": ("CommunicationProfile", "profile_communication_overhead"),
    "cluster": ("ClusterSpec",),
    "collectives": ("all_gather", "all_reduce", "broadcast", "reduce_scatter"),
    "data": ("data_parallel",),
    "hybrid": ("HybridParallelTrainer",),
    "launcher": ("LaunchConfig", "LaunchError", "LaunchResult", "launch_distributed_training"),
    "launching": ("cleanup_distributed", "init", "launch", "setup_distributed", "shutdown"),
    "mesh": ("DistributedInfo", "get_distributed_info", "get_rank", "get_world_size", "make_mesh"),
    "metrics": ("DistributedMetricsCollector",),
    "microbatches": ("MicrobatchPipelineTrainer", "PipelineParallelSketchedModel"),
    "model_stats": ("ModelStats",),
    "models": ("DistributedSketchedModel",),
    "pipelining": ("PipelineSchedule", "make_schedule"),
    "plan": ("ParallelismPlan", "plan_parallelism"),
    "planning": ("TensorParallelReport", "tensor_parallel"),
    "profiling": ("CommunicationCounter", "comm_bytes"),
    "stages": ("split_stages",),
    "sync": ("sync_sketches", "verify_sketches"),
    "tensor": (
        "ColwiseSKParallel",
        "HeadwiseParallel",
        "RowwiseSKParallel",
        "TensorParallelModel",
        "TensorParallelSKLinear",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdvancedDistributedTrainer",
    "ClusterSpec",
    "ColwiseSKParallel",
    "CommunicationCounter",
    "CommunicationProfile",
    "DistributedInfo",
    "DistributedMetricsCollector",
    "DistributedSketchedModel",
    "HeadwiseParallel",
    "HybridParallelTrainer",
    "LaunchConfig",
    "LaunchError",
    "LaunchResult",
    "MicrobatchPipelineTrainer",
    "ModelStats",
    "ParallelismPlan",
    "PipelineParallelSketchedModel",
    "PipelineSchedule",
    "RowwiseSKParallel",
    "TensorParallelModel",
    "TensorParallelReport",
    "TensorParallelSKLinear",
    "all_gather",
    "all_reduce",
    "broadcast",
    "checkpoint",
    "choose_parallelism_strategy",
    "cleanup_distributed",
    "comm_bytes",
    "data_parallel",
    "get_distributed_info",
    "get_rank",
    "get_world_size",
    "init",
    "launch",
    "launch_distributed_training",
    "make_mesh",
    "make_schedule",
    "plan_parallelism",
    "profile_communication_overhead",
    "reduce_scatter",
    "setup_distributed",
    "shutdown",
    "split_stages",
    "sync_sketches",
    "tensor_parallel",
    "unshard_module",
    "verify_sketches",
]


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return import_module(f"{__name__}.checkpoint")
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

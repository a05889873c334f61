"""Sketched models on many processes, on torch's own engines."""

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
from .tensor import ColwiseSKParallel, HeadwiseParallel, RowwiseSKParallel, TensorParallelModel, TensorParallelSKLinear

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

"""List the layouts that a plan compares: meshes that divide the ranks of a cluster, with compatible strategies."""

__all__ = ["possible_layouts"]

from collections.abc import Iterator, Sequence
from itertools import product

from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.statistics.model_stats import ModelStats
from panther.distributed.parallelize.layout import Layout
from panther.distributed.pipeline.balance import SCHEDULES
from panther.errors import ShapeError


def possible_layouts(
    stats: ModelStats, cluster: ClusterSpec, batch: int, schedules: Sequence[str], notes: list[str]
) -> Iterator[Layout]:
    """Yield every layout to consider; a sentence on each kind that is left out is appended to ``notes``.

    The layouts have all sizes of the axes dp, pp and tp that divide the number of ranks, with tp within a node.
    """
    half = stats.mixed_precision is not None
    if not stats.is_sequential:
        notes.append("pipelines were not considered: the model is not an nn.Sequential of modules that return a tensor")
    longest = len(stats.layers) if stats.is_sequential else 1
    if stats.activation_checkpointing != "none" and (split := [s for s in schedules if SCHEDULES[s].splits_backward]):
        notes.append(f"{', '.join(split)} were not considered: they recompute blocks twice, or do not support it")
        schedules = [name for name in schedules if name not in split]
    for tp in _divisors(cluster.gpus):
        # tp exchanges activations in every layer, for which links between nodes are too slow.
        if cluster.link(tp) == "inter" or not _can_shard(stats, tp, notes):
            continue
        for pp in _divisors(cluster.gpus // tp):
            dp = cluster.gpus // (tp * pp)
            # Every rank must get the same number of samples.
            if pp > longest or batch % dp:
                continue
            if pp == 1:
                yield from _without_pipeline(dp, tp, cluster, half=half)
                continue
            # DDP does not support pipelines. HybridParallelTrainer requires a strategy for a pipeline even if dp is 1.
            strategies = ("fsdp", "replicate") if dp > 1 else ("fsdp",)
            fitting = [name for name in schedules if pp * SCHEDULES[name].stages_per_rank <= len(stats.layers)]
            # With more microbatches the bubble is smaller, and there are more messages.
            numbers = [m for m in (pp, 2 * pp, 4 * pp) if batch // dp % m == 0]
            for strategy, schedule, m in product(strategies, fitting, numbers):
                yield Layout(dp=dp, pp=pp, tp=tp, strategy=strategy, schedule=schedule, num_microbatches=m)


def _without_pipeline(dp: int, tp: int, cluster: ClusterSpec, *, half: bool) -> Iterator[Layout]:
    if dp == 1:
        yield Layout(tp=tp, strategy="replicate" if half else None)
        return
    # DDP does not support parameters of tensor parallelism. "replicate" uses FSDP2's engine, which sends the gradients
    # of a unit in one message and, in mixed precision, casts parameters once per step.
    strategies = ("fsdp", "replicate") if tp > 1 else ("ddp", "fsdp", *(("replicate",) if half else ()))
    for strategy in strategies:
        yield Layout(dp=dp, tp=tp, strategy=strategy)
    # HSDP shards within a node, where links are fast, and replicates over nodes.
    inside = cluster.gpus_per_node // tp
    if 1 < inside < dp and dp % inside == 0:
        yield Layout(replicate=dp // inside, dp=inside, tp=tp, strategy="fsdp")


def _can_shard(stats: ModelStats, tp: int, notes: list[str]) -> bool:
    if tp == 1:
        return True
    try:
        sharded = stats.shard(tp)
    except (ShapeError, ValueError, RuntimeError) as error:  # a forward may fail on sharded layers in many ways
        notes.append(f"tp={tp} was not considered: {str(error).partition(chr(10))[0]}")
        return False
    if not any(layer.tp_calls for layer in sharded.layers):
        notes.append(f"tp={tp} was not considered: it shards none of the model's layers")
        return False
    return True


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]

r"""Predict the cost of a layout of a model on a cluster for each rank: memory, bytes sent, and time.

Memory is reported for the most loaded rank, as the peak of all its tensors, excluding the workspace of operators: the
backward pass goes through the layers from the last to the first, freeing activations and making gradients. In
pipelines, and for models that are not a sequence of layers, the prediction is the sum, which is an upper bound. With
activation checkpointing, blocks keep their inputs and selectively saved tensors, and one block at a time has all its
tensors. Before the first step, every rank holds a model with values in full; a model on the meta device is filled shard
by shard, with one module at a time in full.

Time: a product takes its flops over ``peak * efficiency`` plus its bytes over the bandwidth of memory, and other
operations take their bytes over the bandwidth; every operation takes ``operation_seconds`` in addition. A microbatch
takes at least ``host_seconds`` for each operation, because the host of a GPU has to queue it. The optimizer takes its
bytes over the bandwidth. Collectives run on rings: an all-reduce of V bytes over n ranks sends
:math:`2 V (n-1)/n` bytes over a link in :math:`2 (n-1)` rounds; a gather or scatter of V bytes in total sends
:math:`V (n-1)/n` bytes in :math:`n - 1` rounds. A pipeline is idle for the share :math:`(p-1)/(v m + p - 1)` of the
time, for p ranks, m microbatches and v stages per rank with 1F1B and its interleaved form. Ranks wait for traffic over
tp and pp. Over dp, the share ``overlap`` of the shorter one of sending and computing is hidden; in a pipeline nothing
is hidden, because gradients are sent at the end.
"""

__all__ = ["Estimate", "Layout", "MemoryEstimate", "Traffic", "estimate"]

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.cost.duration import (
    Traffic,
    along,
    between_shards,
    data_parallel,
    microbatch_seconds,
    optimizer_seconds,
)
from panther.distributed.advisor.cost.gradient_messages import UNCOMPRESSED, GradientMessages
from panther.distributed.advisor.cost.memory import MemoryEstimate, memory_of, start_of
from panther.distributed.advisor.cost.rank import Rank
from panther.distributed.advisor.cost.schedule import order_of
from panther.distributed.advisor.statistics.layer_stats import TensorStats
from panther.distributed.advisor.statistics.model_stats import ModelStats
from panther.distributed.advisor.statistics.optimizer_states import ADAM, OptimizerStates
from panther.distributed.parallelize.layout import Layout
from panther.distributed.pipeline.balance import balance_stages
from panther.distributed.pipeline.schedule_kinds import SCHEDULES
from panther.errors import ShapeError

_HALF = 2  # bytes of a number in mixed precision


@dataclass(frozen=True)
class Estimate:
    """The predicted cost of a layout."""

    layout: Layout
    stages: tuple[MemoryEstimate, ...]
    """Memory of a rank at each position along pp."""
    traffic: tuple[Traffic, ...]
    seconds: dict[str, float]
    """Parts of the time of a step: compute, bubble, and communication over tp, pp and dp that is not hidden."""
    bubble: float
    """Share of the time in which a pipeline's ranks are idle."""
    start: float
    """Peak bytes of a rank before the first step: all of a model with values, or :attr:`start_on_meta`."""
    start_on_meta: float
    """Peak bytes before the first step for a model on the meta device: the rank's shards and its largest module."""

    @property
    def peak(self) -> float:
        """Peak bytes of a rank, at the start or in a step."""
        return max(self.memory.total, self.start)

    @property
    def memory(self) -> MemoryEstimate:
        """Memory of the most loaded rank."""
        return max(self.stages, key=lambda memory: memory.total)

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step in seconds."""
        return sum(self.seconds.values())

    def sent(self, link: str | None = None) -> float:
        """Return the bytes that a rank sends in a step over ``"intra"`` or ``"inter"`` links; None is all links."""
        return sum(traffic.sent_bytes for traffic in self.traffic if link in (None, traffic.link))


def estimate(
    stats: ModelStats,
    cluster: ClusterSpec,
    layout: Layout,
    batch: int,
    optimizer_states: OptimizerStates = ADAM,
    messages: GradientMessages = UNCOMPRESSED,
) -> Estimate:
    """Predict memory, traffic and time of a layout.

    Args:
        stats: Statistics of the whole model.
        cluster: The devices and links.
        layout: The layout.
        batch: Number of samples of a step, over all ranks.
        optimizer_states: What the optimizer keeps of each parameter.
        messages: How gradients are compressed before they are sent.

    Raises:
        ShapeError: If the layout does not suit the model.
    """
    n = layout.pp * SCHEDULES[layout.schedule].stages_per_rank if layout.schedule else 1
    stages = _balanced_stages(stats.tensors, len(stats.layers), n)
    full = sum(tensor.nbytes for tensor in stats.tensors) if stats.has_values else 0
    stats = stats.shard(layout.tp)
    if layout.strategy == "ddp":
        stats = stats.under_autocast()
    for tensor in stats.tensors:
        if tensor.last_layer > max(next(stage for stage in stages if tensor.layer in stage)):
            raise ShapeError(f"{tensor.name!r} would be trained by more than one of {len(stages)} stages")
    held = {tensor.layer for tensor in stats.tensors if tensor.trained}
    if any(held.isdisjoint(stage) for stage in stages):
        raise ShapeError(f"one of {len(stages)} stages would have no trainable parameters")
    samples = batch / (layout.dp * layout.replicate * layout.num_microbatches)
    order = order_of(layout.schedule, layout.pp, layout.num_microbatches) if layout.schedule else None
    ranks = [Rank(stats, layout, stages, rank, samples, order, optimizer_states, messages) for rank in range(layout.pp)]
    memory = tuple(memory_of(rank) for rank in ranks)
    traffic = [max((along(rank, axis, cluster) for rank in ranks), key=lambda t: t.seconds) for axis in ("tp", "pp")]
    along_dp = max((data_parallel(rank, cluster) for rank in ranks), key=lambda ts: sum(t.seconds for t in ts))
    exchanged = max((between_shards(rank, cluster) for rank in ranks), key=lambda t: t.seconds)
    size = _HALF if stats.mixed_precision else max(tensor.itemsize for tensor in stats.tensors if tensor.trained)
    compute = max(microbatch_seconds(rank, cluster, size) for rank in ranks) * layout.num_microbatches
    tp, pp = (t.seconds for t in traffic)
    bubble = order.bubble if order else 0.0
    # HSDP communicates along two axes, and the times add up.
    dp = sum(t.seconds for t in along_dp)
    hidden = 0.0 if layout.pp > 1 else cluster.overlap * min(dp, compute)
    seconds = {
        "compute": compute,
        "optimizer": max(optimizer_seconds(rank, cluster) for rank in ranks) + exchanged.seconds,
        # The share b of the total time is idle, so that a working time w takes w / (1 - b) in total.
        "bubble": (compute + tp + pp) * bubble / (1 - bubble),
        "tp": tp,
        "pp": pp,
        "dp": dp - hidden,
    }
    nonzero_traffic = tuple(t for t in (*traffic, *along_dp, exchanged) if t.payload)
    on_meta = max(start_of(rank, held) for rank, held in zip(ranks, memory, strict=True))
    return Estimate(layout, memory, nonzero_traffic, seconds, bubble, full or on_meta, on_meta)


@lru_cache(maxsize=256)
def _balanced_stages(tensors: tuple[TensorStats, ...], layers: int, n: int) -> list[range]:
    """Return the layers of each stage, by the same rule as :func:`split_stages`."""
    costs = [0.0] * layers
    for tensor in tensors:
        if tensor.role == "parameter":
            costs[tensor.layer] += tensor.global_numel
    return [range(begin, end) for begin, end in pairwise([*balance_stages(costs, n), layers])]

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

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from panther.distributed.advisor.cluster import ClusterSpec, optimizer_bytes
from panther.distributed.advisor.cost.rank import (
    MemoryEstimate,
    Rank,
    memory_of,
    order_of,
    start_of,
)
from panther.distributed.advisor.statistics.layer_stats import ADAM, LayerStats, OptimizerStates, TensorStats
from panther.distributed.advisor.statistics.model_stats import ModelStats
from panther.distributed.parallelize.layout import Layout
from panther.distributed.pipeline.balance import SCHEDULES, balance_stages
from panther.errors import ShapeError

_BUCKET = 25 * 2**20  # bytes of a gradient bucket, torch's default for DDP


@dataclass(frozen=True)
class Traffic:
    """Traffic of one rank along an axis in one step."""

    axis: str
    link: str
    """``"intra"`` (within a node) or ``"inter"`` (between nodes)."""
    payload: float
    """Bytes of the tensors that are communicated, as :class:`CommunicationCounter` counts them."""
    sent_bytes: float
    """Bytes that the rank sends over its link, with ring algorithms."""
    seconds: float


def along(rank: Rank, axis: str, cluster: ClusterSpec) -> Traffic:
    """Return the traffic along tp or pp."""
    layout, m = rank.layout, rank.layout.num_microbatches
    if axis == "tp":
        return _tensor_parallel(rank, cluster)
    # A stage sends its output forward and the gradient of its input back. With V schedules, neighbouring stages can be
    # on the same rank, which sends nothing between them.
    last, own_stages = len(rank.stages) - 1, set(rank.own_stages)
    messages = [rank.output_of(s) for s in rank.own_stages if s < last and s + 1 not in own_stages]
    messages += [rank.input_of(s) for s in rank.own_stages if s > 0 and s - 1 not in own_stages]
    sent_bytes = m * sum(messages)
    return _traffic(axis, cluster, layout.pp * layout.tp, sent_bytes, sent_bytes, m * len(messages), "broadcast")


def _tensor_parallel(rank: Rank, cluster: ClusterSpec) -> Traffic:
    """Return the traffic along tp. Its messages are small, so that the number of calls and the latency matter."""
    m, n = rank.layout.num_microbatches, rank.layout.tp
    gathered = m * sum(layer.tp_gathered.at(rank.samples) for layer in rank.layers)
    gathers = m * sum(layer.tp_gathers for layer in rank.layers)
    reduced = m * sum(layer.tp_bytes.at(rank.samples) for layer in rank.layers) - gathered
    calls = m * sum(layer.tp_calls for layer in rank.layers) - gathers
    gather = _traffic("tp", cluster, n, gathered, (n - 1) * gathered, (n - 1) * gathers, "tp all_gather")
    return _both(_all_reduce("tp", cluster, n, n, reduced, calls, "tp all_reduce"), gather)


def data_parallel(rank: Rank, cluster: ClusterSpec) -> tuple[Traffic, ...]:
    """Return the traffic along dp and replicate, with the time of filling and emptying buffers."""
    layout, n, units = rank.layout, rank.layout.dp, rank.units
    span = n * layout.pp * layout.tp
    if n == 1:
        return (_traffic("dp", cluster, 1, 0.0, 0.0, 0),)
    if layout.strategy == "fsdp":
        # A block is gathered for its forward and again for its backward pass; the root unit and stages stay gathered.
        gathers = {name: 2 if name and layout.pp == 1 else 1 for name in units}
        gathered = sum(gathers[name] * full for name, (full, _) in units.items())
        reduced = sum(summed for _, summed in units.values())
        share, calls = (n - 1) / n, sum(gathers.values())
        gather = _traffic(
            "dp", cluster, span, gathered / n, share * gathered, (n - 1) * calls, "all_gather", 2 * gathered
        )
        scatter = _traffic(
            "dp", cluster, span, reduced, share * reduced, (n - 1) * len(units), "reduce_scatter", 2 * reduced
        )
        dp = _both(gather, scatter)
        if layout.replicate == 1:
            return (dp,)
        return dp, _all_reduce("replicate", cluster, layout.replicate, layout.world, reduced / n, len(units))
    trained = float(sum(t.nbytes for t in rank.tensors if t.trained))
    if layout.strategy == "replicate":  # FSDP2's engine sends a unit at a time
        return (_all_reduce("dp", cluster, n, span, trained, len(units)),)
    # A bucket is filled, divided by the ranks and read back.
    calls = -(-int(trained) // _BUCKET)
    dp = _all_reduce("dp", cluster, n, span, trained, calls, copied=4 * trained)
    # DDP also broadcasts buffers in every forward, except for sketches.
    buffers = sum(t.nbytes for t in rank.tensors if t.role == "buffer" and not t.name.endswith("sketch_seed"))
    return (replace(dp, payload=dp.payload + buffers),)


def _both(first: Traffic, second: Traffic) -> Traffic:
    return replace(
        first,
        payload=first.payload + second.payload,
        sent_bytes=first.sent_bytes + second.sent_bytes,
        seconds=first.seconds + second.seconds,
    )


def _all_reduce(
    axis: str,
    cluster: ClusterSpec,
    n: int,
    span: int,
    payload: float,
    calls: int,
    operation: str = "all_reduce",
    copied: float = 0.0,
) -> Traffic:
    sent_bytes, rounds = 2 * (n - 1) / n * payload, 2 * (n - 1) * calls
    return _traffic(axis, cluster, span, payload, sent_bytes, rounds, operation, copied)


def _traffic(
    axis: str,
    cluster: ClusterSpec,
    span: int,
    payload: float,
    sent_bytes: float,
    rounds: float,
    operation: str = "all_reduce",
    copied: float = 0.0,
) -> Traffic:
    """Return the traffic of calls of a collective; ``copied`` bytes are read and written to fill and empty buffers."""
    seconds = sent_bytes / cluster.bandwidth(span, operation) + rounds * cluster.latency(span, operation)
    seconds += copied / cluster.memory_bandwidth
    return Traffic(axis, cluster.link(span), payload, sent_bytes, seconds if payload else 0.0)


def microbatch_seconds(rank: Rank, cluster: ClusterSpec, itemsize: int) -> float:
    """Return the time of computing a microbatch, forward and backward, in numbers of ``itemsize`` bytes.

    A GPU waits if its host takes longer to queue the operations than the GPU takes to run them.
    """
    speed = cluster.operation_bandwidth or cluster.memory_bandwidth
    total, seconds_by_products = 0.0, dict[int, float]()
    for layer in rank.layers:
        # Equal layers share the tuple of products, so that its time is computed once.
        if id(layer.products) not in seconds_by_products:
            seconds_by_products[id(layer.products)] = _products_seconds(layer, cluster, itemsize, rank.samples)
        total += seconds_by_products[id(layer.products)]
        total += layer.moved.at(rank.samples) / speed + layer.calls * cluster.operation_seconds
    return max(total, sum(layer.calls for layer in rank.layers) * cluster.host_seconds)


def _products_seconds(layer: LayerStats, cluster: ClusterSpec, itemsize: int, samples: float) -> float:
    flops, total = cluster.flops(itemsize), 0.0
    for product in layer.products:
        computing = product.flops.at(samples) / flops * cluster.slowdown(product.narrowest)
        total += product.times * (computing + product.moved.at(samples) / cluster.memory_bandwidth)
    return total


def optimizer_seconds(rank: Rank, cluster: ClusterSpec) -> float:
    """Return the time of the optimizer's step, which moves memory."""
    trained = [tensor for tensor in rank.tensors if tensor.trained]
    # One operation for each tensor and four for each state, which take a third of the usual time without autograd.
    states = sum(rank.optimizer_states.count(tensor.name) for tensor in trained)
    calls = (len(trained) + 4 * states) / 3 * cluster.operation_seconds
    moved = optimizer_bytes(rank.bytes_of(trained), rank.state_bytes)
    return moved / (cluster.optimizer_bandwidth or cluster.memory_bandwidth) + calls


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
) -> Estimate:
    """Predict memory, traffic and time of a layout, for a ``batch`` of samples over all ranks.

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
    trained_layers = {tensor.layer for tensor in stats.tensors if tensor.trained}
    if any(trained_layers.isdisjoint(stage) for stage in stages):
        raise ShapeError(f"one of {len(stages)} stages would have no trainable parameters")
    samples = batch / (layout.dp * layout.replicate * layout.num_microbatches)
    order = order_of(layout.schedule, layout.pp, layout.num_microbatches) if layout.schedule else None
    ranks = [Rank(stats, layout, stages, rank, samples, order, optimizer_states) for rank in range(layout.pp)]
    memory = tuple(memory_of(rank) for rank in ranks)
    traffic = [max((along(rank, axis, cluster) for rank in ranks), key=lambda t: t.seconds) for axis in ("tp", "pp")]
    along_dp = max((data_parallel(rank, cluster) for rank in ranks), key=lambda ts: sum(t.seconds for t in ts))
    size = _HALF if stats.mixed_precision else max(tensor.itemsize for tensor in stats.tensors if tensor.trained)
    compute = max(microbatch_seconds(rank, cluster, size) for rank in ranks) * layout.num_microbatches
    tp, pp = (t.seconds for t in traffic)
    bubble = order.bubble if order else 0.0
    # HSDP communicates along two axes, and the times add up.
    dp = sum(t.seconds for t in along_dp)
    hidden = 0.0 if layout.pp > 1 else cluster.overlap * min(dp, compute)
    seconds = {
        "compute": compute,
        "optimizer": max(optimizer_seconds(rank, cluster) for rank in ranks),
        # The share b of the total time is idle, so that a working time w takes w / (1 - b) in total.
        "bubble": (compute + tp + pp) * bubble / (1 - bubble),
        "tp": tp,
        "pp": pp,
        "dp": dp - hidden,
    }
    nonzero_traffic = tuple(t for t in (*traffic, *along_dp) if t.payload)
    on_meta = max(map(start_of, ranks, memory))
    return Estimate(layout, memory, nonzero_traffic, seconds, bubble, full or on_meta, on_meta)


@lru_cache(maxsize=256)
def _balanced_stages(tensors: tuple[TensorStats, ...], layers: int, n: int) -> list[range]:
    """Return the layers of each stage, by the same rule as :func:`split_stages`."""
    costs = [0.0] * layers
    for tensor in tensors:
        if tensor.role == "parameter":
            costs[tensor.layer] += tensor.global_numel
    return [range(begin, end) for begin, end in pairwise([*balance_stages(costs, n), layers])]

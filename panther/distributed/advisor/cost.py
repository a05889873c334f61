r"""Predict the cost of a layout of a model on a cluster for each rank: memory, bytes sent, and time.

Memory is reported for the most loaded rank, as an upper bound of the peak of all its tensors. The backward pass goes
through the layers from the last to the first, freeing activations and making gradients; the other parts are added at
their peaks. In pipelines, and for models that are not a sequence of layers, all parts are added. Before the first step,
every rank holds a model with values in full; a model on the meta device is filled shard by shard, with one module at a
time in full.

Time: operations take their flops over ``peak * efficiency`` plus the bytes that they read and write over the bandwidth
of memory, plus ``operation_seconds`` each. A microbatch takes at least ``host_seconds`` for each operation, because the
host of a GPU has to queue it. The optimizer takes its bytes over the bandwidth. Collectives run on rings: an all-reduce
of V bytes over n ranks sends :math:`2 V (n-1)/n` bytes over a link in :math:`2 (n-1)` rounds; a gather or scatter of V
bytes in total sends :math:`V (n-1)/n` bytes in :math:`n - 1` rounds. A pipeline is idle for the share
:math:`(p-1)/(v m + p - 1)` of the time, for p ranks, m microbatches and v stages per rank. Ranks wait for traffic over
tp and pp. Over dp, the share ``overlap`` of the shorter one of sending and computing is hidden; in a pipeline nothing
is hidden, because gradients are sent at the end.
"""

__all__ = ["Estimate", "Layout", "MemoryEstimate", "Traffic", "estimate"]

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

from panther.distributed.advisor.cluster import ClusterSpec, optimizer_bytes
from panther.distributed.advisor.layer_stats import TensorStats
from panther.distributed.advisor.model_stats import ModelStats
from panther.distributed.parallelize.layout import Layout
from panther.distributed.pipeline.balance import SCHEDULES, balance_stages
from panther.errors import ShapeError

_BUCKET = 25 * 2**20  # bytes of a gradient bucket, torch's default for DDP
_HALF = 2  # bytes of a number in mixed precision


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank, in bytes."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    sketches: float = 0
    """Sketches of seeded layers; the sketches of fitted layers are parameters."""
    buffers: float = 0
    activations: float = 0
    """Tensors that are kept for the backward pass, and tensors that activation checkpointing recomputes in it."""
    communication: float = 0
    """Buffers: DDP's buckets, FSDP's gathered and reduced units, and inputs and outputs of pipeline stages."""
    workspace: float = 0
    """Results of operators that autograd does not keep: twice the size of the largest one."""
    overlap: float = 0
    """Peaks of activations and gradients minus their joint peak: backward frees activations and makes gradients."""

    @property
    def total(self) -> float:
        """Joint peak of all parts: their sum minus ``overlap``."""
        return sum(self.parts().values()) - self.overlap

    def parts(self) -> dict[str, float]:
        """Return each part by its name."""
        # Not asdict, which copies, because plans call this thousands of times.
        return {name: value for name, value in vars(self).items() if name != "overlap"}


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
    stats: ModelStats, cluster: ClusterSpec, layout: Layout, batch: int, optimizer_states: float = 2
) -> Estimate:
    """Predict memory, traffic and time of a layout, for a ``batch`` of samples over all ranks.

    Raises:
        ShapeError: If the layout does not suit the model.
    """
    stages = _balanced_stages(stats.tensors, len(stats.layers), layout.pp * _stages_per_rank(layout))
    full = sum(tensor.nbytes for tensor in stats.tensors) if stats.has_values else 0
    stats = stats.shard(layout.tp)
    if layout.strategy == "ddp":
        stats = stats.under_autocast()
    _check_stages(stats, stages)
    samples = batch / (layout.dp * layout.replicate * layout.num_microbatches)
    ranks = [_Rank(stats, layout, stages, rank, samples, optimizer_states) for rank in range(layout.pp)]
    memory = tuple(_memory_of(rank) for rank in ranks)
    tp = max((_tensor_parallel(rank, cluster) for rank in ranks), key=lambda traffic: traffic.seconds)
    pp = max((_between_stages(rank, cluster) for rank in ranks), key=lambda traffic: traffic.seconds)
    # HSDP communicates along two axes, and the times add up.
    dp = max((_data_parallel(rank, cluster) for rank in ranks), key=lambda both: sum(t.seconds for t in both))
    dp_seconds = sum(traffic.seconds for traffic in dp)
    size = _HALF if stats.mixed_precision else max(tensor.itemsize for tensor in stats.tensors if tensor.trained)
    compute = max(_microbatch_seconds(rank, cluster, size) for rank in ranks) * layout.num_microbatches
    bubble = (layout.pp - 1) / (_stages_per_rank(layout) * layout.num_microbatches + layout.pp - 1)
    hidden = 0.0 if layout.pp > 1 else cluster.overlap * min(dp_seconds, compute)
    seconds = {
        "compute": compute,
        "optimizer": max(_optimizer_seconds(rank, cluster) for rank in ranks),
        # The share b of the total time is idle, so that a working time w takes w / (1 - b) in total.
        "bubble": (compute + tp.seconds + pp.seconds) * bubble / (1 - bubble),
        "tp": tp.seconds,
        "pp": pp.seconds,
        "dp": dp_seconds - hidden,
    }
    traffic = tuple(t for t in (tp, pp, *dp) if t.payload)
    on_meta = max(map(_start_of, ranks, memory))
    return Estimate(layout, memory, traffic, seconds, bubble, full or on_meta, on_meta)


def _stages_per_rank(layout: Layout) -> int:
    return SCHEDULES[layout.schedule].stages_per_rank if layout.schedule else 1


@lru_cache(maxsize=256)
def _balanced_stages(tensors: tuple[TensorStats, ...], layers: int, n: int) -> list[range]:
    """Return the layers of each stage, by the same rule as :func:`split_stages`."""
    costs = [0.0] * layers
    for tensor in tensors:
        if tensor.role == "parameter":
            costs[tensor.layer] += tensor.global_numel
    return [range(begin, end) for begin, end in pairwise([*balance_stages(costs, n), layers])]


def _check_stages(stats: ModelStats, stages: list[range]) -> None:
    for tensor in stats.tensors:
        if tensor.last_layer > max(next(stage for stage in stages if tensor.layer in stage)):
            raise ShapeError(f"{tensor.name!r} would be trained by more than one of {len(stages)} stages")
    trained_layers = {tensor.layer for tensor in stats.tensors if tensor.trained}
    if any(trained_layers.isdisjoint(stage) for stage in stages):
        raise ShapeError(f"one of {len(stages)} stages would have no trainable parameters")


# Cached, because estimating layouts needs the same few shapes some millions of times.
@lru_cache(maxsize=4096)
def _shard_numel(shape: tuple[int, ...], on_mesh: bool, ranks: int) -> int:
    """Return the entries of a padded shard of ``data_parallel(strategy="fsdp")``."""
    if not shape or ranks == 1:
        return prod(shape)
    # data_parallel shards a matrix along the second dimension if the number of ranks divides only this one.
    if not on_mesh and len(shape) == 2 and shape[0] % ranks and shape[1] % ranks == 0:
        return shape[0] * shape[1] // ranks
    # FSDP2 pads the first dimension to a multiple of the ranks.
    return -(-shape[0] // ranks) * prod(shape[1:])


@dataclass(eq=False)
class _Rank:
    """A rank of the pp axis; without a pipeline, it stands for all ranks."""

    stats: ModelStats
    layout: Layout
    stages: list[range]
    """The layers of each stage."""
    rank: int
    samples: float
    """Number of samples of a microbatch."""
    optimizer_states: float

    def __post_init__(self) -> None:
        self.own_stages = range(self.rank, len(self.stages), self.layout.pp)
        layers = {layer for stage in self.own_stages for layer in self.stages[stage]}
        self.tensors = [tensor for tensor in self.stats.tensors if tensor.layer in layers]
        self.layers = [self.stats.layers[i] for i in sorted(layers)]
        self.shards = self.layout.dp if self.layout.strategy == "fsdp" else 1

    def bytes_of(self, tensors: Iterable[TensorStats]) -> float:
        """Return the bytes of tensors on this rank, which holds shards of them under ``"fsdp"``."""
        return sum(_shard_numel(t.shape, t.on_mesh, self.shards) * t.itemsize for t in tensors)

    @cached_property
    def trained_bytes(self) -> float:
        """Bytes of the parameters that are trained, and of their gradients."""
        return self.bytes_of(tensor for tensor in self.tensors if tensor.trained)

    def activations(self) -> float:
        """Return the most bytes that are kept for backward passes, for all microbatches in flight."""
        stage_bytes = list(map(self._kept, self.own_stages))
        # For two stages per rank it is an upper bound: all microbatches in flight are in the larger one.
        in_flight_bytes = min(self._in_flight() * max(stage_bytes), self.layout.num_microbatches * sum(stage_bytes))
        return in_flight_bytes + max(map(self._recomputed, self.own_stages))

    def _kept(self, stage: int) -> float:
        """Return the bytes that are kept for a microbatch in a stage; the input counts as a pipeline buffer."""
        kept_bytes = sum(self.stats.layers[i].activations.at(self.samples) for i in self.stages[stage])
        # In mixed precision, FSDP2 saves a cast copy of the stage's input.
        return kept_bytes if self.stats.mixed_precision else max(0.0, kept_bytes - self.input_of(stage))

    def _recomputed(self, stage: int) -> float:
        """Return the bytes that the backward pass of a stage recomputes, minus the bytes that later layers freed."""
        most = freed = 0.0
        for i in reversed(self.stages[stage]):
            layer = self.stats.layers[i]
            most = max(most, layer.recomputed.at(self.samples) - freed)
            freed += layer.activations.at(self.samples)
        return most

    def _in_flight(self) -> int:
        """Return how many microbatches have passed a stage of this rank forward and not backward, at most."""
        layout, stages = self.layout, len(self.own_stages)
        if layout.schedule == "1f1b":
            return min(layout.pp - self.rank, layout.num_microbatches)
        if layout.schedule == "interleaved":  # by the number of forward passes with which torch begins
            started = (stages - 1) * layout.pp + 2 * (layout.pp - 1 - self.rank) + 1
            return min(started, stages * layout.num_microbatches)
        return stages * layout.num_microbatches

    def input_of(self, stage: int) -> float:
        """Return the bytes that a stage receives for a microbatch."""
        return self.output_of(stage - 1) if stage else 0.0

    def output_of(self, stage: int) -> float:
        """Return the bytes of a stage's output for a microbatch."""
        output = self.stats.layers[self.stages[stage][-1]].output.at(self.samples)
        # FSDP2 casts the outputs of a stage to float32.
        return 4 / _HALF * output if self.stats.mixed_precision and self.layout.pp > 1 else output

    @cached_property
    def units(self) -> dict[str, tuple[float, float]]:
        """Bytes of the parameters of each unit that FSDP gathers, and bytes of their gradients, by the unit's name.

        Units are blocks, or stages of a pipeline. Parameters outside of all blocks form the unit ``""``.
        """
        sizes: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        stage_of = {i: s for s, stage in enumerate(self.stages) for i in stage}
        for tensor in self.tensors:
            if tensor.role == "parameter":
                name = tensor.block if self.layout.pp == 1 else f"stage {stage_of[tensor.layer]}"
                numel = _shard_numel(tensor.shape, tensor.on_mesh, self.shards) * self.shards
                sizes[name][0] += numel * (_HALF if self.stats.mixed_precision else tensor.itemsize)
                sizes[name][1] += numel * tensor.itemsize if tensor.trained else 0
        return {name: (gathered, reduced) for name, (gathered, reduced) in sizes.items()}


def _memory_of(rank: _Rank) -> MemoryEstimate:
    # Gradients have the dtype and the sharding of the parameters, even in mixed precision.
    gradients, activations = rank.trained_bytes, rank.activations()
    return MemoryEstimate(
        parameters=rank.bytes_of(tensor for tensor in rank.tensors if tensor.role == "parameter"),
        gradients=gradients,
        optimizer=rank.optimizer_states * gradients,
        sketches=sum(tensor.nbytes for tensor in rank.tensors if tensor.role == "sketch"),
        buffers=sum(tensor.nbytes for tensor in rank.tensors if tensor.role == "buffer"),
        activations=activations,
        communication=(gradients if rank.layout.strategy == "ddp" else _gathered(rank)) + _pipeline_buffers(rank),
        workspace=2 * max(layer.largest.at(rank.samples) for layer in rank.layers),
        overlap=0.0 if rank.layout.pp > 1 else activations + gradients - _joint_peak(rank),
    )


def _joint_peak(rank: _Rank) -> float:
    """Return the peak bytes of activations and gradients together.

    During the backward pass of a layer, a rank holds the activations up to this layer and the gradients from this layer
    on. For a model that is a single layer, the order within it is unknown, and the peaks are added.
    """
    gradient_bytes = [0.0] * len(rank.layers)
    for tensor in rank.tensors:
        if tensor.trained:
            gradient_bytes[tensor.layer] += rank.bytes_of([tensor])
    earlier, later, peak = 0.0, rank.trained_bytes, 0.0
    for layer, gradients in zip(rank.layers, gradient_bytes, strict=True):
        earlier += layer.activations.at(rank.samples)
        peak = max(peak, earlier + layer.recomputed.at(rank.samples) + later)
        later -= gradients
    return peak


def _start_of(rank: _Rank, memory: MemoryEstimate) -> float:
    """Return the peak bytes of :func:`materialize_` for a model on the meta device, given the memory of a step.

    The rank holds its shards and one more module: in full if its values are drawn, and as shards with a sketch if they
    are read.
    """
    module_bytes: defaultdict[str, float] = defaultdict(float)
    for tensor in rank.tensors:
        if tensor.role != "sketch":
            module_bytes[tensor.name.rpartition(".")[0]] += tensor.global_numel * tensor.itemsize
    largest_sketch = max((tensor.nbytes for tensor in rank.tensors if tensor.role == "sketch"), default=0)
    largest = max(module_bytes.values())
    one_module = max(largest, largest / (rank.shards * rank.layout.tp) + largest_sketch)
    return memory.parameters + memory.sketches + memory.buffers + one_module


def _pipeline_buffers(rank: _Rank) -> float:
    """Return the bytes of inputs, outputs and gradients of outputs that stages hold for every microbatch."""
    if rank.layout.pp == 1:
        return 0.0
    sizes = (rank.input_of(stage) + 2 * rank.output_of(stage) for stage in rank.own_stages)
    return rank.layout.num_microbatches * sum(sizes)


def _gathered(rank: _Rank) -> float:
    """Return the bytes of FSDP's buffers: gathered parameters, their gradients, and a copy of the gradients."""
    if rank.layout.strategy not in ("fsdp", "replicate"):
        return 0.0
    sizes = dict(rank.units)
    if rank.layout.pp > 1:  # a stage stays gathered, with its gradients, for all microbatches
        return sum(g + u for g, u in sizes.values()) + max(u for _, u in sizes.values())
    # In addition to the root unit, two blocks are gathered at a time, because FSDP prefetches the next block.
    root, root_summed = sizes.pop("", (0.0, 0.0))
    block = max((2 * (g + u) for g, u in sizes.values()), default=0.0)
    return root + max(block, 2 * root_summed)


def _between_stages(rank: _Rank, cluster: ClusterSpec) -> Traffic:
    """Return the traffic along pp: a stage sends its output forward and the gradient of its input back."""
    layout, last = rank.layout, len(rank.stages) - 1
    messages = [rank.output_of(stage) for stage in rank.own_stages if stage < last]
    messages += [rank.input_of(stage) for stage in rank.own_stages if stage]
    sent_bytes, calls = layout.num_microbatches * sum(messages), layout.num_microbatches * len(messages)
    return _traffic("pp", cluster, layout.pp * layout.tp, sent_bytes, sent_bytes, calls, "broadcast")


def _tensor_parallel(rank: _Rank, cluster: ClusterSpec) -> Traffic:
    m, n = rank.layout.num_microbatches, rank.layout.tp
    gathered = m * sum(layer.tp_gathered.at(rank.samples) for layer in rank.layers)
    gathers = m * sum(layer.tp_gathers for layer in rank.layers)
    reduced = m * sum(layer.tp_bytes.at(rank.samples) for layer in rank.layers) - gathered
    calls = m * sum(layer.tp_calls for layer in rank.layers) - gathers
    gather = _traffic("tp", cluster, n, gathered, (n - 1) * gathered, (n - 1) * gathers, "all_gather")
    return _both(_all_reduce("tp", cluster, n, n, reduced, calls), gather)


def _data_parallel(rank: _Rank, cluster: ClusterSpec) -> tuple[Traffic, ...]:
    """Return the traffic along dp and replicate."""
    layout, n, units = rank.layout, rank.layout.dp, rank.units
    span = n * layout.pp * layout.tp
    if n == 1:
        return ()
    if layout.strategy == "fsdp":
        # A block is gathered for its forward and again for its backward pass; the root unit and stages stay gathered.
        gathers = {name: 2 if name and layout.pp == 1 else 1 for name in units}
        gathered = sum(gathers[name] * full for name, (full, _) in units.items())
        reduced = sum(summed for _, summed in units.values())
        share, calls = (n - 1) / n, sum(gathers.values())
        gather = _traffic("dp", cluster, span, gathered / n, share * gathered, (n - 1) * calls, "all_gather")
        scatter = _traffic("dp", cluster, span, reduced, share * reduced, (n - 1) * len(units), "reduce_scatter")
        dp = _both(gather, scatter)
        if layout.replicate == 1:
            return (dp,)
        return dp, _all_reduce("replicate", cluster, layout.replicate, layout.world, reduced / n, len(units))
    if layout.strategy == "replicate":  # FSDP2's engine sends a unit at a time
        return (_all_reduce("dp", cluster, n, span, rank.trained_bytes, len(units)),)
    dp = _all_reduce("dp", cluster, n, span, rank.trained_bytes, -(-int(rank.trained_bytes) // _BUCKET))
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


def _all_reduce(axis: str, cluster: ClusterSpec, n: int, span: int, payload: float, calls: int) -> Traffic:
    sent_bytes, rounds = 2 * (n - 1) / n * payload, 2 * (n - 1) * calls
    return _traffic(axis, cluster, span, payload, sent_bytes, rounds, "all_reduce")


def _traffic(
    axis: str, cluster: ClusterSpec, span: int, payload: float, sent_bytes: float, rounds: float, operation: str
) -> Traffic:
    latency, bandwidth = cluster.speed(span, operation)
    seconds = sent_bytes / bandwidth + rounds * latency
    return Traffic(axis, cluster.link(span), payload, sent_bytes, seconds if payload else 0.0)


def _microbatch_seconds(rank: _Rank, cluster: ClusterSpec, itemsize: int) -> float:
    """Return the time of computing a microbatch, forward and backward, in numbers of ``itemsize`` bytes."""
    flops = sum(layer.flops.at(rank.samples) for layer in rank.layers)
    moved = sum(layer.moved.at(rank.samples) for layer in rank.layers)
    calls = sum(layer.calls for layer in rank.layers)
    working = flops / cluster.flops(itemsize) + moved / cluster.memory_bandwidth + calls * cluster.operation_seconds
    # A GPU waits if its host takes longer to queue the operations than the GPU takes to run them.
    return max(working, calls * cluster.host_seconds)


def _optimizer_seconds(rank: _Rank, cluster: ClusterSpec) -> float:
    """Return the time of the optimizer's step, which moves memory."""
    # One operation for each tensor and four for each state, which take a third of the usual time without autograd.
    num_trained = sum(tensor.trained for tensor in rank.tensors)
    calls = num_trained * (1 + 4 * rank.optimizer_states) / 3 * cluster.operation_seconds
    moved = optimizer_bytes(rank.trained_bytes, rank.optimizer_states * rank.trained_bytes)
    return moved / (cluster.optimizer_bandwidth or cluster.memory_bandwidth) + calls

r"""What a layout of a model on a cluster costs each rank: memory, bytes sent, and time, by stated assumptions.

Memory is reported for the most loaded rank, as the peak of all its tensors, excluding the workspace of operators: the
backward pass goes through the layers from the last to the first, freeing activations and making gradients. In
pipelines, and for models that are not a sequence of layers, it is the sum, an upper bound. Before the first step, a
model with values is on every rank in full; one on the meta device is filled shard by shard, a module in full at a time.

Time: a product takes its flops over ``peak * efficiency`` and its bytes over the bandwidth of memory, other operations
their bytes, and all ``operation_seconds``. The optimizer moves memory. Collectives
run on rings: an all-reduce of V bytes over n ranks sends :math:`2 V (n-1)/n` bytes over a link in :math:`2 (n-1)`
rounds; a gather or scatter of V bytes in total sends :math:`V (n-1)/n` in :math:`n - 1`. A pipeline is idle for the
share of its schedule, :math:`(p-1)/(v m + p - 1)` for p ranks, m microbatches and v stages per rank with 1F1B and its
interleaved form. Traffic over tp and pp is waited for. Over dp, the share ``overlap`` of the shorter of sending and
computing is hidden; under a pipeline none is, because gradients are sent at the end.
"""

__all__ = ["Estimate", "Layout", "MemoryEstimate", "Traffic", "estimate"]

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import cast

from panther.distributed.advisor._schedule_order import Order, order_of
from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.layer_stats import TensorStats
from panther.distributed.advisor.model_stats import ModelStats
from panther.distributed.pipeline._balance import balance_stages, stages_of_rank
from panther.distributed.pipeline._kinds import SCHEDULES
from panther.errors import ShapeError

_BUCKET = 25 * 2**20  # bytes of a gradient bucket, torch's default for DDP
_HALF = 2  # bytes of a number in mixed precision
_STEP = 4  # bytes of Adam's step count, one per parameter


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An arrangement of ranks: the axes of :func:`make_mesh`, and the strategy along each."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    replicate: int = 1
    """Number of replicas of what ``"fsdp"`` shards along dp (HSDP)."""
    strategy: str | None = None
    """Strategy of :func:`data_parallel`; None without data parallelism."""
    schedule: str | None = None
    """Schedule of :func:`make_schedule`; None without a pipeline."""
    num_microbatches: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.dp * self.pp * self.tp

    def __str__(self) -> str:
        """Return the axes that are longer than one."""
        sharding = "" if self.strategy is None else f" {self.strategy}"
        parts = [f"replicate={self.replicate}"] if self.replicate > 1 else []
        parts += [f"dp={self.dp}{sharding}"] if self.dp > 1 else []
        parts += [f"pp={self.pp} {self.schedule} m={self.num_microbatches}"] if self.pp > 1 else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        return ", ".join(parts) or "one rank"


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one rank, in bytes."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    sketches: float = 0
    """Sketches of seeded layers; those of fitted layers are parameters."""
    buffers: float = 0
    activations: float = 0
    """Tensors that autograd saves for the backward pass."""
    communication: float = 0
    """Buffers: DDP's buckets, what FSDP gathers and scatters, inputs and outputs of pipeline stages."""
    workspace: float = 0
    """What operators return and autograd does not keep: two tensors of the size of the largest output."""
    apart: float = 0
    """Bytes of the parts above that are not there at the same time: backward frees activations and makes gradients."""

    @property
    def total(self) -> float:
        """Peak: the sum of all parts without what is apart."""
        return sum(self.parts().values()) - self.apart

    def parts(self) -> dict[str, float]:
        """Return each part by its name."""
        # Not asdict, which copies: plans ask for this thousands of times.
        return {name: value for name, value in vars(self).items() if name != "apart"}


@dataclass(frozen=True)
class Traffic:
    """Traffic of one rank along an axis in one step."""

    axis: str
    link: str
    """``"intra"`` (within a node) or ``"inter"`` (between nodes)."""
    payload: float
    """Bytes of the tensors that are communicated, as :class:`CommunicationCounter` counts them."""
    sent: float
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
    """Most bytes that a rank holds before the first step: all of a model with values, or :attr:`start_on_meta`."""
    start_on_meta: float
    """The same for a model on the meta device: the rank's shards, and the largest of its modules in full."""

    @property
    def peak(self) -> float:
        """Most bytes that a rank holds, at the start or in a step."""
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
        """Return the bytes that a rank sends in a step, over one kind of link or over all."""
        return sum(traffic.sent for traffic in self.traffic if link in (None, traffic.link))


def estimate(
    stats: ModelStats, cluster: ClusterSpec, layout: Layout, batch: int, optimizer_states: int = 2
) -> Estimate:
    """Predict memory, traffic and time of a layout.

    Args:
        stats: Statistics of the whole model.
        cluster: The devices and links.
        layout: The layout.
        batch: Number of samples of a step, over all ranks.
        optimizer_states: Number of copies of the trainable parameters in the optimizer: 2 for Adam, 0 for SGD.

    Raises:
        ShapeError: If the layout does not suit the model.
    """
    n = layout.pp * SCHEDULES[layout.schedule].stages_per_rank if layout.schedule else 1
    stages = _balanced_stages(stats.tensors, len(stats.layers), n)
    full = sum(tensor.nbytes for tensor in stats.tensors) if stats.has_values else 0
    stats = stats.shard(layout.tp)
    held = {tensor.layer for tensor in stats.tensors if tensor.trained}
    if any(held.isdisjoint(stage) for stage in stages):
        raise ShapeError(f"one of {len(stages)} stages would have no trainable parameters")
    samples = batch / (layout.dp * layout.replicate * layout.num_microbatches)
    order = order_of(layout.schedule, layout.pp, layout.num_microbatches) if layout.schedule else None
    ranks = [_Rank(stats, layout, stages, rank, samples, order, optimizer_states) for rank in range(layout.pp)]
    memory = tuple(rank.memory() for rank in ranks)
    traffic = [max((rank.along(axis, cluster) for rank in ranks), key=lambda t: t.seconds) for axis in ("tp", "pp")]
    along_dp = max((rank.data_parallel(cluster) for rank in ranks), key=lambda ts: sum(t.seconds for t in ts))
    size = _HALF if stats.mixed_precision else max(tensor.itemsize for tensor in stats.tensors if tensor.trained)
    compute = max(rank.seconds(cluster, size) for rank in ranks) * layout.num_microbatches
    tp, pp = (t.seconds for t in traffic)
    bubble = order.bubble if order else 0.0
    # HSDP communicates along two axes, one after the other.
    dp = sum(t.seconds for t in along_dp)
    hidden = 0.0 if layout.pp > 1 else cluster.overlap * min(dp, compute)
    seconds = {
        "compute": compute,
        "optimizer": max(rank.optimizer_seconds(cluster) for rank in ranks),
        # The share b of the whole time is idle, so the working time w extends to w / (1 - b).
        "bubble": (compute + tp + pp) * bubble / (1 - bubble),
        "tp": tp,
        "pp": pp,
        "dp": dp - hidden,
    }
    used = tuple(t for t in (*traffic, *along_dp) if t.payload)
    on_meta = max(rank.start(held) for rank, held in zip(ranks, memory, strict=True))
    return Estimate(layout, memory, used, seconds, bubble, full or on_meta, on_meta)


@lru_cache(maxsize=256)
def _balanced_stages(tensors: tuple[TensorStats, ...], layers: int, n: int) -> list[range]:
    """Return the layers of each stage, as :func:`split_stages` chooses them."""
    costs = [0.0] * layers
    for tensor in tensors:
        if tensor.role == "parameter":
            costs[tensor.layer] += tensor.global_numel
    return [range(begin, end) for begin, end in pairwise([*balance_stages(costs, n), layers])]


def shard_numel(tensor: TensorStats, ranks: int) -> int:
    """Return the entries of a padded shard of ``data_parallel(strategy="fsdp")``."""
    return _shard_numel(tensor.shape, tensor.on_mesh, ranks)


# Layouts ask for the same few shapes some millions of times.
@lru_cache(maxsize=4096)
def _shard_numel(shape: tuple[int, ...], on_mesh: bool, ranks: int) -> int:
    if not shape:
        return 1
    if not on_mesh and len(shape) == 2:
        rows, columns = shape
        # As data_parallel places shards: along the second dimension where the ranks divide only that.
        if rows % ranks and columns % ranks == 0:
            return rows * (columns // ranks)
    # FSDP2 pads the first dimension to a multiple of the ranks.
    return -(-shape[0] // ranks) * prod(shape[1:])


class _Rank:
    """The cost of one rank of the pp axis; without a pipeline, of any rank."""

    def __init__(
        self,
        stats: ModelStats,
        layout: Layout,
        stages: list[range],
        rank: int,
        samples: float,
        order: Order | None,
        optimizer_states: int,
    ) -> None:
        self.stats, self.layout, self.stages, self.rank = stats, layout, stages, rank
        self.samples, self.order, self.optimizer_states = samples, order, optimizer_states
        kind = SCHEDULES[layout.schedule].order if layout.schedule else "loop"
        self.mine = stages_of_rank(rank, layout.pp, len(stages), kind)
        own = {layer for stage in self.mine for layer in stages[stage]}
        self.tensors = [tensor for tensor in stats.tensors if tensor.layer in own]
        self.layers = [stats.layers[i] for i in sorted(own)]
        self.shards = layout.dp if layout.strategy == "fsdp" else 1

    def seconds(self, cluster: ClusterSpec, itemsize: int) -> float:
        """Return the time of computing a microbatch."""
        flops, samples, speed = cluster.flops(itemsize), self.samples, cluster.memory_bandwidth
        others = cluster.operation_bandwidth or speed
        total, known = 0.0, dict[int, float]()
        for layer in self.layers:
            # Equal layers share their products.
            if id(layer.products) not in known:
                known[id(layer.products)] = sum(
                    product.times * (product.flops.at(samples) / flops + product.moved.at(samples) / speed)
                    for product in layer.products
                )
            total += known[id(layer.products)]
            total += layer.moved.at(samples) / others + layer.calls * cluster.operation_seconds
        return total

    def optimizer_seconds(self, cluster: ClusterSpec) -> float:
        """Return the time of the optimizer's step, which moves memory."""
        trained = [tensor for tensor in self.tensors if tensor.trained]
        calls = len(trained) * (1 + 4 * self.optimizer_states) * cluster.operation_seconds
        # SGD reads a parameter and its gradient and writes the parameter; each moment of Adam takes about 8 accesses.
        return (3 + 8 * self.optimizer_states) * self._bytes(trained) / cluster.memory_bandwidth + calls

    def memory(self) -> MemoryEstimate:
        """Return the memory of the rank."""
        parameters = [tensor for tensor in self.tensors if tensor.role == "parameter"]
        trained = [tensor for tensor in parameters if tensor.trained]
        held = self._bytes(trained)
        workspace = 2 * max(layer.output.at(self.samples) for layer in self.layers)
        return MemoryEstimate(
            parameters=self._bytes(parameters),
            # Gradients have the dtype and the sharding of the parameters, also in mixed precision.
            gradients=held,
            optimizer=self.optimizer_states * held + (_STEP * len(trained) if self.optimizer_states else 0),
            sketches=sum(tensor.nbytes for tensor in self.tensors if tensor.role == "sketch"),
            buffers=sum(tensor.nbytes for tensor in self.tensors if tensor.role == "buffer"),
            activations=self._peak([self._kept(stage) for stage in range(len(self.stages))]),
            communication=(held if self.layout.strategy == "ddp" else self._gathered()) + self._pipeline_buffers(),
            workspace=workspace,
            apart=self._apart(trained, workspace),
        )

    def start(self, memory: MemoryEstimate) -> float:
        """Return what :func:`materialize_` holds of a model on the meta device, given what a step holds."""
        own = {tensor.layer for tensor in self.tensors}
        largest = max(size for layer, size in self.stats.largest_modules.items() if layer in own)
        return memory.parameters + memory.sketches + memory.buffers + largest

    def _apart(self, trained: list[TensorStats], workspace: float) -> float:
        """Return how much less activations, gradients and buffers take together than each at its peak.

        When the backward pass is in a layer, there are the activations of this one and those before it, and the
        gradients of this one and those after it. Of a model that is one layer, the order of its parts is not known.
        """
        if self.order is not None:
            return self._apart_in_pipeline(workspace)
        if len(self.layers) == 1:
            return 0.0
        kept = [layer.activations.at(self.samples) for layer in self.layers]
        made = [0.0] * len(kept)
        for tensor in trained:
            made[tensor.layer] += self._bytes([tensor])
        before, after, peak = 0.0, sum(made), 0.0
        for activations, gradients in zip(kept, made, strict=True):
            before += activations
            peak = max(peak, before + after)
            after -= gradients
        return sum(kept) + sum(made) - peak

    def _apart_in_pipeline(self, workspace: float) -> float:
        """Return the same for a pipeline: microbatches come first, then gradients are reduced, then outputs joined."""
        order = cast("Order", self.order)
        sizes = [self._kept(stage) for stage in range(len(self.stages))]
        units = {int(name.removeprefix("stage ")): both for name, both in self._units.items()}
        unsharded = [units.get(stage, (0.0, 0.0))[1] for stage in range(len(self.stages))]
        gathered, summed = sum(full for full, _ in units.values()), sum(unsharded)
        shards, results = self._bytes(t for t in self.tensors if t.trained), self._results()
        together = max(
            gathered + order.peak(self.rank, sizes, unsharded) + workspace + results,
            gathered + summed + max(unsharded) + shards + results,
            shards + 2 * results,
        )
        return self._peak(sizes) + workspace + gathered + summed + max(unsharded) + shards + 2 * results - together

    def _bytes(self, tensors: Iterable[TensorStats]) -> float:
        return sum(shard_numel(t, self.shards) * t.itemsize if self.shards > 1 else t.nbytes for t in tensors)

    def _peak(self, sizes: list[float]) -> float:
        return self.order.peak(self.rank, sizes) if self.order else sum(sizes[stage] for stage in self.mine)

    def _kept(self, stage: int) -> float:
        """Return what autograd saves of a microbatch in a stage, except for the input, which is a pipeline buffer."""
        layers = [self.stats.layers[i] for i in self.stages[stage]]
        kept = sum(layer.activations.at(self.samples) for layer in layers)
        return kept - (self._input(stage) if stage and layers[0].saves_input else 0)

    def _input(self, stage: int) -> float:
        return self._output(stage - 1) if stage else 0.0

    def _output(self, stage: int) -> float:
        return self.stats.layers[self.stages[stage][-1]].output.at(self.samples)

    def _pipeline_buffers(self) -> float:
        """Return a pipeline's receive buffers, one per microbatch, and outputs that wait for their backward pass."""
        if self.order is None:
            return 0.0
        last, m = len(self.stages) - 1, self.layout.num_microbatches
        received = sum(self._input(s) + (self._output(s) if s < last else 0.0) for s in self.mine)
        waiting = self._peak([self._output(s) if s < last else 0.0 for s in range(last + 1)])
        return m * received + 2 * self._results() + waiting  # outputs of each microbatch, and concatenated

    def _results(self) -> float:
        """Return the output of all microbatches, which the last stage has."""
        last = len(self.stages) - 1
        return self.layout.num_microbatches * self._output(last) if last in self.mine else 0.0

    @cached_property
    def _units(self) -> dict[str, tuple[float, float]]:
        """The bytes that FSDP gathers at once, and those of their gradients, of blocks or whole stages.

        The name of what is in no block is ``""``.
        """
        units: dict[str, list[TensorStats]] = {}
        stage_of = {i: s for s, stage in enumerate(self.stages) for i in stage}
        for tensor in self.tensors:
            if tensor.role == "parameter":
                name = tensor.block if self.layout.pp == 1 else f"stage {stage_of[tensor.layer]}"
                units.setdefault(name, []).append(tensor)
        return {name: (self._full(unit), self._full(unit, reduced=True)) for name, unit in units.items()}

    def _full(self, unit: list[TensorStats], *, reduced: bool = False) -> float:
        """Return the padded bytes of a gathered unit, or (``reduced``) those of its gradients."""
        half = self.stats.mixed_precision is not None
        chosen = [t for t in unit if t.trained] if reduced else unit
        sizes = [_HALF if half and not reduced else t.itemsize for t in chosen]
        return sum(shard_numel(t, self.shards) * self.shards * size for t, size in zip(chosen, sizes, strict=True))

    def _gathered(self) -> float:
        """Return FSDP's buffers: gathered parameters, their gradients, and a copy of these to reduce."""
        if self.layout.strategy not in ("fsdp", "replicate"):
            return 0.0
        sizes = dict(self._units)
        if self.layout.pp > 1:  # a stage stays gathered, with its gradients, for all microbatches
            return sum(g + u for g, u in sizes.values()) + max(u for _, u in sizes.values())
        # Besides the root unit, two blocks are gathered at a time: FSDP prefetches the next one.
        root, root_summed = sizes.pop("", (0.0, 0.0))
        block = max((2 * (g + u) for g, u in sizes.values()), default=0.0)
        return root + max(block, 2 * root_summed)

    def along(self, axis: str, cluster: ClusterSpec) -> Traffic:
        """Return the traffic along tp or pp."""
        layout, m = self.layout, self.layout.num_microbatches
        if axis == "tp":
            payload = m * sum(layer.tp_bytes.at(self.samples) for layer in self.layers)
            # Small messages: latency counts, so the number of calls does.
            calls = m * sum(layer.tp_calls for layer in self.layers)
            return _all_reduce(axis, cluster, layout.tp, layout.tp, payload, calls)
        # A stage sends its output forward and the gradient of its input back. With V schedules neighbouring stages
        # can be on one rank, which sends nothing.
        last, mine = len(self.stages) - 1, set(self.mine)
        messages = [self._output(s) for s in self.mine if s < last and s + 1 not in mine]
        messages += [self._input(s) for s in self.mine if s > 0 and s - 1 not in mine]
        sent = m * sum(messages)
        return _traffic(axis, cluster, layout.pp * layout.tp, sent, sent, m * len(messages), "broadcast")

    def data_parallel(self, cluster: ClusterSpec) -> tuple[Traffic, ...]:
        """Return the traffic along dp and replicate, with the time of filling and emptying buffers."""
        layout, n, units = self.layout, self.layout.dp, self._units
        span = n * layout.pp * layout.tp
        if n == 1:
            return (_traffic("dp", cluster, 1, 0.0, 0.0, 0),)
        if layout.strategy == "fsdp":
            # A block is gathered for its forward and again for its backward pass; the root unit and stages stay.
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
            dp = Traffic(
                "dp",
                gather.link,
                gather.payload + scatter.payload,
                gather.sent + scatter.sent,
                gather.seconds + scatter.seconds,
            )
            shard = reduced / n
            replicas = _all_reduce("replicate", cluster, layout.replicate, layout.world, shard, len(units))
            return (dp, replicas) if layout.replicate > 1 else (dp,)
        trained = float(sum(t.nbytes for t in self.tensors if t.trained))
        if layout.strategy == "replicate":  # FSDP2's engine sends a unit at a time
            return (_all_reduce("dp", cluster, n, span, trained, len(units)),)
        # A bucket is filled, divided by the ranks and read back.
        dp = _all_reduce("dp", cluster, n, span, trained, -(-int(trained) // _BUCKET), copied=4 * trained)
        # DDP also broadcasts buffers in every forward, except for sketches.
        buffers = sum(t.nbytes for t in self.tensors if t.role == "buffer" and not t.name.endswith("sketch_seed"))
        return (replace(dp, payload=dp.payload + buffers),)


def _all_reduce(
    axis: str, cluster: ClusterSpec, n: int, span: int, payload: float, calls: int, copied: float = 0.0
) -> Traffic:
    sent, rounds = 2 * (n - 1) / n * payload, 2 * (n - 1) * calls
    return _traffic(axis, cluster, span, payload, sent, rounds, copied=copied)


def _traffic(
    axis: str,
    cluster: ClusterSpec,
    span: int,
    payload: float,
    sent: float,
    rounds: float,
    operation: str = "all_reduce",
    copied: float = 0.0,
) -> Traffic:
    """Return the traffic of calls of one operation; ``copied`` are bytes read and written to fill and empty buffers."""
    seconds = sent / cluster.bandwidth(span, operation) + rounds * cluster.latency(span, operation)
    seconds += copied / cluster.memory_bandwidth
    return Traffic(axis, cluster.link(span), payload, sent, seconds if payload else 0.0)

r"""What a layout of a model on a cluster costs each rank: memory, bytes sent, and time, by stated assumptions.

Memory is that of the rank which holds most, as the sum of what it holds. Not all of it is there at one moment
(gradients are not, early in a step, nor activations late), so the sum is an upper bound, but for an operator's
temporaries.

Time: computing is flops over ``peak * efficiency``. Rings carry collectives: an all-reduce of V bytes over n ranks
sends :math:`2 V (n-1)/n` over a link in :math:`2 (n-1)` rounds, a gather or scatter of V in all :math:`V (n-1)/n` in
:math:`n - 1`. A pipeline is idle for the share that its schedule's order gives, :math:`(p-1)/(v m + p - 1)` for p
ranks, m microbatches and v stages a rank with 1F1B and its interleaved form. What is sent over tp and pp is waited for;
over dp the share ``overlap`` of the shorter of sending and computing hides, and none under a pipeline, whose gradients
are sent at the end.
"""

__all__ = ["Estimate", "Layout", "MemoryEstimate", "Traffic", "estimate"]

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache

from panther.distributed.advisor._schedule_order import Order, order_of
from panther.distributed.advisor.cluster import ClusterSpec
from panther.distributed.advisor.model_stats import ModelStats, TensorStats
from panther.distributed.comm._precision import compute_dtype
from panther.distributed.pipeline._balance import balanced_cuts
from panther.distributed.pipeline.schedules import SCHEDULES
from panther.errors import ShapeError

_BUCKET = 25 * 2**20  # DDP's
_STEP = 4  # bytes of Adam's count of steps, one a parameter


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks are arranged: the axes of :func:`make_mesh`, and what is done along them."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    replicate: int = 1
    """Copies of what ``"fsdp"`` shards along dp (HSDP)."""
    strategy: str | None = None
    """:func:`data_parallel`'s; None where nothing is to be done along dp."""
    schedule: str | None = None
    """:func:`make_schedule`'s, of a pipeline."""
    num_microbatches: int = 1

    @property
    def world(self) -> int:
        """Ranks."""
        return self.replicate * self.dp * self.pp * self.tp

    def __str__(self) -> str:
        """Short: the axes longer than one."""
        sharding = "" if self.strategy is None else f" {self.strategy}"
        parts = [f"replicate={self.replicate}"] if self.replicate > 1 else []
        parts += [f"dp={self.dp}{sharding}"] if self.dp > 1 else []
        parts += [f"pp={self.pp} {self.schedule} m={self.num_microbatches}"] if self.pp > 1 else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        return ", ".join(parts) or "one rank"


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    sketches: float = 0
    """Of seeded layers; a fitted one's are parameters."""
    buffers: float = 0
    activations: float = 0
    """What autograd keeps from forward to backward."""
    communication: float = 0
    """Copies that sending needs: DDP's buckets, what FSDP gathers and scatters, a pipeline's inputs and outputs."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Traffic:
    """What one rank sends along an axis in a step."""

    axis: str
    link: str
    """``"intra"`` (within a node) or ``"inter"``."""
    handed: float
    """Bytes handed to the operations, as :class:`CommunicationCounter` counts them."""
    sent: float
    """Bytes that the rank's link carries, with rings."""
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """What a layout costs."""

    layout: Layout
    stages: tuple[MemoryEstimate, ...]
    """Bytes of a rank of each place along pp."""
    traffic: tuple[Traffic, ...]
    seconds: dict[str, float]
    """Of a step: compute, bubble, and tp, pp and dp as far as they are waited for."""
    bubble: float
    """Share of the time in which pipelined work is idle."""

    @property
    def memory(self) -> MemoryEstimate:
        """Bytes of the rank that holds most."""
        return max(self.stages, key=lambda memory: memory.total)

    @property
    def step_seconds(self) -> float:
        """Of a step."""
        return sum(self.seconds.values())

    def sent(self, link: str | None = None) -> float:
        """Bytes that a rank sends in a step, over one kind of link or over all."""
        return sum(traffic.sent for traffic in self.traffic if link in (None, traffic.link))


def estimate(
    stats: ModelStats, cluster: ClusterSpec, layout: Layout, batch: int, optimizer_states: int = 2
) -> Estimate:
    """Predict a layout.

    Args:
        stats: Of the whole model.
        cluster: Where it runs.
        layout: The axes.
        batch: Samples of a step, of all ranks.
        optimizer_states: Copies of the trained parameters that the optimizer keeps: 2 with Adam, 0 with SGD.

    Raises:
        ShapeError: If the layout does not suit the model.
    """
    stages = _stages(stats, layout)
    stats = stats.cut(layout.tp)
    held = {tensor.element for tensor in stats.tensors if tensor.trained}
    if any(held.isdisjoint(stage) for stage in stages):
        raise ShapeError(f"of {len(stages)} stages one would have no parameters to train")
    samples = batch / (layout.dp * layout.replicate * layout.num_microbatches)
    order = order_of(layout.schedule, layout.pp, layout.num_microbatches) if layout.schedule else None
    ranks = [_Rank(stats, layout, stages, rank, samples, order, optimizer_states) for rank in range(layout.pp)]
    memory = tuple(rank.memory() for rank in ranks)
    traffic = [max((rank.along(axis, cluster) for rank in ranks), key=lambda t: t.seconds) for axis in ("tp", "pp")]
    along_dp = max((rank.data_parallel(cluster) for rank in ranks), key=lambda ts: sum(t.seconds for t in ts))
    dtype = compute_dtype(stats.mixed_precision)
    size = dtype.itemsize if dtype else _itemsize(stats)
    compute = max(rank.flops() for rank in ranks) * layout.num_microbatches / cluster.flops(size)
    tp, pp = (t.seconds for t in traffic)
    bubble = order.bubble if order else 0.0
    dp = sum(t.seconds for t in along_dp)
    hidden = 0.0 if layout.pp > 1 else cluster.overlap * min(dp, compute)
    seconds = {
        "compute": compute,
        "bubble": (compute + tp + pp) * bubble / (1 - bubble),
        "tp": tp,
        "pp": pp,
        "dp": dp - hidden,
    }
    used = tuple(t for t in (*traffic, *along_dp) if t.handed)
    return Estimate(layout, memory, used, seconds, bubble)


def _stages(stats: ModelStats, layout: Layout) -> list[range]:
    """The elements of every stage, as :func:`split_stages` cuts."""
    n = layout.pp * SCHEDULES[layout.schedule].stages_per_rank if layout.schedule else 1
    return list(_cut(stats.tensors, len(stats.elements), n))


@lru_cache(maxsize=256)
def _cut(tensors: tuple[TensorStats, ...], elements: int, n: int) -> tuple[range, ...]:
    if n == 1:
        return (range(elements),)
    costs = [0.0] * elements
    for tensor in tensors:
        if tensor.role == "parameter":
            costs[tensor.element] += tensor.whole
    begins = balanced_cuts(costs, n)
    return tuple(range(begin, end) for begin, end in zip(begins, [*begins[1:], elements], strict=True))


def _itemsize(stats: ModelStats) -> int:
    return max((tensor.itemsize for tensor in stats.tensors if tensor.trained), default=4)


def shard_numel(tensor: TensorStats, ranks: int) -> int:
    """Entries of the largest shard, padded, as ``data_parallel(strategy="fsdp")`` cuts."""
    if not tensor.shape:
        return 1
    if not tensor.on_mesh and len(tensor.shape) == 2:
        rows, columns = tensor.shape
        if rows < columns and columns % ranks == 0:
            return rows * (columns // ranks)
    return -(-tensor.shape[0] // ranks) * (tensor.numel // max(tensor.shape[0], 1))


class _Rank:
    """One rank of the pp axis, or the one there is."""

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
        n = len(stages)
        in_v = layout.schedule is not None and SCHEDULES[layout.schedule].order == "v"
        self.mine = ([rank, n - 1 - rank] if in_v else list(range(rank, n, layout.pp))) if layout.pp > 1 else [0]
        own = {element for stage in self.mine for element in stages[stage]}
        self.tensors = [tensor for tensor in stats.tensors if tensor.element in own]
        self.elements = [stats.elements[i] for i in sorted(own)]
        self.engine = layout.strategy in ("fsdp", "replicate")
        self.shards = layout.dp if layout.strategy == "fsdp" else 1

    def flops(self) -> float:
        """Of a microbatch."""
        return sum(e.forward_flops.at(self.samples) + e.backward_flops.at(self.samples) for e in self.elements)

    def memory(self) -> MemoryEstimate:
        """What the rank holds."""
        parameters = [tensor for tensor in self.tensors if tensor.role == "parameter"]
        trained = [tensor for tensor in parameters if tensor.trained]
        held = self._bytes(trained)
        return MemoryEstimate(
            parameters=self._bytes(parameters),
            gradients=held,
            optimizer=self.optimizer_states * held + (_STEP * len(trained) if self.optimizer_states else 0),
            sketches=sum(tensor.nbytes for tensor in self.tensors if tensor.role == "sketch"),
            buffers=sum(tensor.nbytes for tensor in self.tensors if tensor.role == "buffer"),
            activations=self._peak([self._kept(stage) for stage in range(len(self.stages))]),
            communication=(held if self.layout.strategy == "ddp" else self._gathered()) + self._handed_on(),
        )

    def _bytes(self, tensors: Iterable[TensorStats]) -> float:
        return sum(shard_numel(t, self.shards) * t.itemsize if self.shards > 1 else t.nbytes for t in tensors)

    def _peak(self, sizes: list[float]) -> float:
        return self.order.peak(self.rank, sizes) if self.order else sum(sizes[stage] for stage in self.mine)

    def _kept(self, stage: int) -> float:
        """What a microbatch leaves in a stage, but for what it was handed, which has a buffer of its own."""
        elements = [self.stats.elements[i] for i in self.stages[stage]]
        kept = sum(element.activations.at(self.samples) for element in elements)
        return kept - (self._input(stage) if stage and elements[0].keeps_input else 0)

    def _input(self, stage: int) -> float:
        return self._output(stage - 1) if stage else 0.0

    def _output(self, stage: int) -> float:
        return self.stats.elements[self.stages[stage][-1]].output.at(self.samples)

    def _handed_on(self) -> float:
        """A pipeline's buffers, one a microbatch, for what stages receive, and the outputs that wait for backward."""
        if self.order is None:
            return 0.0
        last, m = len(self.stages) - 1, self.layout.num_microbatches
        received = sum(self._input(s) + (self._output(s) if s < last else 0.0) for s in self.mine)
        results = 2 * self._output(last) if last in self.mine else 0.0  # in parts, then as one
        waiting = self._peak([self._output(s) if s < last else 0.0 for s in range(last + 1)])
        return m * (received + results) + waiting

    def _units(self) -> dict[str, list[TensorStats]]:
        """What is gathered at once: blocks, or a whole stage; ``""`` is the rest."""
        units: dict[str, list[TensorStats]] = {}
        stage_of = {i: s for s, stage in enumerate(self.stages) for i in stage}
        for tensor in self.tensors:
            if tensor.role == "parameter":
                name = tensor.block if self.layout.pp == 1 else f"stage {stage_of[tensor.element]}"
                units.setdefault(name, []).append(tensor)
        return units

    def _full(self, unit: list[TensorStats], *, reduced: bool = False) -> float:
        """Bytes of a unit gathered, with the padding, or of its gradients as they are summed."""
        half = compute_dtype(self.stats.mixed_precision)
        chosen = [t for t in unit if t.trained] if reduced else unit
        sizes = [half.itemsize if half and not reduced else t.itemsize for t in chosen]
        return sum(shard_numel(t, self.shards) * self.shards * size for t, size in zip(chosen, sizes, strict=True))

    def _gathered(self) -> float:
        """FSDP's copies: what is gathered, its gradients, and these once more as they are summed."""
        if not self.engine:
            return 0.0
        units = self._units()
        sizes = {name: (self._full(unit), self._full(unit, reduced=True)) for name, unit in units.items()}
        if self.layout.pp > 1:  # stages stay gathered, and add up gradients, from first to last microbatch
            return sum(g + u for g, u in sizes.values()) + max(u for _, u in sizes.values())
        root, root_summed = sizes.pop("", (0.0, 0.0))
        block = max((2 * (g + u) for g, u in sizes.values()), default=0.0)
        return root + max(block, 2 * root_summed)

    def along(self, axis: str, cluster: ClusterSpec) -> Traffic:
        """What is sent along tp or pp."""
        layout, m = self.layout, self.layout.num_microbatches
        if axis == "tp":
            n = layout.tp
            handed = m * sum(e.tp_forward.at(self.samples) + e.tp_backward.at(self.samples) for e in self.elements)
            calls = m * sum(e.tp_calls for e in self.elements)
            sent = 2 * (n - 1) / n * handed
            rounds, span = 2 * (n - 1) * calls, n
        else:
            # The gradient of what a stage was handed goes back; neighbours on one rank, in a v, send nothing.
            last, mine = len(self.stages) - 1, set(self.mine)
            out = [self._output(s) for s in self.mine if s < last and s + 1 not in mine]
            back = [self._input(s) for s in self.mine if s > 0 and s - 1 not in mine]
            sent = handed = m * (sum(out) + sum(back))
            rounds = m * (len(out) + len(back))
            span = layout.pp * layout.tp
        seconds = sent / cluster.bandwidth(span) + rounds * cluster.latency(span)
        return Traffic(axis, cluster.link(span), handed, sent, seconds if handed else 0.0)

    def data_parallel(self, cluster: ClusterSpec) -> tuple[Traffic, ...]:
        """What is sent along dp and replicate."""
        layout = self.layout
        inner = layout.dp * layout.pp * layout.tp
        trained = sum(t.nbytes for t in self.tensors if t.trained)
        if layout.strategy == "fsdp" and layout.dp > 1:
            n, handed, whole = layout.dp, 0.0, 0.0
            units = self._units()
            for name, unit in units.items():
                gathers = 2 if name and layout.pp == 1 else 1  # root and stages stay gathered to the end
                full, summed = self._full(unit), self._full(unit, reduced=True)
                handed += gathers * full / n + summed
                whole += gathers * full + summed
            rounds = (n - 1) * 3 * len(units)
            sent = (n - 1) / n * whole
            dp = _traffic("dp", cluster, inner, handed, sent, rounds)
            if layout.replicate == 1:
                return (dp,)
            shard = sum(self._full(unit, reduced=True) for unit in units.values()) / n
            copies = layout.replicate
            rounds = 2 * (copies - 1) * len(units)
            sent = 2 * (copies - 1) / copies * shard
            return dp, _traffic("replicate", cluster, layout.world, shard, sent, rounds)
        if layout.dp == 1:
            return (_traffic("dp", cluster, 1, 0.0, 0.0, 0),)
        n = layout.dp
        calls = -(-trained // _BUCKET) if layout.strategy == "ddp" else len(self._units())
        sent, handed = 2 * (n - 1) / n * trained, float(trained)
        if layout.strategy == "ddp":  # which sends buffers, in every forward, but for a sketched layer's
            buffers = [t for t in self.tensors if t.role == "buffer" and not t.name.endswith("sketch_seed")]
            handed += sum(t.nbytes for t in buffers)
        return (_traffic("dp", cluster, inner, handed, sent, 2 * (n - 1) * calls),)


def _traffic(axis: str, cluster: ClusterSpec, span: int, handed: float, sent: float, rounds: float) -> Traffic:
    seconds = sent / cluster.bandwidth(span) + rounds * cluster.latency(span)
    return Traffic(axis, cluster.link(span), handed, sent, seconds if handed else 0.0)

"""A rank of a layout: its stages, layers and tensors, and its memory: the peak in a step, and before the first step."""

__all__ = ["MemoryEstimate", "Order", "Rank", "memory_of", "order_of", "shard_numel", "start_of"]

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch

from panther.distributed.advisor.statistics.layer_stats import OptimizerStates, TensorStats
from panther.distributed.advisor.statistics.model_stats import ModelStats
from panther.distributed.parallelize.layout import Layout
from panther.distributed.pipeline.balance import SCHEDULES, stages_of_rank
from panther.errors import ShapeError

# Kinds of steps in torch's _ComputationType, and their times.
_UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
Step = tuple[int, str, int]
"""Stage, kind (F: forward, B: backward, I and W: backward for inputs and for weights), and microbatch."""


@dataclass(frozen=True)
class Order:
    """The steps of every rank, and the idle time.

    A forward pass of a stage takes one unit of time, a backward pass two (one of them for inputs), and sending none.
    """

    steps: tuple[tuple[Step, ...], ...]
    """The steps of each rank."""
    bubble: float
    """Share of the time from the first to the last step in which a rank is idle, on average."""

    def peak(
        self, rank: int, sizes: Sequence[float], gradients: Sequence[float] = (), recomputed: Sequence[float] = ()
    ) -> float:
        """Return a rank's peak bytes, given the bytes of a microbatch in each stage, from its forward to its backward.

        ``gradients`` of a stage exist from its first backward pass on; ``recomputed`` bytes exist in backward passes.
        For schedules that split the backward pass, it is an upper bound, because the bytes that torch frees between the
        two parts are counted only for the first stage.
        """
        stored_bytes = peak_bytes = 0.0
        reduced_stages: set[int] = set()
        for stage, kind, _ in self.steps[rank]:
            if kind != "F" and recomputed:
                peak_bytes = max(peak_bytes, stored_bytes + recomputed[stage])
            if kind == "F":
                stored_bytes += sizes[stage]
            elif kind == "B" or (kind == "W" and stage == 0):
                stored_bytes -= sizes[stage]
            if gradients and kind in "BW" and stage not in reduced_stages:
                reduced_stages.add(stage)
                stored_bytes += gradients[stage]
            peak_bytes = max(peak_bytes, stored_bytes)
        return peak_bytes


# Many layouts share a schedule, and a long pipeline has many steps.
@lru_cache(maxsize=512)
def order_of(name: str, ranks: int, microbatches: int) -> Order:
    """Return the order of a schedule.

    Raises:
        ShapeError: If the schedule does not support the number of microbatches.
    """
    # torch 2.13 executes 1f1b in a different order from the one that it lists.
    listed = _one_forward_one_backward if name == "1f1b" else _listed_by_torch
    steps = tuple(tuple(rank) for rank in listed(name, ranks, microbatches))
    return Order(steps, _bubble(steps))


def _one_forward_one_backward(name: str, ranks: int, microbatches: int) -> list[list[Step]]:
    orders = []
    for rank in range(ranks):
        # The first rank starts most microbatches before its first backward pass, the last rank one.
        warmup = min(ranks - rank, microbatches)
        steps: list[Step] = [(rank, "F", i) for i in range(warmup)]
        for i in range(microbatches):
            steps.append((rank, "B", i))
            if warmup + i < microbatches:
                steps.append((rank, "F", warmup + i))
        orders.append(steps)
    return orders


def _listed_by_torch(name: str, ranks: int, microbatches: int) -> list[list[Step]]:
    kind = SCHEDULES[name]

    class Listed(kind.make):  # type: ignore[name-defined]
        def _prepare_schedule_with_comms(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing, because torch would add the messages, which takes seconds for long pipelines."""

    n = ranks * kind.stages_per_rank
    # The attributes of a stage that the constructors read. A real stage would run collectives when it is made.
    common = {"num_stages": n, "group_size": ranks, "group_rank": 0, "group": None, "device": torch.device("cpu")}
    stages = [SimpleNamespace(stage_index=i, submod=None, **common) for i in stages_of_rank(0, ranks, n, kind.order)]
    try:
        # torch 2.13 has no public way to read the order.
        order = Listed(stages if kind.stages_per_rank > 1 else stages[0], microbatches).pipeline_order
    except ValueError as error:
        raise ShapeError(f"{name!r} does not support {microbatches} microbatches on {ranks} ranks: {error}") from error
    return [
        [
            (part.stage_index, part.computation_type.value, part.microbatch_index)
            for action in order[rank]
            if action is not None  # the rank waits
            for part in action.sub_actions or (action,)
            if part.computation_type.value in _UNITS
        ]
        for rank in range(ranks)
    ]


def _bubble(steps: tuple[tuple[Step, ...], ...]) -> float:
    """Simulate the steps, each as soon as its rank is free and its input is ready, and return the idle share."""
    last = max(stage for rank in steps for stage, _, _ in rank)
    ready: dict[Step, int] = {}
    clock = [0] * len(steps)
    left = [list(reversed(rank)) for rank in steps]
    while any(left):
        num_steps_left = sum(map(len, left))
        for rank, todo in enumerate(left):
            while todo:
                stage, kind, micro = todo[-1]
                needs: Step | None = None
                if kind == "F" and stage > 0:
                    needs = (stage - 1, "F", micro)
                elif kind in "BI":
                    needs = (stage, "F", micro) if stage == last else (stage + 1, "B", micro)
                if needs is not None and needs not in ready:
                    break
                clock[rank] = max(clock[rank], ready[needs] if needs else 0) + _UNITS[kind]
                # No other stage needs the gradient of the weights.
                if kind != "W":
                    ready[stage, "F" if kind == "F" else "B", micro] = clock[rank]
                todo.pop()
        if sum(map(len, left)) == num_steps_left:  # no rank could take a step
            raise ShapeError("the order of the schedule deadlocks")
    work = sum(_UNITS[kind] for rank in steps for _, kind, _ in rank) / len(steps)
    return 1 - work / max(clock)


_HALF = 2  # bytes of a number in mixed precision


def shard_numel(tensor: TensorStats, ranks: int) -> int:
    """Return the entries of a padded shard of ``data_parallel(strategy="fsdp")``."""
    return prod(_shard_shape(tensor.shape, tensor.on_mesh, ranks))


# Cached, because estimating layouts needs the same few shapes some millions of times.
@lru_cache(maxsize=4096)
def _shard_shape(shape: tuple[int, ...], on_mesh: bool, ranks: int) -> tuple[int, ...]:
    if not shape:
        return ()
    if not on_mesh and len(shape) == 2:
        rows, columns = shape
        # data_parallel shards along the second dimension if the number of ranks divides only this one.
        if rows % ranks and columns % ranks == 0:
            return rows, columns // ranks
    # FSDP2 pads the first dimension to a multiple of the ranks.
    return -(-shape[0] // ranks), *shape[1:]


@dataclass(eq=False)
class Rank:
    """A rank of the pp axis; without a pipeline, it stands for all ranks."""

    stats: ModelStats
    layout: Layout
    stages: list[range]
    """The layers of each stage."""
    rank: int
    samples: float
    """Number of samples of a microbatch."""
    order: Order | None
    optimizer_states: OptimizerStates

    def __post_init__(self) -> None:
        kind = SCHEDULES[self.layout.schedule].order if self.layout.schedule else "loop"
        self.own_stages = stages_of_rank(self.rank, self.layout.pp, len(self.stages), kind)
        layers = {layer for stage in self.own_stages for layer in self.stages[stage]}
        self.tensors = [tensor for tensor in self.stats.tensors if tensor.layer in layers]
        self.layers = [self.stats.layers[i] for i in sorted(layers)]
        self.shards = self.layout.dp if self.layout.strategy == "fsdp" else 1

    def bytes_of(self, tensors: Iterable[TensorStats]) -> float:
        """Return the bytes of tensors on this rank, which holds shards of them under ``"fsdp"``."""
        return sum(shard_numel(t, self.shards) * t.itemsize if self.shards > 1 else t.nbytes for t in tensors)

    def shape_of(self, tensor: TensorStats) -> tuple[int, ...]:
        """Return the shape of what this rank holds of a tensor: a padded shard under ``"fsdp"``."""
        return _shard_shape(tensor.shape, tensor.on_mesh, self.shards) if self.shards > 1 else tensor.shape

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's states on this rank."""
        states = self.optimizer_states
        return sum(states.nbytes(t.name, self.shape_of(t), t.itemsize) for t in self.tensors if t.trained)

    def peak_of(self, sizes: list[float], recomputed: Sequence[float] = ()) -> float:
        """Return the rank's peak bytes of data with these sizes in each stage, per microbatch.

        ``recomputed`` are the bytes that are held in addition during the backward pass of each stage.
        """
        if self.order is not None:
            return self.order.peak(self.rank, sizes, recomputed=recomputed)
        return sum(sizes[stage] for stage in self.own_stages) + sum(recomputed)

    def kept(self, stage: int) -> float:
        """Return the bytes that autograd saves for a microbatch in a stage; the input counts as a pipeline buffer."""
        layers = [self.stats.layers[i] for i in self.stages[stage]]
        saved = sum(layer.activations.at(self.samples) for layer in layers)
        # In mixed precision, FSDP2 saves a cast copy of the stage's input.
        received = stage and layers[0].saves_input and self.stats.mixed_precision is None
        return saved - (self.input_of(stage) if received else 0)

    def recomputed(self) -> list[float]:
        """Return the bytes that the backward pass of each stage recomputes, minus the bytes that later layers freed.

        The list is empty without activation checkpointing.
        """
        if self.stats.activation_checkpointing == "none":
            return []
        most = [0.0] * len(self.stages)
        for stage in self.own_stages:
            freed = 0.0
            for i in reversed(self.stages[stage]):
                layer = self.stats.layers[i]
                most[stage] = max(most[stage], layer.recomputed.at(self.samples) - freed)
                freed += layer.activations.at(self.samples)
        return most

    def input_of(self, stage: int) -> float:
        """Return the bytes that a stage receives for a microbatch."""
        return self.output_of(stage - 1) if stage else 0.0

    def output_of(self, stage: int) -> float:
        """Return the bytes of a stage's output for a microbatch."""
        output = self.stats.layers[self.stages[stage][-1]].output.at(self.samples)
        # FSDP2 casts the outputs of a stage to float32.
        return 4 / _HALF * output if self.stats.mixed_precision and self.layout.pp > 1 else output

    def results(self) -> float:
        """Return the bytes of the output of all microbatches if the rank has the last stage, and otherwise 0."""
        last = len(self.stages) - 1
        return self.layout.num_microbatches * self.output_of(last) if last in self.own_stages else 0.0

    @cached_property
    def units(self) -> dict[str, tuple[float, float]]:
        """Bytes of the parameters of each unit that FSDP gathers, and bytes of their gradients, by the unit's name.

        Units are blocks, or stages of a pipeline. Parameters outside of all blocks form the unit ``""``.
        """
        units: dict[str, list[TensorStats]] = {}
        stage_of = {i: s for s, stage in enumerate(self.stages) for i in stage}
        for tensor in self.tensors:
            if tensor.role == "parameter":
                name = tensor.block if self.layout.pp == 1 else f"stage {stage_of[tensor.layer]}"
                units.setdefault(name, []).append(tensor)
        return {name: (self._full(unit), self._full(unit, reduced=True)) for name, unit in units.items()}

    def _full(self, unit: list[TensorStats], *, reduced: bool = False) -> float:
        """Return the padded bytes of a gathered unit, or, if ``reduced``, of its gradients."""
        half = self.stats.mixed_precision is not None
        tensors = [t for t in unit if t.trained] if reduced else unit
        sizes = [_HALF if half and not reduced else t.itemsize for t in tensors]
        return sum(shard_numel(t, self.shards) * self.shards * size for t, size in zip(tensors, sizes, strict=True))


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
    """Sum of the peaks of the parts above minus their joint peak: backward frees activations and makes gradients."""

    @property
    def total(self) -> float:
        """Joint peak of all parts: their sum minus ``overlap``."""
        return sum(self.parts().values()) - self.overlap

    def parts(self) -> dict[str, float]:
        """Return each part by its name."""
        # Not asdict, which copies, because plans call this thousands of times.
        return {name: value for name, value in vars(self).items() if name != "overlap"}


def memory_of(rank: Rank) -> MemoryEstimate:
    """Return the memory of the rank."""
    parameters = [tensor for tensor in rank.tensors if tensor.role == "parameter"]
    trained = [tensor for tensor in parameters if tensor.trained]
    gradient_bytes = rank.bytes_of(trained)
    memory = MemoryEstimate(
        parameters=rank.bytes_of(parameters),
        # Gradients have the dtype and the sharding of the parameters, even in mixed precision.
        gradients=gradient_bytes,
        optimizer=float(rank.state_bytes),
        sketches=sum(tensor.nbytes for tensor in rank.tensors if tensor.role == "sketch"),
        buffers=sum(tensor.nbytes for tensor in rank.tensors if tensor.role == "buffer"),
        activations=rank.peak_of([rank.kept(stage) for stage in range(len(rank.stages))], rank.recomputed()),
        communication=(gradient_bytes if rank.layout.strategy == "ddp" else _gathered(rank)) + _pipeline_buffers(rank),
        workspace=2 * max(layer.largest.at(rank.samples) for layer in rank.layers),
    )
    return replace(memory, overlap=_overlap_bytes(rank, trained, memory))


def start_of(rank: Rank, memory: MemoryEstimate) -> float:
    """Return the peak bytes of :func:`materialize_` for a model on the meta device, given the memory of a step.

    The rank holds its shards and one more module: in full if its values are drawn, and as shards with a sketch if they
    are read.
    """
    layers = {tensor.layer for tensor in rank.tensors}
    modules = [sizes for layer, sizes in rank.stats.largest_modules.items() if layer in layers]
    drawn_bytes = max((full for full, _, _ in modules), default=0.0)
    read_bytes = max((shard / rank.shards + sketch for _, shard, sketch in modules), default=0.0)
    return memory.parameters + memory.sketches + memory.buffers + max(drawn_bytes, read_bytes)


def _overlap_bytes(rank: Rank, trained: list[TensorStats], memory: MemoryEstimate) -> float:
    """Return the sum of the individual peaks minus the joint peak, in bytes.

    During the backward pass of a layer, a rank holds the activations up to this layer, the gradients from this layer
    on, the layer's workspace, and the units that FSDP gathers for it. At the end, FSDP reduces the gradients of
    parameters outside of all blocks. For a model that is a single layer, the order within it is unknown, and the result
    is 0.
    """
    if rank.order is not None:
        return _overlap_bytes_in_pipeline(rank, memory.workspace)
    if len(rank.layers) == 1:
        return 0.0
    activation_bytes = [layer.activations.at(rank.samples) for layer in rank.layers]
    gradient_bytes, blocks = [0.0] * len(activation_bytes), [""] * len(activation_bytes)
    for tensor in trained:
        gradient_bytes[tensor.layer] += rank.bytes_of([tensor])
        blocks[tensor.layer] = tensor.block
    is_sharded = rank.layout.strategy in ("fsdp", "replicate")
    root, root_summed = rank.units.get("", (0.0, 0.0))
    at_once = 2 * max((gathered for name, (gathered, _) in rank.units.items() if name), default=0.0)
    earlier, after, peak = 0.0, sum(gradient_bytes), 0.0
    for i, layer in enumerate(rank.layers):
        earlier += activation_bytes[i]
        activations = earlier + layer.recomputed.at(rank.samples)
        workspace, buffers = 2 * layer.largest.at(rank.samples), memory.communication
        if is_sharded:
            # The next block is gathered too, and the gradients of the previous block are being reduced.
            buffers = root + at_once + (2 * rank.units[blocks[i]][1] if blocks[i] else root_summed)
            if i == len(activation_bytes) - 1:
                # The loss makes two tensors of the output's size, and one of them is freed before blocks are gathered.
                buffers = max(root, buffers - workspace / 2)
        peak = max(peak, activations + after + buffers + workspace)
        after -= gradient_bytes[i]
    if is_sharded:
        peak = max(peak, sum(gradient_bytes) + root + 2 * root_summed)
    sum_of_peaks = memory.activations + sum(gradient_bytes) + memory.communication + memory.workspace
    return max(0.0, sum_of_peaks - peak)


def _overlap_bytes_in_pipeline(rank: Rank, workspace: float) -> float:
    """Return the sum of the individual peaks minus the joint peak for a pipeline, in bytes.

    The joint peak is the largest of three phases: microbatches, the reduction of gradients, and joining the outputs.
    """
    order = cast("Order", rank.order)
    sizes = [rank.kept(stage) for stage in range(len(rank.stages))]
    units = {int(name.removeprefix("stage ")): both for name, both in rank.units.items()}
    unsharded = [units.get(stage, (0.0, 0.0))[1] for stage in range(len(rank.stages))]
    gathered, summed = sum(full for full, _ in units.values()), sum(unsharded)
    shards, results = rank.bytes_of(t for t in rank.tensors if t.trained), rank.results()
    joint_peak = max(
        gathered + order.peak(rank.rank, sizes, unsharded, rank.recomputed()) + workspace + results,
        gathered + summed + max(unsharded) + shards + results,
        shards + 2 * results,
    )
    sum_of_peaks = rank.peak_of(sizes, rank.recomputed()) + workspace
    return sum_of_peaks + gathered + summed + max(unsharded) + shards + 2 * results - joint_peak


def _pipeline_buffers(rank: Rank) -> float:
    """Return the bytes of a pipeline's receive buffers (one per microbatch) and of outputs kept until backward."""
    if rank.order is None:
        return 0.0
    last, m = len(rank.stages) - 1, rank.layout.num_microbatches
    received = sum(rank.input_of(s) + (rank.output_of(s) if s < last else 0.0) for s in rank.own_stages)
    waiting = rank.peak_of([rank.output_of(s) if s < last else 0.0 for s in range(last + 1)])
    return m * received + 2 * rank.results() + waiting  # results twice: per microbatch, and concatenated


def _gathered(rank: Rank) -> float:
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

"""The memory of a rank, in bytes: the peak in a step, and the peak before the first step."""

__all__ = ["MemoryEstimate", "memory_of", "start_of"]

from dataclasses import dataclass, replace
from typing import cast

from panther.distributed.advisor.cost.rank import Rank
from panther.distributed.advisor.cost.schedule import Order
from panther.distributed.advisor.statistics.layer_stats import TensorStats


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
    """Buffers: DDP's buckets, FSDP's gathered and reduced units, inputs and outputs of pipeline stages, and the part of
    compressed gradients that was not sent."""
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
    held = rank.bytes_of(trained)
    unsent = 0.0
    if trained and rank.messages.applies_to(rank.layout.strategy, rank.layout.replicate):
        itemsize = max(tensor.itemsize for tensor in trained)
        unsent = rank.messages.stored_bytes(rank.gradient_shapes(), itemsize)
    memory = MemoryEstimate(
        parameters=rank.bytes_of(parameters),
        # Gradients have the dtype and the sharding of the parameters, even in mixed precision.
        gradients=held,
        optimizer=float(rank.state_bytes),
        sketches=sum(tensor.nbytes for tensor in rank.tensors if tensor.role == "sketch"),
        buffers=sum(tensor.nbytes for tensor in rank.tensors if tensor.role == "buffer"),
        activations=rank.peak_of([rank.kept(stage) for stage in range(len(rank.stages))], rank.recomputed()),
        communication=(held if rank.layout.strategy == "ddp" else _gathered(rank)) + _pipeline_buffers(rank) + unsent,
        workspace=2 * max(layer.largest.at(rank.samples) for layer in rank.layers),
    )
    return replace(memory, overlap=_overlap_bytes(rank, trained, memory))


def start_of(rank: Rank, memory: MemoryEstimate) -> float:
    """Return the peak bytes of :func:`materialize_` for a model on the meta device, given the memory of a step.

    The rank holds its shards and one more module: in full if its values are drawn, and as shards with a sketch if they
    are read.
    """
    held_layers = {tensor.layer for tensor in rank.tensors}
    modules = [sizes for layer, sizes in rank.stats.largest_modules.items() if layer in held_layers]
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
        before = earlier + layer.recomputed.at(rank.samples)
        workspace, buffers = 2 * layer.largest.at(rank.samples), memory.communication
        if is_sharded:
            # The next block is gathered too, and the gradients of the previous block are being reduced.
            buffers = root + at_once + (2 * rank.units[blocks[i]][1] if blocks[i] else root_summed)
            if i == len(activation_bytes) - 1:
                # The loss makes two tensors of the output's size, and one of them is freed before blocks are gathered.
                buffers = max(root, buffers - workspace / 2)
        peak = max(peak, before + after + buffers + workspace)
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

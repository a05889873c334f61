"""The memory of one rank, in bytes: the peak in a step, and what it holds before the first."""

__all__ = ["MemoryEstimate", "memory_of", "start_of"]

from dataclasses import dataclass, replace
from typing import cast

from panther.distributed.advisor.cost._schedule_order import Order
from panther.distributed.advisor.cost.rank import Rank
from panther.distributed.advisor.statistics.layer_stats import TensorStats

_STEP = 4  # bytes of Adam's step count, one per parameter


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
    """Tensors that are kept for the backward pass, with those that activation checkpointing makes again in it."""
    communication: float = 0
    """Buffers: DDP's buckets, what FSDP gathers and scatters, inputs and outputs of pipeline stages."""
    workspace: float = 0
    """What operators return and autograd does not keep: two tensors of the size of the largest."""
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


def memory_of(rank: Rank) -> MemoryEstimate:
    """Return the memory of the rank."""
    parameters = [tensor for tensor in rank.tensors if tensor.role == "parameter"]
    trained = [tensor for tensor in parameters if tensor.trained]
    held = rank.bytes_of(trained)
    memory = MemoryEstimate(
        parameters=rank.bytes_of(parameters),
        # Gradients have the dtype and the sharding of the parameters, also in mixed precision.
        gradients=held,
        optimizer=rank.optimizer_states * held + (_STEP * len(trained) if rank.optimizer_states else 0),
        sketches=sum(tensor.nbytes for tensor in rank.tensors if tensor.role == "sketch"),
        buffers=sum(tensor.nbytes for tensor in rank.tensors if tensor.role == "buffer"),
        activations=rank.peak_of([rank.kept(stage) for stage in range(len(rank.stages))], rank.recomputed()),
        communication=(held if rank.layout.strategy == "ddp" else _gathered(rank)) + _pipeline_buffers(rank),
        workspace=2 * max(layer.largest.at(rank.samples) for layer in rank.layers),
    )
    return replace(memory, apart=_apart(rank, trained, memory))


def start_of(rank: Rank, memory: MemoryEstimate) -> float:
    """Return what :func:`materialize_` holds of a model on the meta device, given what a step holds.

    Beside the rank's shards, one module: drawn, in full; read, its shards again, and a sketch, which is drawn again.
    """
    own = {tensor.layer for tensor in rank.tensors}
    modules = [sizes for layer, sizes in rank.stats.largest_modules.items() if layer in own]
    drawn = max((full for full, _, _ in modules), default=0.0)
    read = max((shard / rank.shards + sketch for _, shard, sketch in modules), default=0.0)
    return memory.parameters + memory.sketches + memory.buffers + max(drawn, read)


def _apart(rank: Rank, trained: list[TensorStats], memory: MemoryEstimate) -> float:
    """Return how much less activations, gradients, buffers and workspace take together than each at its peak.

    When the backward pass is in a layer, there are the activations of this one and those before it, the gradients of
    this one and those after it, its own workspace, and what FSDP gathers for it. In the end FSDP reduces the gradients
    of what is in no block. Of a model that is one layer, the order of its parts is not known.
    """
    if rank.order is not None:
        return _apart_in_pipeline(rank, memory.workspace)
    if len(rank.layers) == 1:
        return 0.0
    kept = [layer.activations.at(rank.samples) for layer in rank.layers]
    made, blocks = [0.0] * len(kept), [""] * len(kept)
    for tensor in trained:
        made[tensor.layer] += rank.bytes_of([tensor])
        blocks[tensor.layer] = tensor.block
    is_sharded = rank.layout.strategy in ("fsdp", "replicate")
    root, root_summed = rank.units.get("", (0.0, 0.0))
    at_once = 2 * max((gathered for name, (gathered, _) in rank.units.items() if name), default=0.0)
    earlier, after, peak = 0.0, sum(made), 0.0
    for i, layer in enumerate(rank.layers):
        earlier += kept[i]
        before = earlier + layer.recomputed.at(rank.samples)
        workspace, sent = 2 * layer.largest.at(rank.samples), memory.communication
        if is_sharded:
            # Besides its own, the next block is gathered, and the gradients of the one before are being reduced.
            sent = root + at_once + (2 * rank.units[blocks[i]][1] if blocks[i] else root_summed)
            if i == len(kept) - 1:
                # The loss makes two tensors of the output's size; blocks are gathered when one of them is left.
                sent = max(root, sent - workspace / 2)
        peak = max(peak, before + after + sent + workspace)
        after -= made[i]
    if is_sharded:
        peak = max(peak, sum(made) + root + 2 * root_summed)
    together = memory.activations + sum(made) + memory.communication + memory.workspace
    return max(0.0, together - peak)


def _apart_in_pipeline(rank: Rank, workspace: float) -> float:
    """Return the same for a pipeline: microbatches come first, then gradients are reduced, then outputs joined."""
    order = cast("Order", rank.order)
    sizes = [rank.kept(stage) for stage in range(len(rank.stages))]
    units = {int(name.removeprefix("stage ")): both for name, both in rank.units.items()}
    unsharded = [units.get(stage, (0.0, 0.0))[1] for stage in range(len(rank.stages))]
    gathered, summed = sum(full for full, _ in units.values()), sum(unsharded)
    shards, results = rank.bytes_of(t for t in rank.tensors if t.trained), rank.results()
    together = max(
        gathered + order.peak(rank.rank, sizes, unsharded, rank.recomputed()) + workspace + results,
        gathered + summed + max(unsharded) + shards + results,
        shards + 2 * results,
    )
    parts = rank.peak_of(sizes, rank.recomputed()) + workspace
    return parts + gathered + summed + max(unsharded) + shards + 2 * results - together


def _pipeline_buffers(rank: Rank) -> float:
    """Return a pipeline's receive buffers, one per microbatch, and outputs that wait for their backward pass."""
    if rank.order is None:
        return 0.0
    last, m = len(rank.stages) - 1, rank.layout.num_microbatches
    received = sum(rank.input_of(s) + (rank.output_of(s) if s < last else 0.0) for s in rank.mine)
    waiting = rank.peak_of([rank.output_of(s) if s < last else 0.0 for s in range(last + 1)])
    return m * received + 2 * rank.results() + waiting  # outputs of each microbatch, and concatenated


def _gathered(rank: Rank) -> float:
    """Return FSDP's buffers: gathered parameters, their gradients, and a copy of these to reduce."""
    if rank.layout.strategy not in ("fsdp", "replicate"):
        return 0.0
    sizes = dict(rank.units)
    if rank.layout.pp > 1:  # a stage stays gathered, with its gradients, for all microbatches
        return sum(g + u for g, u in sizes.values()) + max(u for _, u in sizes.values())
    # Besides the root unit, two blocks are gathered at a time: FSDP prefetches the next one.
    root, root_summed = sizes.pop("", (0.0, 0.0))
    block = max((2 * (g + u) for g, u in sizes.values()), default=0.0)
    return root + max(block, 2 * root_summed)

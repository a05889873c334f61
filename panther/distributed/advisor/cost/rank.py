"""A rank of a layout: its stages, layers and tensors, and their bytes on the rank."""

__all__ = ["Rank", "optimizer_bytes", "shard_numel"]

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from math import prod

from panther.distributed.advisor.cost.gradient_messages import GradientMessages
from panther.distributed.advisor.cost.schedule import Order
from panther.distributed.advisor.statistics.layer_stats import TensorStats
from panther.distributed.advisor.statistics.model_stats import ModelStats
from panther.distributed.advisor.statistics.optimizer_states import OptimizerStates
from panther.distributed.parallelize.layout import Layout
from panther.distributed.pipeline.balance import stages_of_rank
from panther.distributed.pipeline.schedule_kinds import SCHEDULES

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


def optimizer_bytes(trained: float, states: float) -> float:
    """Return the bytes that the optimizer's step reads and writes for parameters and states of so many bytes.

    SGD reads a parameter and its gradient and writes the parameter; each moment of Adam takes about 8 accesses.
    """
    return 3 * trained + 8 * states


class Rank:
    """A rank of the pp axis; without a pipeline, it stands for all ranks."""

    def __init__(
        self,
        stats: ModelStats,
        layout: Layout,
        stages: list[range],
        rank: int,
        samples: float,
        order: Order | None,
        optimizer_states: OptimizerStates,
        messages: GradientMessages,
    ) -> None:
        self.stats, self.layout, self.stages, self.rank = stats, layout, stages, rank
        self.samples, self.order, self.optimizer_states = samples, order, optimizer_states
        self.messages = messages
        kind = SCHEDULES[layout.schedule].order if layout.schedule else "loop"
        self.own_stages = stages_of_rank(rank, layout.pp, len(stages), kind)
        held_layers = {layer for stage in self.own_stages for layer in stages[stage]}
        self.tensors = [tensor for tensor in stats.tensors if tensor.layer in held_layers]
        self.layers = [stats.layers[i] for i in sorted(held_layers)]
        self.shards = layout.dp if layout.strategy == "fsdp" else 1

    def bytes_of(self, tensors: Iterable[TensorStats]) -> float:
        """Return the bytes of tensors on this rank, which holds shards of them under ``"fsdp"``."""
        return sum(shard_numel(t, self.shards) * t.itemsize if self.shards > 1 else t.nbytes for t in tensors)

    def shape_of(self, tensor: TensorStats) -> tuple[int, ...]:
        """Return the shape of what this rank holds of a tensor: a padded shard under ``"fsdp"``."""
        return _shard_shape(tensor.shape, tensor.on_mesh, self.shards) if self.shards > 1 else tensor.shape

    def gradient_shapes(self) -> list[tuple[tuple[int, ...], int]]:
        """Return the shape of each gradient on this rank, and its entries."""
        shapes = [self.shape_of(t) for t in self.tensors if t.trained]
        return [(shape, prod(shape)) for shape in shapes]

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

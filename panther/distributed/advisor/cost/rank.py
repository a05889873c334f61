"""One rank of a layout: its stages, layers and tensors, and the bytes of what it holds of them."""

__all__ = ["Rank", "shard_numel"]

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from math import prod

from panther.distributed.advisor.cost._schedule_order import Order
from panther.distributed.advisor.cost.layout import Layout
from panther.distributed.advisor.statistics.layer_stats import TensorStats
from panther.distributed.advisor.statistics.model_stats import ModelStats
from panther.distributed.pipeline._balance import stages_of_rank
from panther.distributed.pipeline._kinds import SCHEDULES

_HALF = 2  # bytes of a number in mixed precision


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


class Rank:
    """One rank of the pp axis; without a pipeline, any rank."""

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

    def bytes_of(self, tensors: Iterable[TensorStats]) -> float:
        """Return the bytes of tensors, or of their shards."""
        return sum(shard_numel(t, self.shards) * t.itemsize if self.shards > 1 else t.nbytes for t in tensors)

    def peak_of(self, sizes: list[float], again: Sequence[float] = ()) -> float:
        """Return the most that the rank holds at a time of something that has these sizes in each stage.

        ``again`` comes on top while the backward pass is in a stage.
        """
        if self.order is not None:
            return self.order.peak(self.rank, sizes, again=again)
        return sum(sizes[stage] for stage in self.mine) + sum(again)

    def kept(self, stage: int) -> float:
        """Return what autograd saves of a microbatch in a stage, except for the input, which is a pipeline buffer."""
        layers = [self.stats.layers[i] for i in self.stages[stage]]
        kept = sum(layer.activations.at(self.samples) for layer in layers)
        # In mixed precision, FSDP2 saves the stage's input as it has cast it.
        received = stage and layers[0].saves_input and self.stats.mixed_precision is None
        return kept - (self.input_of(stage) if received else 0)

    def recomputed(self) -> list[float]:
        """Return what backward of each stage makes again of a microbatch, less what is no longer kept of later layers.

        An empty list stands for nothing.
        """
        if self.stats.activation_checkpointing == "none":
            return []
        most = [0.0] * len(self.stages)
        for stage in self.mine:
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
        """Return the bytes that a stage sends on for a microbatch."""
        output = self.stats.layers[self.stages[stage][-1]].output.at(self.samples)
        # FSDP2 casts the outputs of a stage to float32.
        return 4 / _HALF * output if self.stats.mixed_precision and self.layout.pp > 1 else output

    def results(self) -> float:
        """Return the output of all microbatches, which the last stage has."""
        last = len(self.stages) - 1
        return self.layout.num_microbatches * self.output_of(last) if last in self.mine else 0.0

    @cached_property
    def units(self) -> dict[str, tuple[float, float]]:
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

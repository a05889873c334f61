"""An arrangement of ranks: the axes of a mesh, the strategy along each, and the sizes that a world allows."""

__all__ = ["Layout", "fit_layout"]

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from panther.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An arrangement of ranks: the axes of :func:`make_mesh`, and the strategy along each."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    replicate: int = 1
    """Number of replicas of the model that ``"fsdp"`` shards along dp (HSDP)."""
    strategy: str | None = None
    """Strategy of :func:`data_parallel`; None without data parallelism."""
    schedule: str | None = None
    """Schedule of :func:`make_schedule`; None without a pipeline."""
    num_microbatches: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicate * self.dp * self.pp * self.tp

    @property
    def shares_layers(self) -> bool:
        """Whether a rank has only a part of the layers, by tensor or pipeline parallelism."""
        return self.pp * self.tp > 1

    def with_pipeline(self, schedule: str, num_microbatches: int) -> "Layout":
        """Return the layout with the schedule of its pipeline, or the layout itself if it has none."""
        return replace(self, schedule=schedule, num_microbatches=num_microbatches) if self.pp > 1 else self

    def sizes(self) -> dict[str, Any]:
        """Return the settings of :class:`ParallelismConfig` and of a Trainer that are the sizes of the axes."""
        return {
            "data_parallel_size": self.dp * self.replicate,
            "data_parallel_replicate_size": self.replicate,
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings of :class:`ParallelismConfig` that build this layout."""
        pipeline = {"schedule": self.schedule, "num_microbatches": self.num_microbatches} if self.pp > 1 else {}
        return {**self.sizes(), "data_parallel": self.strategy, **pipeline}

    def __str__(self) -> str:
        """Return the axes that are longer than one."""
        sharding = "" if self.strategy is None else f" {self.strategy}"
        parts = [f"replicate={self.replicate}"] if self.replicate > 1 else []
        parts += [f"dp={self.dp}{sharding}"] if self.dp > 1 else []
        parts += [f"pp={self.pp} {self.schedule} m={self.num_microbatches}"] if self.pp > 1 else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        return ", ".join(parts) or "one rank"


def fit_layout(
    layout: Layout,
    world: int,
    *,
    data: int | None,
    tensor: int | None,
    pipeline: int | None,
    free: str = "data",
    can_grow: bool = False,
) -> Layout:
    """Return the layout with the sizes of the axes over ``world`` ranks; None is a size that was not set.

    The axis ``free``, ``"data"``, ``"tensor"`` or ``"pipeline"``, gets the remaining ranks if its size is None, and
    with ``can_grow`` another axis may. Sizes that do not suit the number of ranks, one as well as many, are a
    ConfigError.
    """
    sizes = {"data": data, "pipeline": pipeline, "tensor": tensor}
    set_sizes = {f"{name}_parallel_size": size for name, size in sizes.items() if size is not None}
    product = prod(set_sizes.values())
    is_open = can_grow or sizes[free] is None
    if world % product or not (is_open or product == world):
        factors = [f"{name}={size}" for name, size in set_sizes.items()]
        total = f" = {product}" if len(factors) > 1 else ""
        raise ConfigError(
            f"{' * '.join(factors)}{total} must {'divide' if is_open else 'be'} the number of processes ({world}): "
            f"start {'a multiple of ' if is_open else ''}{product}, or change or leave out "
            f"{'sizes' if len(factors) > 1 else 'the size'}"
        )
    if sizes[free] is None:
        sizes[free] = world // product
    dp, pp, tp = (size or 1 for size in sizes.values())
    if dp % layout.replicate:
        raise ConfigError(
            f"data_parallel_replicate_size={layout.replicate} must divide the number of data-parallel ranks ({dp}): "
            f"start a multiple of {layout.replicate * product // (data or 1)}, or change or leave out the size"
        )
    return replace(layout, dp=dp // layout.replicate, pp=pp, tp=tp)

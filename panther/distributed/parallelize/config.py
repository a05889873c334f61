"""The settings from which a distributed model is built."""

__all__ = ["ParallelismConfig", "ParallelismSettings"]

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from panther._settings import Settings, kinds
from panther.distributed.parallelize.layout import Layout, fit_layout
from panther.distributed.parallelize.rules import check_rules
from panther.distributed.pipeline.balance import SCHEDULES
from panther.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParallelismSettings(Settings):
    """The settings that :class:`ParallelismConfig` and :class:`panther.train.TrainConfig` share."""

    _needs: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("powersgd_rank", "comm_hook", "powersgd"),
        ("powersgd_start_step", "comm_hook", "powersgd"),
        ("sketch_fraction", "comm_hook", "sketch"),
    )
    """Settings that need a value of another setting."""
    _may_be_zero: ClassVar[tuple[str, ...]] = ()

    tensor_parallel_size: int | None = None
    """Number of ranks that share each layer. None is 1; for the Trainer's strategy ``tp``, all ranks that remain."""

    pipeline_parallel_size: int | None = None
    """Number of ranks that a pipeline extends over. None is 1; for the Trainer's strategy ``pp``, all that remain."""

    data_parallel_size: int | None = None
    """Number of data-parallel ranks. None is the world size divided by the sizes of tensor and pipeline parallelism.
    Sizes that do not suit the number of processes are an error, also on one process."""

    data_parallel_replicate_size: int | None = None
    """For ``fsdp``, the number of replicas that the data-parallel ranks form. Each replica is sharded (hybrid
    sharding): with one replica a node, parameters are gathered within nodes, and only gradients travel between them.
    None is 1."""

    num_microbatches: int | None = None
    """Number of microbatches that a pipeline splits each batch into. None is ``pipeline_parallel_size``."""

    pipeline_layers: str | None = None
    """Name of the ModuleList between whose modules the model is split into stages. An nn.Sequential needs none."""

    mixed_precision: Literal["bf16", "fp16"] | None = None
    """Dtype of matrix products; parameters keep theirs, and None computes in it. A Trainer computes under autocast, and
    also scales the loss for ``fp16``."""

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass recomputes to save memory: nothing; everything except for products of dense layers and the
    2R inner numbers a row of sketched layers, by :func:`panther.distributed.inner_product_policy`; or whole blocks."""

    cpu_offload: bool = False
    """For ``fsdp`` and ``hybrid``, whether parameters, gradients and optimizer states are kept in the CPU's memory."""

    reshard_after_forward: bool = True
    """For ``fsdp`` and ``hybrid``, whether gathered parameters are freed after the forward pass and gathered again for
    backward (ZeRO-3). False keeps them until backward ends (ZeRO-2): less is sent, and more memory taken. Stages of a
    pipeline keep them for all microbatches in any case."""

    find_unused_parameters: bool = False
    """For DDP, whether a forward pass may leave some parameters unused."""

    bucket_cap_mb: float | None = None
    """For DDP, the size in megabytes of the buckets in which gradients are sent. None keeps torch's default."""

    comm_hook: Literal["fp16", "bf16", "powersgd", "sketch"] | None = None
    """How gradients are compressed before they are sent, for DDP between all ranks, and for ``fsdp`` with
    ``data_parallel_replicate_size`` between the replicas. None sends them unchanged."""

    powersgd_rank: int | None = None
    """For ``comm_hook="powersgd"``, the rank of the sent gradients. None is 4."""

    powersgd_start_step: int | None = None
    """For ``comm_hook="powersgd"``, the number of steps whose gradients are sent whole; at least 2. None is 10."""

    sketch_fraction: float | None = None
    """For ``comm_hook="sketch"``, the number of sums that are sent for each entry of the gradients. None is 0.1."""

    def __post_init__(self) -> None:
        """Convert and check every value."""
        super().__post_init__()
        for name, (kind, _) in kinds(type(self)).items():  # type: ignore[arg-type]
            value, minimum = getattr(self, name), 0 if name in self._may_be_zero else 1
            if kind is int and value is not None and value < minimum:
                raise ConfigError(f"{name}={value} must be at least {minimum}")
            if kind is float and value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} must be positive and finite")
        for name, needed, value in self._needs:
            setting, other = getattr(self, name), getattr(self, needed)
            if setting is not None and other != value:
                raise ConfigError(f"{name}={setting} needs {needed}={value!r}, not {other!r}: set both")
        if self.sketch_fraction is not None and self.sketch_fraction > 1:
            raise ConfigError(f"sketch_fraction={self.sketch_fraction} must be at most 1")
        if self.powersgd_start_step == 1:
            raise ConfigError("powersgd_start_step=1 must be at least 2, because DDP forms its buckets in the first")


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig(ParallelismSettings):
    """Settings of a distributed model, checked when the object is made and constant afterwards.

    Raises:
        ConfigError: If a name is unknown, a value has the wrong type or is out of range, or two settings contradict
            each other.

    Example:
        >>> ParallelismConfig(tensor_parallel_size=2).layout(8)
        Layout(dp=4, pp=1, tp=2, replicate=1, strategy='fsdp', schedule=None, num_microbatches=1)
        >>> ParallelismConfig(cpu_offload=True, data_parallel="ddp")
        Traceback (most recent call last):
        panther.errors.ConfigError: cpu_offload=True is for data_parallel='fsdp', not 'ddp', because it keeps shards \
in the CPU's memory: leave it out, or change data_parallel
    """

    data_parallel: Literal["fsdp", "replicate", "ddp"] | None = "fsdp"
    """Strategy of data parallelism, as for :func:`data_parallel`. None is for a single data-parallel rank, whose
    parameters stay as they are."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble"] = "1f1b"
    """Schedule of the pipeline, one of those of :func:`make_schedule`. For schedules with two stages a rank,
    ``num_microbatches`` is their number by default."""

    sample_input: Any = None
    """With ``pipeline_layers``, the inputs of one microbatch, a tensor or a tuple of tensors."""

    gradient_as_bucket_view: bool = False
    """For DDP, whether gradients are views of the buckets instead of copies."""

    def __post_init__(self) -> None:
        """Convert and check every value, and refuse settings that contradict each other."""
        super().__post_init__()
        check_rules(self)

    def layout(self, world: int) -> Layout:
        """Return the layout of the model over ``world`` ranks.

        Raises:
            ConfigError: If the sizes do not suit the number of ranks.
        """
        layout = fit_layout(
            Layout(replicate=self.data_parallel_replicate_size or 1, strategy=self.data_parallel),
            world,
            data=1 if self.data_parallel is None else self.data_parallel_size,
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
        )
        stages = layout.pp * SCHEDULES[self.schedule].stages_per_rank
        return layout.with_pipeline(self.schedule, self.num_microbatches or stages)

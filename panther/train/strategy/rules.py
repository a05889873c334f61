"""Which strategies a setting of the Trainer goes with, and which sizes of the axes with the number of processes."""

__all__ = ["Axes", "axes_of", "check_settings", "is_model_parallel", "possible_strategies"]

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from panther.errors import ConfigError

if TYPE_CHECKING:
    from panther.train.config import TrainConfig

_ALL = ("ddp", "zero1", "replicate", "fsdp", "tp", "pp", "hybrid")
_REPLICATED = ("ddp", "zero1")
_ON_FSDP2 = ("fsdp", "replicate", "tp", "pp", "hybrid")  # which goes together with sharded layers and stages
# A setting, the value that asks for nothing, and where it applies. torch's DistributedDataParallel has the first three,
# loses the parameters of sharded layers, and takes a pipeline's microbatches for steps.
_RULES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("find_unused_parameters", False, _REPLICATED),
    ("bucket_cap_mb", None, _REPLICATED),
    ("comm_hook", None, _REPLICATED),
    ("tensor_parallel_size", 1, _ON_FSDP2),
    ("pipeline_parallel_size", 1, _ON_FSDP2),
    ("data_parallel_replicate_size", 1, ("fsdp", "hybrid")),
    ("cpu_offload", False, ("fsdp", "hybrid")),
    ("reshard_after_forward", True, ("fsdp", "hybrid")),
    ("compile", False, (*_REPLICATED, "replicate", "fsdp")),
)
# A setting, the value that asks for nothing, a size that it does not go with, and why.
_PAIRS = (
    ("compile", False, "tensor_parallel_size", ""),
    ("compile", False, "pipeline_parallel_size", ""),
    ("reshard_after_forward", True, "pipeline_parallel_size", ", because stages stay gathered for all microbatches"),
    ("inside_sketched_layers", False, "tensor_parallel_size", ", because halves of a layer are not sharded"),
)
_PIPELINE = (
    ("num_microbatches", None), ("pipeline_layers", None), ("pipeline_schedule", "1f1b"),
    ("inside_sketched_layers", False),
)  # fmt: skip


def possible_strategies(config: "TrainConfig") -> tuple[str, ...]:
    """Return the strategies under which every setting applies, ``config.strategy`` aside."""
    found = [strategies for _, strategies in _asked(config)]
    return tuple(one for one in _ALL if all(one in strategies for strategies in found))


def check_settings(config: "TrainConfig") -> None:
    """Raise ConfigError if a setting does not apply under the strategy, or two need different ones.

    What was asked for is checked, not the number of processes: a script that runs on one runs on many.
    """
    asked = _asked(config)
    if config.strategy == "auto" and not possible_strategies(config):
        (first, one), (second, other) = next(
            (left, right) for left in asked for right in asked if not set(left[1]) & set(right[1])
        )
        raise ConfigError(
            f"{first} is for strategy={_listed(one)}, and {second} for {_listed(other)}: leave one of them out"
        )
    for setting, strategies in asked:
        if config.strategy not in ("auto", *strategies):
            raise ConfigError(
                f"{setting} is for strategy={_listed(strategies)}, not {config.strategy!r}: leave it out, or change "
                "the strategy"
            )
    for name, nothing, size, why in _PAIRS:
        chosen, value = getattr(config, name), getattr(config, size) or 1
        if value > 1 and chosen != nothing:
            raise ConfigError(f"{name}={chosen} and {size}={value} do not go together{why}: leave one out")
    if config.activation_checkpointing == "selective" and config.pipeline_schedule != "1f1b":
        from panther.distributed.pipeline.schedule_kinds import (
            SCHEDULES,  # here: settings alone do not need panther.distributed
        )

        if SCHEDULES[config.pipeline_schedule].splits_backward:
            raise ConfigError(
                f"activation_checkpointing='selective' and pipeline_schedule={config.pipeline_schedule!r} do not go "
                "together: torch saves selectively for one backward pass, and this schedule has two: use 'full', or "
                "another schedule"
            )
    for name, default in _PIPELINE:
        if getattr(config, name) != default and config.strategy != "pp" and (config.pipeline_parallel_size or 1) == 1:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is for pipelines: set strategy='pp' or pipeline_parallel_size"
            )


def is_model_parallel(config: "TrainConfig") -> bool:
    """Return whether layers are sharded or stages divided among ranks, as HybridParallelTrainer does."""
    return config.strategy in ("tp", "pp", "hybrid") or any(
        (size or 1) > 1 for size in (config.tensor_parallel_size, config.pipeline_parallel_size)
    )


class Axes(NamedTuple):
    """Numbers of ranks along the axes."""

    dp: int
    pp: int
    tp: int
    replicate: int
    """Replicas among the ranks of dp."""


def axes_of(config: "TrainConfig", world: int) -> Axes:
    """Return the sizes of the axes: those that are given, and for the strategy's own axis the ranks that remain.

    Raises:
        ConfigError: If they do not suit the number of processes, one process as well as many.
    """
    sizes = {name: getattr(config, f"{name}_parallel_size") for name in ("data", "pipeline", "tensor")}
    given = {f"{name}_parallel_size": size for name, size in sizes.items() if size is not None}
    own = {"tp": "tensor", "pp": "pipeline"}.get(config.strategy, "data")
    rest = own if sizes[own] is None else "data"
    open_ended = sizes[rest] is None or (config.strategy == "auto" and None in sizes.values())
    product = prod(given.values())
    if world % product or not (open_ended or product == world):
        total = f" = {product}" if len(given) > 1 else ""
        raise ConfigError(
            f"{' * '.join(f'{name}={size}' for name, size in given.items())}{total} must "
            f"{'divide' if open_ended else 'be'} the number of processes ({world}): start "
            f"{'a multiple of ' if open_ended else ''}{product}, or change or leave out "
            f"{'sizes' if len(given) > 1 else 'the size'}"
        )
    found = {name: size or 1 for name, size in sizes.items()}
    if sizes[rest] is None:
        found[rest] = world // product
    replicas = config.data_parallel_replicate_size or 1
    if found["data"] % replicas:
        raise ConfigError(
            f"data_parallel_replicate_size={replicas} must divide the number of data-parallel ranks ({found['data']}): "
            f"start a multiple of {replicas * product // (sizes['data'] or 1)}, or change or leave out the size"
        )
    return Axes(found["data"], found["pipeline"], found["tensor"], replicas)


def _asked(config: "TrainConfig") -> list[tuple[str, tuple[str, ...]]]:
    """Return the settings that are not for every strategy, and the strategies that they are for."""
    asked = []
    for name, nothing, strategies in _RULES:
        if (value := getattr(config, name)) not in (None, nothing):
            asked.append((f"{name}={value!r}", strategies))
    if config.mixed_precision == "fp16":  # sharded gradients have no common scale that GradScaler could find
        asked.append(("mixed_precision='fp16', which scales the loss ('bf16' does not),", _REPLICATED))
    return asked


def _listed(strategies: tuple[str, ...]) -> str:
    *most, last = map(repr, strategies)
    return f"{', '.join(most)} or {last}" if most else last

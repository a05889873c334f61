"""The settings that go together, as tables: of :class:`ParallelismConfig`, and of :class:`panther.train.TrainConfig`.

The strategies of a Trainer include the kinds of data parallelism of :class:`ParallelismConfig`, so that one table
serves both. A setting that a configuration does not have is skipped.
"""

__all__ = ["OF_PIPELINES", "check_rules", "possible_strategies"]

from collections.abc import Iterable
from itertools import combinations
from typing import Any, NamedTuple

from panther.distributed.pipeline.balance import SCHEDULES
from panther.errors import ConfigError

_STRATEGIES = ("ddp", "zero1", "replicate", "fsdp", "tp", "pp", "hybrid")
_ON_DDP = ("ddp", "zero1")
_ON_FSDP2 = ("fsdp", "replicate", "tp", "pp", "hybrid")  # DistributedDataParallel has neither shards nor stages
_SHARDED = ("fsdp", "hybrid")
_KINDS = ("fsdp", "replicate", "ddp")  # the strategies that are kinds of data parallelism


class _Rule(NamedTuple):
    """A setting that does not apply to every strategy."""

    setting: str
    default: Any
    """The value that asks for nothing."""
    strategies: tuple[str, ...]
    """The strategies to which other values apply."""
    reason: str = ""
    """Why other strategies do not have it, as a clause."""


_RULES = (
    _Rule("find_unused_parameters", False, _ON_DDP),
    _Rule("bucket_cap_mb", None, _ON_DDP),
    _Rule("gradient_as_bucket_view", False, _ON_DDP),
    _Rule("tensor_parallel_size", 1, _ON_FSDP2, "because DistributedDataParallel loses parameters of sharded layers"),
    _Rule("pipeline_parallel_size", 1, _ON_FSDP2, "because DistributedDataParallel takes microbatches for steps"),
    _Rule("data_parallel_replicate_size", 1, _SHARDED, "because it is the number of replicas of a sharded model"),
    _Rule("cpu_offload", False, _SHARDED, "because it keeps shards in the CPU's memory"),
    _Rule("reshard_after_forward", True, _SHARDED, "because only shards are gathered"),
    _Rule("compile", False, (*_ON_DDP, "replicate", "fsdp")),
)
_HOOK_ON_DDP = _Rule("comm_hook", None, _ON_DDP, "and for the replicas of 'fsdp' (data_parallel_replicate_size)")
_HOOK_ON_REPLICAS = _Rule("comm_hook", None, ("fsdp",), "because it reduces gradients between replicas")
# Of ParallelismConfig alone. A Trainer computes under autocast, and its sizes are checked with the number of processes.
_RULES_OF_CONFIG = (
    _Rule("data_parallel_size", 1, _KINDS),
    _Rule("mixed_precision", None, ("fsdp", "replicate"), "for which there is torch.autocast"),
)
# Sharded gradients have no common scale that GradScaler could find.
_RULE_OF_FP16 = _Rule("mixed_precision", None, _ON_DDP)

# A setting, the value that asks for nothing, a size above 1 that it does not go with, and why.
_EXCLUSIONS = (
    ("compile", False, "tensor_parallel_size", ""),
    ("compile", False, "pipeline_parallel_size", ""),
    ("reshard_after_forward", True, "pipeline_parallel_size", ", because stages stay gathered for all microbatches"),
    ("comm_hook", None, "tensor_parallel_size", ", because it reduces the gradients of complete layers"),
    ("comm_hook", None, "pipeline_parallel_size", ", because it reduces the gradients of a complete model"),
)
# The same for settings of pipelines alone, beside the schedule.
OF_PIPELINES: dict[str, Any] = {"num_microbatches": None, "pipeline_layers": None}


def possible_strategies(config: Any) -> tuple[str, ...]:
    """Return the strategies under which every setting applies, except for the strategy that is set."""
    applied = _applied_rules(config)
    return tuple(strategy for strategy in _STRATEGIES if all(strategy in rule.strategies for _, rule in applied))


def check_rules(config: Any) -> None:
    """Raise ConfigError if a setting does not apply to the strategy, or if two settings exclude each other.

    The settings are checked, not the number of processes: a script that runs on one process runs on many.
    """
    applied = _applied_rules(config)
    is_trainer = _is_trainer(config)
    choice, order = ("strategy", "pipeline_schedule") if is_trainer else ("data_parallel", "schedule")
    strategy, schedule = getattr(config, choice), getattr(config, order)
    for (first, rule), (second, other) in combinations(applied, 2) if strategy == "auto" else ():
        if not set(rule.strategies) & set(other.strategies):
            raise ConfigError(
                f"{first} is for strategy={_listed(rule.strategies)}, and {second} for {_listed(other.strategies)}: "
                "leave one of them out"
            )
    for text, rule in applied:
        # Without data parallelism, layers and stages may still be divided among ranks.
        if (strategy or "tp") not in ("auto", *rule.strategies):
            names = [name for name in rule.strategies if is_trainer or name in _KINDS]
            reason = f", {rule.reason}" if rule.reason else ""
            raise ConfigError(
                f"{text} is for {choice}={_listed(names)}, not {strategy!r}{reason}: leave it out, or change "
                f"{'the strategy' if is_trainer else choice}"
            )
    for name, default, size, reason in _EXCLUSIONS:
        value, ranks = getattr(config, name, default), getattr(config, size) or 1
        if ranks > 1 and value != default:
            raise ConfigError(f"{name}={value} and {size}={ranks} do not go together{reason}: leave one out")
    if config.activation_checkpointing == "selective" and SCHEDULES[schedule].splits_backward:
        raise ConfigError(
            f"activation_checkpointing='selective' and {order}={schedule!r} do not go together: torch saves "
            "selectively for one backward pass, and this schedule has two: use 'full', or another schedule"
        )
    if strategy != "pp" and (config.pipeline_parallel_size or 1) == 1:
        for name, default in {**OF_PIPELINES, order: "1f1b"}.items():
            if (value := getattr(config, name)) != default:
                way = "strategy='pp' or " if is_trainer else ""
                raise ConfigError(f"{name}={value!r} is for pipelines: set {way}pipeline_parallel_size")


def _is_trainer(config: Any) -> bool:
    return hasattr(config, "strategy")


def _applied_rules(config: Any) -> list[tuple[str, _Rule]]:
    """Return the rules of the settings that ask for something, each with its setting in words."""
    hook_rule = _HOOK_ON_REPLICAS if (config.data_parallel_replicate_size or 1) > 1 else _HOOK_ON_DDP
    rules = (hook_rule, *_RULES) if _is_trainer(config) else (hook_rule, *_RULES, *_RULES_OF_CONFIG)
    values = ((rule, getattr(config, rule.setting, rule.default)) for rule in rules)
    applied = [(f"{rule.setting}={value!r}", rule) for rule, value in values if value not in (None, rule.default)]
    if _is_trainer(config) and config.mixed_precision == "fp16":
        applied.append(("mixed_precision='fp16', which scales the loss ('bf16' does not),", _RULE_OF_FP16))
    return applied


def _listed(values: Iterable[str]) -> str:
    *most, last = map(repr, values)
    return f"{', '.join(most)} or {last}" if most else last

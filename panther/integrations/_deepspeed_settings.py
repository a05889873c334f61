"""Make the configuration for DeepSpeed, from a TrainConfig or DeepSpeed's own settings, and check it on every rank."""

__all__ = ["checked_settings"]

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panther.errors import ConfigError
from panther.files import read_json
from panther.train import TrainConfig

_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Settings that only panther.train.Trainer implements. Settings of the loop, such as epochs, are not refused.
_REFUSED = {
    "compile": "call engine.compile() instead",
    "comm_hook": "set communication_data_type in a configuration of DeepSpeed's own",
    "tensor_parallel_size": "use panther.train.Trainer",
    "pipeline_parallel_size": "use panther.train.Trainer",
    "activation_checkpointing": "call torch.utils.checkpoint in the model",
}


def checked_settings(config: Any, world_size: int, has_optimizer: bool) -> dict[str, Any]:
    """Return a configuration for DeepSpeed as a new dictionary.

    Args:
        config: A TrainConfig, a dictionary of DeepSpeed's settings, or the path of a JSON file with such a dictionary.
        world_size: Number of processes, which divide a batch.
        has_optimizer: Whether the caller passes an optimizer to DeepSpeed.

    Raises:
        ConfigError: If ``config`` has a different type, batch sizes do not fit the number of processes, or a setting of
            the TrainConfig has no counterpart.
    """
    settings = _from_train_config(config, has_optimizer) if isinstance(config, TrainConfig) else _read_settings(config)
    _check_batches(settings, world_size)
    zero = settings.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if stage not in (0, 1, 2, 3):  # DeepSpeed would treat any other value as 0
        raise ConfigError(f"zero_optimization.stage={stage!r} must be 0, 1, 2 or 3")
    return settings


def _read_settings(config: Any) -> dict[str, Any]:
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        try:
            config = read_json(path)
        except FileNotFoundError:
            raise ConfigError(f"the configuration {path} does not exist: give the path of DeepSpeed's JSON") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(
            "config must be a TrainConfig, a dictionary of DeepSpeed's settings or the path of its JSON file, not a "
            f"{type(config).__name__}"
        )
    return copy.deepcopy(dict(config))


def _from_train_config(config: TrainConfig, has_optimizer: bool) -> dict[str, Any]:
    defaults = TrainConfig()
    for name, instead in _REFUSED.items():
        value = getattr(config, name)
        if value != getattr(defaults, name) and value is not None and (value is True or value != 1):
            raise ConfigError(f"{name}={value!r} has no counterpart in DeepSpeed: {instead}")
    stage = _stage(config)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1 << 30,  # DeepSpeed's default prints a line every tenth step
    }
    if config.gradient_clipping is not None:
        settings["gradient_clipping"] = config.gradient_clipping
    if config.mixed_precision == "bf16":
        settings["bf16"] = {"enabled": True}
    elif config.mixed_precision == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 0}
        if config.scaler_init_scale is not None:
            settings["fp16"]["initial_scale_power"] = round(math.log2(config.scaler_init_scale))
        if config.scaler_growth_interval is not None:
            settings["fp16"]["loss_scale_window"] = config.scaler_growth_interval
    if config.cpu_offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
        # This allows every optimizer on the CPU, including torch's optimizers, which need no compiler.
        settings["zero_force_ds_cpu_optimizer"] = False
    if not has_optimizer:
        rate = {} if config.learning_rate is None else {"lr": config.learning_rate}
        # DeepSpeed's AdamW would compile C++ at the start; torch_adam selects torch's AdamW.
        settings["optimizer"] = {"type": "AdamW", "params": {**rate, "torch_adam": True}}
    return settings


def _stage(config: TrainConfig) -> int:
    """Return the stage of ZeRO for a strategy of the Trainer."""
    if config.strategy == "fsdp":
        return 3 if config.reshard_after_forward else 2
    stages = {"ddp": 0, "auto": 1, "zero1": 1}
    if config.strategy not in stages:
        raise ConfigError(
            f"strategy={config.strategy!r} has no counterpart in DeepSpeed: use 'ddp' for stage 0, 'zero1' for stage "
            "1, 'fsdp' for stage 3, and 'fsdp' with reshard_after_forward=False for stage 2"
        )
    return stages[config.strategy]


def _check_batches(settings: Mapping[str, Any], world_size: int) -> None:
    """Raise unless the global batch is each rank's batch times the number of ranks, which DeepSpeed only asserts."""
    batch_sizes = {name: settings[name] for name in _BATCHES if settings.get(name) not in (None, "auto")}
    for name, value in batch_sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number from 1")
    total, micro, accumulation = (batch_sizes.get(name) for name in _BATCHES)
    if total is None and micro is None:
        raise ConfigError(
            "the configuration has no batch size: set train_micro_batch_size_per_gpu, the batch size of one process, "
            "or batch_size in a TrainConfig"
        )
    if total is None:
        return
    each = (micro or 1) * (accumulation or 1) * world_size
    is_complete = micro is not None and accumulation is not None
    if total != each if is_complete else total % each:
        parts = f"train_micro_batch_size_per_gpu={micro or 1} x gradient_accumulation_steps={accumulation or 1}"
        raise ConfigError(
            f"train_batch_size={total} does not fit {world_size} process{'es' if world_size > 1 else ''} of {parts}, "
            f"which make {each}: set two of the three and leave the third out, or start a different number of processes"
        )

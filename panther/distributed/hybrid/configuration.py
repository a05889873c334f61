"""Check the parallelism_config of a HybridParallelTrainer, and build the layers of its model_config."""

__all__ = ["checked_config", "layers_of"]

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from panther._setting_names import name_hint, value_hint
from panther.distributed._layer_configs import check_configs
from panther.distributed.comm.mesh import get_world_size
from panther.distributed.data.strategies import STRATEGIES, compute_dtype
from panther.distributed.pipeline.schedule_kinds import SCHEDULES, check_schedule
from panther.distributed.tensor.activation_checkpoint import CHECKPOINTED
from panther.distributed.tensor.styles import ColwiseSKParallel
from panther.errors import ConfigError, DistributedError, ShapeError, check_size
from panther.nn import SKLinear


def checked_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with its defaults, or raise if it is not valid."""
    defaults = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": None,
        "data_parallel_replicate_size": 1,
        "num_microbatches": None,
        "schedule": "1f1b",
        "gradient_clipping": None,
        "data_parallel": "fsdp",
        "mixed_precision": None,
        "activation_checkpointing": "none",
        "cpu_offload": False,
        "reshard_after_forward": True,
        "pipeline_layers": None,
        "sample_input": None,
        "inside_sketched_layers": False,
    }
    if not isinstance(settings, Mapping):
        raise TypeError(f"parallelism_config must be a mapping of names to values, not {type(settings).__name__}")
    if unknown := [key for key in settings if key not in defaults]:
        hint = name_hint(str(unknown[0]), defaults, "parallelism_config")
        raise ConfigError(f"{unknown[0]!r} is not a setting of parallelism_config: {hint}")
    config: dict[str, Any] = defaults | dict(settings)
    tp = check_size("tensor_parallel_size", config["tensor_parallel_size"], least=1)
    pp = check_size("pipeline_parallel_size", config["pipeline_parallel_size"], least=1)
    if config["data_parallel_size"] is None:
        config["data_parallel_size"] = max(get_world_size() // (tp * pp), 1)
    check_size("data_parallel_size", config["data_parallel_size"], least=1)
    check_schedule(config["schedule"])
    per_rank = SCHEDULES[config["schedule"]].stages_per_rank
    if config["num_microbatches"] is None:
        config["num_microbatches"] = pp * per_rank
    config["num_microbatches"] = check_size("num_microbatches", config["num_microbatches"], least=1)
    clipping = config["gradient_clipping"]
    if clipping is not None and not isinstance(clipping, int | float):
        raise TypeError(f"gradient_clipping must be a number or None, not {type(clipping).__name__}")
    if clipping is not None and not clipping > 0:
        raise ValueError(f"gradient_clipping={clipping} must be positive, or None")
    if config["data_parallel"] not in STRATEGIES:
        hint = value_hint("data_parallel", config["data_parallel"], STRATEGIES, "parallelism_config")
        raise ConfigError(f"data_parallel={config['data_parallel']!r} is unknown: {hint}")
    recomputed, kinds = config["activation_checkpointing"], ("none", *CHECKPOINTED)
    if recomputed not in kinds:
        hint = value_hint("activation_checkpointing", recomputed, kinds, "parallelism_config")
        raise ConfigError(f"activation_checkpointing={recomputed!r} is unknown: {hint}")
    if recomputed == "selective" and pp > 1 and SCHEDULES[config["schedule"]].splits_backward:
        raise ValueError(
            f"activation_checkpointing='selective' and schedule={config['schedule']!r} do not go together: torch saves "
            "selectively for one backward pass, and this schedule has two: use 'full', or another schedule"
        )
    replicas = check_size("data_parallel_replicate_size", config["data_parallel_replicate_size"], least=1)
    if config["data_parallel_size"] % replicas:
        raise ShapeError(
            f"data_parallel_replicate_size={replicas} must divide data_parallel_size={config['data_parallel_size']}"
        )
    if replicas > 1 and config["data_parallel"] != "fsdp":
        raise ValueError(
            f"data_parallel_replicate_size={replicas} is for data_parallel='fsdp', not {config['data_parallel']!r}, "
            "which does not shard: leave it out"
        )
    if not config["reshard_after_forward"] and pp > 1:
        raise ValueError(
            f"reshard_after_forward=False and pipeline_parallel_size={pp} do not go together, because stages stay "
            "gathered for all microbatches: leave one out"
        )
    for name in ("cpu_offload", "reshard_after_forward", "inside_sketched_layers"):
        if not isinstance(config[name], bool):
            raise TypeError(f"{name}={config[name]!r} must be True or False")
    if config["inside_sketched_layers"] and (pp == 1 or tp > 1):
        why = "is for pipelines: set pipeline_parallel_size"
        if tp > 1:
            why = f"and tensor_parallel_size={tp} do not go together, because halves of a layer are not sharded"
        raise ValueError(f"inside_sketched_layers=True {why}, or leave it out")
    for name, default in (("cpu_offload", False), ("reshard_after_forward", True)):
        if config[name] is not default and config["data_parallel"] != "fsdp":
            raise ValueError(
                f"{name}={config[name]} is for data_parallel='fsdp', not {config['data_parallel']!r}, which does not "
                "shard: leave it out"
            )
    if compute_dtype(config["mixed_precision"]) and config["data_parallel"] == "ddp":
        raise ValueError("mixed_precision is for data_parallel='fsdp' or 'replicate': with 'ddp' use torch.autocast")
    for axis, size, why in (
        ("tensor_parallel_size", tp, "loses the parameters of sharded layers"),
        ("pipeline_parallel_size", pp, "fails in the second step, because it takes microbatches for steps"),
    ):
        if config["data_parallel"] == "ddp" and size > 1:
            raise DistributedError(
                f"data_parallel='ddp' and {axis} > 1 do not go together: DistributedDataParallel {why}: use 'fsdp' or "
                "'replicate'"
            )
    return config


def layers_of(model_config: Mapping[str, Any]) -> tuple[nn.Sequential, dict[str, ParallelStyle] | None]:
    """Build the layers, and return them with the styles of the layers to shard, or None if no layer has the key."""
    if not isinstance(model_config, Mapping):
        raise TypeError(f"model_config must be a module or a mapping, not {type(model_config).__name__}")
    if set(model_config) != {"layers"}:
        keys = ", ".join(map(str, model_config)) or "none"
        raise ValueError(f"model_config must be a module or have the key 'layers', and has {keys}")
    layers = model_config["layers"]
    sizes = check_configs(layers, optional=("tensor_parallel",))
    model = nn.Sequential(*(SKLinear(*layer_sizes) for layer_sizes in sizes))
    if not any("tensor_parallel" in layer for layer in layers):
        return model, None
    for index, layer in enumerate(layers):
        if not isinstance(flag := layer.get("tensor_parallel", False), bool):
            raise TypeError(f"layers[{index}]['tensor_parallel']={flag!r} must be True or False")
    gathered = ColwiseSKParallel(output_layouts=Replicate())
    return model, {str(index): gathered for index, layer in enumerate(layers) if layer.get("tensor_parallel")}

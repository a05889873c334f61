"""Distribute a model over the ranks by the strategy of the configuration, and make its optimizer."""

__all__ = ["set_up"]

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from panther.distributed import (
    ClusterSpec,
    HybridParallelTrainer,
    ModelStats,
    checkpoint,
    data_parallel,
    get_distributed_info,
    get_rank,
    get_world_size,
    make_mesh,
    materialize_,
    plan_parallelism,
)
from panther.distributed.advisor.cost_model import Layout
from panther.distributed.comm._agreement import run_on_all_ranks, run_on_first_rank
from panther.distributed.comm.nodes import physical_memory
from panther.distributed.data.blocks import fsdp_blocks
from panther.distributed.data.gradient_compression import follow_loss_scale
from panther.distributed.data.strategies import compute_dtype
from panther.distributed.tensor.activation_checkpoint import checkpoint_blocks_
from panther.errors import ConfigError
from panther.train.batches import count_samples
from panther.train.config import TrainConfig
from panther.train.coordination import GradientCarrier
from panther.train.engines import Engine, ModelEngine, PipelineEngine, loss_of_output
from panther.train.optimizer import Optimizer, groups_by_name, make_optimizer
from panther.train.strategy_rules import Axes, axes_of, possible_strategies

_MODEL_PARALLEL = ("tp", "pp", "hybrid")


def set_up(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Tensor] | None,
    config: TrainConfig,
    sample_batch: Callable[[], Any],
) -> tuple[Engine, torch.optim.Optimizer]:
    """Distribute a model over the ranks, and make its optimizer.

    The arguments are those of a Trainer. ``sample_batch`` returns a batch, for the advisor, and for pipelines whose
    model has to be traced.

    Raises:
        ConfigError: If the settings contradict each other, or do not suit the number of ranks or the model.
    """
    world = get_world_size()
    axes_of(config, world)  # before the advisor is asked
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if config.initial_weights is not None:
        model = _with_layers_of(config.initial_weights, model, is_empty, optimizer)
    config = _with_strategy(model, config, loss_fn, sample_batch)
    axes = axes_of(config, world)
    strategy = "single" if world == 1 else config.strategy
    divided = strategy != "single" and _is_model_parallel(config)
    if world > 1:
        device = get_distributed_info().device
    elif torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu") if is_empty else next(model.parameters()).device
    groups = groups_by_name(optimizer, model)  # before the parameters become other objects
    # In place, as Module.to is: the names noted above stay those of these parameters.
    fills_shards = is_empty and (divided or strategy in ("fsdp", "replicate"))
    fill = partial(materialize_, weights=config.initial_weights, seed=config.seed)
    if not is_empty:
        model.to(device)
    elif not fills_shards:
        fill(model, device=device)
    if not divided:  # else after layers are sharded, which looks for pairs of them
        checkpoint_blocks_(model, fsdp_blocks(model), config.activation_checkpointing)
    common: dict[str, Any] = {
        "loss_fn": loss_fn,
        "device": device,
        "autocast_dtype": compute_dtype(config.mixed_precision),
    }
    engine: Engine
    if divided:
        shards = fill if fills_shards else None
        engine = _model_parallel_engine(model, config, axes, sample_batch, common, shards)
    else:
        if config.compile:
            # In place, so that names of parameters get no prefix.
            model.compile()
        if strategy in ("ddp", "zero1"):
            options: dict[str, Any] = {} if config.bucket_cap_mb is None else {"bucket_cap_mb": config.bucket_cap_mb}
            options["find_unused_parameters"] = config.find_unused_parameters
            # No copy of the gradients: less memory, and steps of 5 ms are 2 % shorter.
            options["gradient_as_bucket_view"] = True
            hooks = ("powersgd_rank", "powersgd_start_step", "topk_fraction")
            options |= {name: getattr(config, name) for name in hooks if getattr(config, name) is not None}

            def wrap(module: nn.Module) -> DistributedDataParallel:
                return data_parallel(module, comm_hook=config.comm_hook, **options)

            if config.comm_hook is None and not config.find_unused_parameters:
                model, common["carrier"] = GradientCarrier.wrap(model, wrap)
            else:
                model = wrap(model)
        elif strategy != "single":
            options = {"mixed_precision": config.mixed_precision}
            if strategy == "fsdp":
                options["cpu_offload"] = config.cpu_offload
            if not config.reshard_after_forward:
                # FSDP2's own default keeps what is in no block; True would gather that twice.
                options["reshard_after_forward"] = False
            mesh = None
            if axes.replicate > 1:
                mesh = make_mesh(replicate=axes.replicate, dp=world // axes.replicate)
            model = data_parallel(model, mesh, strategy, **options)
            if fills_shards:
                fill(model, device="cpu" if config.cpu_offload else device)
        scaler = torch.amp.GradScaler(
            device.type,
            # torch's own defaults, which it has in its signature only.
            init_scale=config.scaler_init_scale or 2.0**16,
            growth_interval=config.scaler_growth_interval or 2000,
            enabled=config.mixed_precision == "fp16",
        )
        follow_loss_scale(model, partial(scaler.scale, torch.ones((), device=device)))
        engine = ModelEngine(model=model, rank=get_rank(), size=world, scaler=scaler, **common)
    made = make_optimizer(optimizer, groups, _named_parameters(engine), shard_state=strategy == "zero1")
    if isinstance(made, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times a step, which a Trainer does not: use AdamW or SGD")
    scaling = {"none": 1.0, "sqrt": engine.size**0.5, "linear": float(engine.size)}[config.learning_rate_scaling]
    for group in made.param_groups:
        group["lr"] = (config.learning_rate or group["lr"]) * scaling
    return engine, made


def _with_layers_of(weights: str, model: nn.Module, is_empty: bool, optimizer: Optimizer) -> nn.Module:
    """Return the model with the compressed layers of a folder, which are sharded as those of the model are."""
    if not is_empty:
        raise ConfigError(
            f"initial_weights={weights!r} is for a model on the meta device, and this one has values: build it in a "
            "function, and pass that as the model"
        )
    before = set(model.parameters())
    model = run_on_all_ranks(lambda: checkpoint.restore_architecture(weights, model), None)
    if isinstance(optimizer, torch.optim.Optimizer) and before != set(model.parameters()):
        raise ConfigError(
            f"initial_weights={weights!r} has compressed layers in the place of some that the optimizer was made of: "
            "pass a function of parameters, such as torch.optim.AdamW"
        )
    return model


def _with_strategy(model: nn.Module, config: TrainConfig, loss_fn: Any, sample_batch: Callable[[], Any]) -> TrainConfig:
    """Return the configuration with a strategy in place of ``"auto"``: the advisor's, for these ranks and their memory.

    A model that the advisor cannot read is replicated, with a warning that says why.
    """
    world, possible = get_world_size(), possible_strategies(config)
    if config.strategy != "auto" or world == 1:
        return config
    settled = dataclasses.replace(config, cluster_file=None)  # which is for "auto"
    if _is_model_parallel(config):
        return dataclasses.replace(settled, strategy="hybrid")
    layout, reason = None, "which the other settings ask for"
    if "ddp" in possible and "fsdp" not in possible:
        chosen = dataclasses.replace(settled, strategy="ddp")
    elif "replicate" not in possible:
        chosen = dataclasses.replace(settled, strategy="fsdp")
    else:
        layout, failure = run_on_first_rank(lambda: _advised_layout(model, config, loss_fn, sample_batch), None)
        if failure is not None:
            warnings.warn(
                f"strategy='auto' uses 'ddp', because the advisor cannot read the model: {failure}",
                UserWarning,
                stacklevel=4,
            )
        chosen = dataclasses.replace(settled, strategy="ddp") if layout is None else _with_layout(settled, layout)
        reason = "as the advisor cannot read the model" if layout is None else f"the advisor's choice: {layout}"
    if get_rank() == 0:
        print(f"strategy='auto' uses {chosen.strategy!r}, {reason}", file=sys.stderr)
    return chosen


def _with_layout(config: TrainConfig, layout: Layout) -> TrainConfig:
    """Return the configuration that builds a layout of the advisor."""
    sizes: dict[str, Any] = {"strategy": layout.strategy or "tp"}
    if layout.tp > 1:
        sizes["tensor_parallel_size"] = layout.tp
    if layout.replicate > 1:
        sizes["data_parallel_replicate_size"] = layout.replicate
    return dataclasses.replace(config, **sizes)


def _advised_layout(
    model: nn.Module, config: TrainConfig, loss_fn: Any, sample_batch: Callable[[], Any]
) -> tuple[Layout | None, str | None]:
    """Return the fastest layout without stages that fits, or None and why there is none.

    Tensor parallelism comes last even where it would be faster: its ranks see the same samples, and n processes should
    see n times as many as one, whatever layout is chosen.
    """
    info, batch = get_distributed_info(), sample_batch()
    # Set by torchrun and panther launch; without it all ranks are on one node.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))
    on_gpu = info.device.type == "cuda"
    memory = torch.cuda.get_device_properties(info.device).total_memory if on_gpu else physical_memory() / local
    sizes: dict[str, Any] = {"gpus": get_world_size(), "memory_bytes": memory, "gpus_per_node": local}
    if config.cluster_file is not None:
        cluster = _measured_cluster(config.cluster_file, sizes)
    else:
        cluster = ClusterSpec(**sizes) if on_gpu else ClusterSpec.preset("cpu", **sizes)
    try:
        stats = ModelStats.of(
            model,
            batch if loss_fn is None else batch[0],
            loss_fn=loss_of_output if loss_fn is None else None,
            mixed_precision=config.mixed_precision,
        )
        plan = plan_parallelism(stats, cluster, batch=count_samples(batch) * get_world_size())
    except Exception as error:  # a forward may do anything; ddp runs all that one process can run
        return None, f"{type(error).__name__}: {error}"
    options = [option for option in plan.options if option.layout.pp == 1]
    options.sort(key=lambda option: (not option.fits, option.layout.tp > 1))  # stable: the fastest stay first
    return options[0].layout if options else None, None


def _measured_cluster(file: str, sizes: dict[str, Any]) -> ClusterSpec:
    """Return the speeds of a file for the ranks and the memory that there are."""
    try:
        return ClusterSpec.load(file, **sizes)
    except OSError as error:
        raise ConfigError(
            f"cluster_file={file!r} cannot be read ({error.strerror}): write it with `panther advise --measure {file}`"
        ) from None
    except ValueError as error:
        raise ConfigError(f"cluster_file: {error}") from error


def _is_model_parallel(config: TrainConfig) -> bool:
    """Return whether layers are sharded or stages divided among ranks, as HybridParallelTrainer does."""
    return config.strategy in _MODEL_PARALLEL or any(
        (size or 1) > 1 for size in (config.tensor_parallel_size, config.pipeline_parallel_size)
    )


def _model_parallel_engine(
    model: nn.Module,
    config: TrainConfig,
    axes: Axes,
    sample_batch: Callable[[], Any],
    common: dict[str, Any],
    fill: Callable[..., Any] | None,
) -> Engine:
    """Combine tensor and pipeline parallelism, with data parallelism over the remaining ranks.

    ``common`` has the arguments of every engine; ``fill`` gives shards of a model on the meta device their values.
    """
    settings: dict[str, Any] = {
        "tensor_parallel_size": axes.tp,
        "pipeline_parallel_size": axes.pp,
        "data_parallel_size": axes.dp,
        "data_parallel_replicate_size": axes.replicate,
        "cpu_offload": config.cpu_offload,
        "reshard_after_forward": config.reshard_after_forward,
        "data_parallel": "replicate" if config.strategy == "replicate" else "fsdp",
        "mixed_precision": config.mixed_precision,
        "activation_checkpointing": config.activation_checkpointing,
        "schedule": config.pipeline_schedule,
    }
    if axes.pp > 1:
        if common["loss_fn"] is None:
            raise ConfigError("a pipeline needs loss_fn, which its last stage calls")
        settings["inside_sketched_layers"] = config.inside_sketched_layers
        settings["num_microbatches"] = num_microbatches = config.num_microbatches or axes.pp
        if config.pipeline_layers is not None:
            data = sample_batch()
            inputs = data[0] if isinstance(data[0], tuple | list) else (data[0],)
            settings["pipeline_layers"] = config.pipeline_layers
            # A stage is traced on one microbatch, the shape that it will run on.
            settings["sample_input"] = tuple(x[: len(x) // num_microbatches].to(common["device"]) for x in inputs)
    parallel = HybridParallelTrainer(model, settings)
    if fill is not None:
        fill(parallel.model, device="cpu" if config.cpu_offload else common["device"])
    common |= {
        "rank": parallel.dp_rank,
        "size": dist.get_world_size(parallel.dp_group),
        "group": parallel.dp_group,
        "reports_loss": parallel.mesh["tp"].get_local_rank() == 0,
    }
    if axes.pp == 1:
        return ModelEngine(model=parallel.model, **common)
    stages = [stage.submod for stage in parallel.stages]
    return PipelineEngine(model=stages, stages=axes.pp, parallel=parallel, **common)


def _named_parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by their names in the model that the user built."""
    named = {}
    for module in engine.modules():
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for name, parameter in inner.named_parameters():
            named[name.replace("_checkpoint_wrapped_module.", "")] = parameter  # of activation checkpointing
    return named

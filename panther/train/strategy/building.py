"""Distribute a model over the ranks by the strategy of the configuration, and make its optimizer."""

__all__ = ["named_parameters", "set_up"]

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from panther.distributed import (
    checkpoint,
    data_parallel,
    get_distributed_info,
    get_rank,
    get_world_size,
    make_mesh,
)
from panther.distributed.comm.agreement import run_on_all_ranks
from panther.distributed.data.gradient_compression import follow_loss_scale
from panther.distributed.data.sharded_blocks import fsdp_blocks
from panther.distributed.data.strategies import compute_dtype
from panther.distributed.tensor.activation_checkpoint import checkpoint_blocks_
from panther.errors import ConfigError
from panther.train.config import TrainConfig
from panther.train.coordination.step_exchange import GradientCarrier
from panther.train.engines.engine import Engine
from panther.train.engines.model_engine import ModelEngine
from panther.train.engines.pipeline_engine import PipelineEngine
from panther.train.loading.feed import Feed
from panther.train.optimization.optimizer import Optimizer, make_optimizer, note_optimizer, set_learning_rate
from panther.train.optimization.trainable import reduced_parameters
from panther.train.strategy.automatic import choose_strategy
from panther.train.strategy.rules import Axes, axes_of, is_model_parallel


def set_up(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Tensor] | None,
    config: TrainConfig,
    feed: Callable[[], Feed],
    loss_weight: Callable[[Any], Any] | str | int | None = None,
) -> tuple[Engine, torch.optim.Optimizer]:
    """Distribute a model over the ranks, and make its optimizer.

    The arguments are those of a Trainer. ``feed`` returns the training data as one process sees it, for the advisor,
    and for pipelines whose model has to be traced.

    Raises:
        ConfigError: If the settings contradict each other, or do not suit the number of ranks or the model.
    """
    world = get_world_size()
    axes_of(config, world)  # before the advisor is asked
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if config.initial_weights is not None:
        model = _with_layers_of(config.initial_weights, model, is_empty, optimizer)
    batch_factor = 1
    if config.strategy == "auto" and world > 1:
        config, batch_factor = choose_strategy(model, config, loss_fn, feed)
    axes = axes_of(config, world)
    strategy = "single" if world == 1 else config.strategy
    divided = strategy != "single" and is_model_parallel(config)
    if world > 1:
        device = get_distributed_info().device
    elif torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu") if is_empty else next(model.parameters()).device
    if strategy not in ("single", "ddp", "zero1"):
        _check_dense_gradients(model, strategy)
    noted = note_optimizer(optimizer, model)  # before the parameters become other objects
    # In place, as Module.to is: the names noted above stay those of these parameters.
    fills_shards = is_empty and (divided or strategy in ("fsdp", "replicate"))
    fill = partial(_materialize, weights=config.initial_weights, seed=config.seed)
    if not is_empty:
        model.to(device)
    elif not fills_shards:
        fill(model, device=device)
    if not divided:  # else after layers are sharded, which looks for pairs of them
        checkpoint_blocks_(model, fsdp_blocks(model), config.activation_checkpointing)
    common: dict[str, Any] = {
        "loss_fn": loss_fn,
        "loss_weight": loss_weight,
        "device": device,
        "autocast_dtype": compute_dtype(config.mixed_precision),
        "batch_factor": batch_factor,
    }
    engine: Engine
    if divided:
        shards = fill if fills_shards else None
        engine = _model_parallel_engine(model, config, axes, feed, common, shards)
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
                parallel = data_parallel(module, comm_hook=config.comm_hook, **options)
                common["reduced"] = reduced_parameters(parallel)  # here, because the carrier's is among them now
                return parallel

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
    trained = make_optimizer(optimizer, noted, named_parameters(engine), strategy=strategy, stages=engine.stages)
    batches = engine.size * batch_factor
    scaling = {"none": 1.0, "sqrt": batches**0.5, "linear": float(batches)}[config.learning_rate_scaling]
    # All are computed before any is set: a tensor may be the rate of several groups.
    rates = [float(config.learning_rate or group["lr"]) * scaling for group in trained.param_groups]
    for group, rate in zip(trained.param_groups, rates, strict=True):
        set_learning_rate(group, rate)
    if config.learning_rate is not None or scaling != 1.0:
        # Of groups that a callback adds without a rate of their own.
        trained.defaults["lr"] = float(config.learning_rate or trained.defaults.get("lr", rates[0] / scaling)) * scaling
    return engine, trained


def _check_dense_gradients(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError if the gradients of an embedding are sparse, which FSDP2 cannot send."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"the {type(module).__name__} {name!r} has sparse=True, and strategy={strategy!r} cannot send sparse "
                "gradients: make it with sparse=False, or use strategy='ddp'"
            )


def _materialize(model: nn.Module, **settings: Any) -> None:
    from panther.distributed import materialize_  # here, because what reads checkpoints is slow to import

    materialize_(model, **settings)


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


def _model_parallel_engine(
    model: nn.Module,
    config: TrainConfig,
    axes: Axes,
    feed: Callable[[], Feed],
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
            data = feed().first_batch()
            inputs = data[0] if isinstance(data[0], tuple | list) else (data[0],)
            settings["pipeline_layers"] = config.pipeline_layers
            # A stage is traced on one microbatch, the shape that it will run on.
            settings["sample_input"] = tuple(x[: len(x) // num_microbatches].to(common["device"]) for x in inputs)
    from panther.distributed import HybridParallelTrainer  # here, because torch's pipelines are slow to import

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


def named_parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by their names in the model that the user built."""
    named = {}
    for module in engine.modules():
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for name, parameter in inner.named_parameters():
            named[name.replace("_checkpoint_wrapped_module.", "")] = parameter  # of activation checkpointing
    return named

"""Distribute a model over the ranks by the strategy of the configuration, and make its optimizer."""

__all__ = ["layout_of", "named_parameters", "set_up"]

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from panther._torch import parameters_of
from panther.distributed import checkpoint, get_distributed_info, get_world_size
from panther.distributed.comm.agreement import run_on_all_ranks
from panther.distributed.data.strategies import compute_dtype, fsdp_blocks
from panther.distributed.parallelize.build import parallelize
from panther.distributed.parallelize.config import ParallelismConfig, ParallelismSettings
from panther.distributed.parallelize.layout import Layout, fit_layout
from panther.distributed.parallelize.rules import OF_PIPELINES
from panther.distributed.tensor.activation_checkpoint import checkpoint_blocks_
from panther.errors import ConfigError
from panther.nn.io import unwrapped
from panther.train.config import TrainConfig
from panther.train.engines.engine import Engine
from panther.train.engines.model_engine import ModelEngine
from panther.train.engines.pipeline_engine import PipelineEngine
from panther.train.loading.feed import Feed
from panther.train.optimization.optimizer import Optimizer, make_optimizer, names_in_optimizer, set_learning_rate
from panther.train.strategy.automatic import choose_strategy


def set_up(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Tensor] | None,
    config: TrainConfig,
    feed: Callable[[], Feed],
    loss_weight: Callable[[Any], Any] | str | int | None = None,
) -> tuple[Engine, torch.optim.Optimizer]:
    """Distribute a model over the ranks, and make its optimizer, by the arguments of a Trainer.

    ``feed`` returns the training data as one process sees it.
    """
    world = get_world_size()
    layout_of(config, world)  # before the advisor is asked
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if config.initial_weights is not None:
        model = _with_layers_of(config.initial_weights, model, is_empty, optimizer)
    batch_factor = 1
    if config.strategy == "auto" and world > 1:
        config, batch_factor = choose_strategy(model, config, loss_fn, feed)
    strategy = "single" if world == 1 else config.strategy
    if world > 1:
        device = get_distributed_info().device
    elif torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu") if is_empty else next(model.parameters()).device
    is_sharded = strategy not in ("single", "ddp", "zero1")
    if strategy != "single":
        _check_embeddings(model, strategy, is_sharded)
    names = names_in_optimizer(optimizer, model)  # before the parameters become other objects
    # In place, as Module.to is: the names above stay those of these parameters.
    fill = partial(_materialize, weights=config.initial_weights, seed=config.seed)
    if not is_empty:
        model.to(device)
    elif not is_sharded:
        fill(model, device=device)
    common: dict[str, Any] = {
        "loss_fn": loss_fn,
        "loss_weight": loss_weight,
        "device": device,
        "autocast_dtype": compute_dtype(config.mixed_precision),
        "batch_factor": batch_factor,
    }
    if config.compile:
        # In place, so that names of parameters get no prefix. Torch compiles at the first call.
        model.compile()
    engine: Engine
    if strategy == "single":
        checkpoint_blocks_(model, fsdp_blocks(model), config.activation_checkpointing)
        engine = ModelEngine(model=model, scaler=_loss_scaler(config, device), **common)
    else:
        engine = _distribute(model, config, layout_of(config, world), feed, common)
        if is_empty and is_sharded:
            fill(engine.model, device="cpu" if config.cpu_offload else device)
        if engine.stages == 1 and not config.compile:
            _refuse_writes(engine.model, strategy)
    trained = make_optimizer(optimizer, names, named_parameters(engine), strategy=strategy, stages=engine.stages)
    batches = engine.size * batch_factor
    scaling = {"none": 1.0, "sqrt": batches**0.5, "linear": float(batches)}[config.learning_rate_scaling]
    # All are computed before any is set: a tensor may be the rate of several groups.
    rates = [float(config.learning_rate or group["lr"]) * scaling for group in trained.param_groups]
    for group, rate in zip(trained.param_groups, rates, strict=True):
        set_learning_rate(group, rate)
    if config.learning_rate is not None or scaling != 1.0:
        # A callback may add a group without a rate, which gets this one.
        trained.defaults["lr"] = float(config.learning_rate or trained.defaults.get("lr", rates[0] / scaling)) * scaling
    return engine, trained


def layout_of(config: TrainConfig, world: int) -> Layout:
    """Return the layout over ``world`` processes: the sizes that are set, the rest on the strategy axis."""
    sizes = {
        "data": config.data_parallel_size,
        "tensor": config.tensor_parallel_size,
        "pipeline": config.pipeline_parallel_size,
    }
    axis = {"tp": "tensor", "pp": "pipeline"}.get(config.strategy, "data")
    layout = fit_layout(
        Layout(
            replicate=config.data_parallel_replicate_size or 1,
            strategy={"ddp": "ddp", "zero1": "ddp", "replicate": "replicate"}.get(config.strategy, "fsdp"),
        ),
        world,
        **sizes,
        free=axis if sizes[axis] is None else "data",
        can_grow=config.strategy == "auto" and None in sizes.values(),
    )
    return layout.with_pipeline(config.pipeline_schedule, config.num_microbatches or layout.pp)


def _check_embeddings(model: nn.Module, strategy: str, is_sharded: bool) -> None:
    """Raise ConfigError if an embedding has a setting that the strategy cannot reproduce."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        subject = f"the {type(module).__name__} {name!r}"
        if module.sparse and is_sharded:
            raise ConfigError(
                f"{subject} has sparse=True, and strategy={strategy!r} cannot send sparse gradients: make it with "
                "sparse=False, or use strategy='ddp'"
            )
        if module.max_norm is not None or module.scale_grad_by_freq:
            setting = "scale_grad_by_freq=True" if module.max_norm is None else f"max_norm={module.max_norm}"
            raise ConfigError(
                f"{subject} has {setting}, which each rank would apply to its own samples only: make it without, and "
                "limit all rows after each step, in a callback"
            )


def _refuse_writes(model: nn.Module, strategy: str) -> None:
    """Let the first forward raise ConfigError if a module changes a parameter of its own in it.

    Each rank would change it for its own samples, and a change of gathered shards would be lost.
    """
    values: dict[nn.Module, list[tuple[str, Tensor, Tensor]]] = {}
    handles = []

    def note(module: nn.Module, _: Any) -> None:
        trained = {key: p for key, p in parameters_of(module).items() if p is not None and p.requires_grad}
        values[module] = [(key, p, p.detach().clone()) for key, p in trained.items()]

    def compare(name: str, module: nn.Module, *_: Any) -> None:
        for key, p, value in values.pop(module, ()):
            if not torch.equal(p.detach(), value) and not value.isnan().any():
                raise ConfigError(
                    f"the {key} of the {type(module).__name__} {name!r} was changed inside its forward, which "
                    f"strategy={strategy!r} cannot reproduce: change it after each step, in a callback"
                )

    for name, module in unwrapped(model).named_modules():
        if parameters_of(module):
            handles.append(module.register_forward_pre_hook(note))
            # Before FSDP's hook, which frees the gathered parameters.
            handles.append(module.register_forward_hook(partial(compare, name), prepend=True))
    handles.append(model.register_forward_hook(lambda *_: [handle.remove() for handle in handles] and None))


def _materialize(model: Any, **settings: Any) -> None:
    from panther.distributed import materialize_  # here, because what reads checkpoints is slow to import

    materialize_(model, **settings)


def _with_layers_of(weights: str, model: nn.Module, is_empty: bool, optimizer: Optimizer) -> nn.Module:
    """Return the model with the compressed layers of a folder, which are sharded as those of the model are."""
    if not is_empty:
        raise ConfigError(
            f"initial_weights={weights!r} is for a model on the meta device, and this one has values: build it in a "
            "function, and pass that as the model"
        )
    parameters = set(model.parameters())
    model = run_on_all_ranks(lambda: checkpoint.restore_architecture(weights, model), None)
    if isinstance(optimizer, torch.optim.Optimizer) and parameters != set(model.parameters()):
        raise ConfigError(
            f"initial_weights={weights!r} has compressed layers in the place of some that the optimizer was made of: "
            "pass a function of parameters, such as torch.optim.AdamW"
        )
    return model


def _distribute(
    model: nn.Module, config: TrainConfig, layout: Layout, feed: Callable[[], Feed], common: dict[str, Any]
) -> Engine:
    """Distribute the model by the layout, and return its engine; ``common`` has the arguments of every engine."""
    settings = _parallelism_settings(config, layout)
    if layout.pp > 1:
        if common["loss_fn"] is None:
            raise ConfigError("a pipeline needs loss_fn, which its last stage calls: pass loss_fn to the Trainer")
        if config.pipeline_layers is not None:
            data = feed().first_batch()
            inputs = data[0] if isinstance(data[0], tuple | list) else (data[0],)
            # A stage is traced on one microbatch, the shape that it will run on.
            settings["sample_input"] = tuple(
                x[: len(x) // layout.num_microbatches].to(common["device"]) for x in inputs
            )
    parallel = parallelize(model, ParallelismConfig(**settings))
    if layout.strategy == "ddp":
        wrapped: Any = parallel.model
        common["reduced"] = _reduced_parameters(wrapped)
    data_group, tensor_group = parallel.groups
    common |= {
        "rank": dist.get_rank(data_group),
        "size": dist.get_world_size(data_group),
        "group": data_group,
        "reports_loss": tensor_group is None or dist.get_rank(tensor_group) == 0,
    }
    if layout.pp > 1:
        stages = [stage.submod for stage in parallel.stages]
        return PipelineEngine(model=stages, stages=layout.pp, parallel=parallel, **common)
    return ModelEngine(model=parallel.model, scaler=_loss_scaler(config, common["device"]), **common)


def _reduced_parameters(model: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters whose gradients DDP averages, in the order of DDP."""
    ignored = model.parameters_to_ignore
    trained = [name for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    return [name.replace("_checkpoint_wrapped_module.", "") for name in trained]


def _parallelism_settings(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """Return the settings of :class:`ParallelismConfig` for the layout and the configuration."""
    shared = {field.name: getattr(config, field.name) for field in fields(ParallelismSettings)}
    # With strategy="pp", settings of pipelines may be set although one rank remains for it.
    settings = shared | ({} if layout.pp > 1 else OF_PIPELINES) | layout.settings()
    if layout.strategy == "ddp":
        # Autocast computes in other dtypes. Without copies of the gradients, steps of 5 ms are 2 % shorter.
        settings |= {"mixed_precision": None, "gradient_as_bucket_view": True}
    return settings


def _loss_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler:
    """Return the scaler of the loss, which is disabled for dtypes other than fp16."""
    return torch.amp.GradScaler(
        device.type,
        # torch's own defaults, which it has in its signature only.
        init_scale=config.scaler_init_scale or 2.0**16,
        growth_interval=config.scaler_growth_interval or 2000,
        enabled=config.mixed_precision == "fp16",
    )


def named_parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by their names in the model that the user built."""
    parameters = {}
    for module in engine.modules():
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        for name, parameter in inner.named_parameters():
            parameters[name.replace("_checkpoint_wrapped_module.", "")] = parameter  # of activation checkpointing
    return parameters

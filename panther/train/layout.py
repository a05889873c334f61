"""From a model and a configuration to an engine and an optimizer: which strategy, on which ranks."""

__all__ = ["Built", "build", "choose_strategy"]

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from panther.distributed import (
    ClusterSpec,
    HybridParallelTrainer,
    ModelStats,
    data_parallel,
    get_distributed_info,
    get_rank,
    get_world_size,
    plan_parallelism,
)
from panther.distributed.advisor.cost_model import Layout
from panther.distributed.data.blocks import fsdp_blocks as blocks_of
from panther.errors import ConfigError
from panther.train.config import TrainConfig
from panther.train.control import on_first
from panther.train.engines import Engine, PipelineEngine, WholeEngine, own_loss

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_CUT = ("tp", "pp", "hybrid")
_DEFAULT_RATE = 1e-3

Optimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None


@dataclass
class Built:
    """What trains."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    scaler: Any
    strategy: str


def build(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Tensor] | None,
    config: TrainConfig,
    sample: Callable[[], Any],
) -> Built:
    """Spread a model over the ranks, and make its optimizer.

    Args:
        model: Built alike on every rank.
        optimizer: Made from the model's parameters, or a function of parameters, or None for AdamW.
        loss_fn: As for the trainer.
        config: The settings.
        sample: Gives a batch, for pipelines whose model has to be traced.

    Raises:
        ConfigError: If the settings do not go together, or do not fit the world or the model.
    """
    world = get_world_size()
    config = choose_strategy(model, config, loss_fn, sample)
    strategy = "single" if world == 1 else config.strategy
    _check(config, strategy, world, loss_fn)
    device = get_distributed_info().device if world > 1 else _device_of(model)
    recipe = _recipe(optimizer, model)
    model.to(device)
    _checkpoint_activations(model, config.activation_checkpointing)
    precision = _DTYPES[config.precision]
    scaler = torch.amp.GradScaler(device.type) if config.precision == "fp16" else None
    if strategy in _CUT:
        engine = _cut(model, loss_fn, config, strategy, sample, device, precision)
    else:
        if config.compile:
            model.compile()
        whole = model if strategy == "single" else _copied(model, config, strategy)
        engine = WholeEngine(
            whole, loss_fn, device=device, rank=get_rank(), size=world, precision=precision, scaler=scaler
        )
    made = recipe(_named(engine), strategy == "zero1", config.learning_rate)
    if isinstance(made, torch.optim.LBFGS):
        raise ConfigError("LBFGS evaluates the loss several times a step, which a Trainer does not: use AdamW or SGD")
    rate = {"none": 1.0, "sqrt": engine.size**0.5, "linear": float(engine.size)}[config.learning_rate_scaling]
    for group in made.param_groups:
        group["lr"] = group["lr"] * rate
    return Built(engine, made, scaler, strategy)


def choose_strategy(model: nn.Module, config: TrainConfig, loss_fn: Any, sample: Callable[[], Any]) -> TrainConfig:
    """The configuration with a strategy instead of ``"auto"``: the advisor's, for this world and its memory.

    A model that the advisor cannot read is copied, and a warning says why.
    """
    world = get_world_size()
    if config.strategy != "auto" or world == 1:
        return config
    if config.tensor_parallel_size or config.pipeline_parallel_size:
        return dataclasses.replace(config, strategy="hybrid")
    layout, why = on_first(lambda: _advised(model, config, loss_fn, sample))
    if why is not None:
        warnings.warn(
            f"strategy='auto' is 'ddp', for the advisor cannot read the model: {why}", UserWarning, stacklevel=4
        )
    if layout is None or (layout.dp == world and layout.strategy == "ddp"):
        return dataclasses.replace(config, strategy="ddp")
    if layout.tp == 1:
        return dataclasses.replace(config, strategy="fsdp")
    return dataclasses.replace(
        config, strategy="hybrid", tensor_parallel_size=layout.tp, data_parallel_size=layout.dp * layout.replicate
    )


def _advised(
    model: nn.Module, config: TrainConfig, loss_fn: Any, sample: Callable[[], Any]
) -> tuple[Layout | None, str | None]:
    """The fastest layout without stages that fits, and that cuts layers only if no other does; or why there is none.

    Cut layers see the same samples, and n processes should see n times as many as one, whoever chose their layout.
    """
    info, batch = get_distributed_info(), sample()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))
    if info.device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(info.device).total_memory)
        cluster = ClusterSpec(gpus=get_world_size(), memory_bytes=memory, gpus_per_node=local)
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local
        cluster = ClusterSpec.preset("cpu", get_world_size(), memory_bytes=memory, gpus_per_node=local)
    try:
        stats = ModelStats.of(
            model,
            batch if loss_fn is None else batch[0],
            loss=own_loss if loss_fn is None else None,
            mixed_precision=_DTYPES[config.precision],
        )
        samples = next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        plan = plan_parallelism(stats, cluster, batch=samples * get_world_size())
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    options = [option for option in plan.options if option.layout.pp == 1]
    options.sort(key=lambda option: (not option.fits, option.layout.tp > 1))  # the order is that of time, and stable
    return options[0].layout if options else None, None


def _check(config: TrainConfig, strategy: str, world: int, loss_fn: Any) -> None:
    if strategy in _CUT and config.precision == "fp16":
        raise ConfigError(f"precision='fp16' and strategy={strategy!r} do not go together: use 'bf16'")
    if strategy in ("fsdp", "replicate") and config.precision == "fp16":
        raise ConfigError(f"precision='fp16' scales losses, which strategy={strategy!r} does not know: use 'bf16'")
    if config.comm_hook and strategy not in ("ddp", "zero1", "single"):
        raise ConfigError(f"comm_hook={config.comm_hook!r} is for strategy='ddp', not {strategy!r}")
    if strategy in _CUT and config.compile:
        raise ConfigError(f"compile=True and strategy={strategy!r} do not go together: leave it out")
    if (
        strategy in ("pp", "hybrid")
        and (config.pipeline_parallel_size or 2) > 1
        and loss_fn is None
        and strategy == "pp"
    ):
        raise ConfigError("a pipeline needs loss_fn, which its last stage calls")
    if config.data_parallel_size and strategy not in _CUT and config.data_parallel_size != world:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} must be the world size ({world}) with "
            f"strategy={strategy!r}: leave it out, or use 'hybrid'"
        )


def _copied(model: nn.Module, config: TrainConfig, strategy: str) -> nn.Module:
    if strategy in ("ddp", "zero1"):
        options: dict[str, Any] = {"find_unused_parameters": config.find_unused_parameters}
        if config.bucket_cap_mb is not None:
            options["bucket_cap_mb"] = config.bucket_cap_mb
        return data_parallel(model, comm_hook=config.comm_hook, **options)
    return data_parallel(model, strategy=strategy)


def _cut(
    model: nn.Module,
    loss_fn: Any,
    config: TrainConfig,
    strategy: str,
    sample: Callable[[], Any],
    device: torch.device,
    precision: torch.dtype | None,
) -> Engine:
    """Layers cut over ranks, stages, and data parallelism over what is left."""
    world = get_world_size()
    tp = config.tensor_parallel_size or (world if strategy == "tp" else 1)
    pp = config.pipeline_parallel_size or (world if strategy == "pp" else 1)
    if world % (tp * pp):
        raise ConfigError(
            f"tensor_parallel_size * pipeline_parallel_size = {tp} * {pp} must divide the world size ({world})"
        )
    dp = config.data_parallel_size or world // (tp * pp)
    settings: dict[str, Any] = {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": dp,
        "schedule": config.pipeline_schedule,
    }
    if pp > 1:
        if loss_fn is None:
            raise ConfigError("a pipeline needs loss_fn, which its last stage calls")
        microbatches = config.pipeline_microbatches or pp
        settings["num_microbatches"] = microbatches
        if config.pipeline_layers is not None:
            data = sample()
            inputs = data[0] if isinstance(data[0], tuple | list) else (data[0],)
            settings["pipeline_layers"] = config.pipeline_layers
            settings["sample_input"] = tuple(x[: len(x) // microbatches].to(device) for x in inputs)
    built = HybridParallelTrainer(model, settings)
    if pp > 1:
        return PipelineEngine(
            built,
            loss_fn,
            device=device,
            microbatches=settings["num_microbatches"],
            precision=precision,
        )
    mesh = built.mesh
    return WholeEngine(
        built.model,
        loss_fn,
        device=device,
        rank=mesh["dp"].get_local_rank(),
        size=mesh["dp"].size(),
        speaks=mesh["tp"].get_local_rank() == 0,
        precision=precision,
        group=built.dp_group,
    )


def _device_of(model: nn.Module) -> torch.device:
    """Where a model in one process is, or the GPU that it should be on."""
    found = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else found


def _named(engine: Engine) -> dict[str, nn.Parameter]:
    """This rank's parameters by their names in the model as the user built it."""
    named = {}
    for module in engine.modules():
        inside = module.module if isinstance(module, DistributedDataParallel) else module
        for name, parameter in inside.named_parameters():
            named[name.replace("_checkpoint_wrapped_module.", "")] = parameter
    return named


def _shared_out(parameters: Any, kind: Any, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer whose states are shared out over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles old functions, which takes a while

    return ZeroRedundancyOptimizer(parameters, kind, **settings)


def _recipe(optimizer: Optimizer, model: nn.Module) -> Callable[[dict[str, nn.Parameter], bool, float | None], Any]:
    """How to make the optimizer once the model is spread: its parameters may be other objects by then."""
    if not isinstance(optimizer, torch.optim.Optimizer):

        def fresh(named: dict[str, nn.Parameter], shared: bool, rate: float | None) -> Any:
            trained = [parameter for parameter in named.values() if parameter.requires_grad]
            if optimizer is not None:
                if shared:
                    return _at_rate(_shared_out(trained, optimizer), rate)
                made = optimizer(trained)
                return _at_rate(made, rate)
            rate = rate or _DEFAULT_RATE
            if shared:
                return _shared_out(trained, torch.optim.AdamW, lr=rate)
            return torch.optim.AdamW(trained, rate)

        return fresh
    if optimizer.state:
        raise ConfigError("the optimizer has taken steps already: give a new one, or resume from a checkpoint")
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise ConfigError("the optimizer has parameters that are not the model's: make it from model.parameters()")
        own = [names[parameter] for parameter in group["params"]]
        groups.append(({key: value for key, value in group.items() if key not in ("params", "param_names")}, own))

    def again(named: dict[str, nn.Parameter], shared: bool, rate: float | None) -> Any:
        rebuilt = []
        for settings, own in groups:
            here = [named[name] for name in own if name in named]  # the others are in other stages
            if here:
                rebuilt.append({**settings, "params": here})
        kind = type(optimizer)
        defaults = {key: value for key, value in optimizer.defaults.items()}
        if shared:
            return _at_rate(_shared_out(rebuilt, kind, **defaults), rate)
        if all(any(p is q for q in named.values()) for g in optimizer.param_groups for p in g["params"]):
            return _at_rate(optimizer, rate)
        return _at_rate(kind(rebuilt, **defaults), rate)

    return again


def _at_rate(optimizer: torch.optim.Optimizer, rate: float | None) -> torch.optim.Optimizer:
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate
    return optimizer


def _checkpoint_activations(model: nn.Module, kind: str) -> None:
    """Compute blocks again in backward: as a whole, or all but their products of matrices."""
    if kind == "none":
        return
    blocks = set(blocks_of(model))
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing={kind!r} needs blocks, the elements of a ModuleList or nn.Sequential, and the "
            "model has none"
        )

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, **options),
        check_fn=lambda module: module in blocks,
    )


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

"""Sketched models on Horovod: equal sketches by their seeds, compressed gradients, metrics averaged over processes.

Horovod is unmaintained: the last release, 0.28.1, is of 2023. Its ``broadcast_parameters`` would send the record of a
seed without changing the sketch, because seeded sketches are not in the state_dict. This module sets the seeds.
"""

__all__ = ["DistributedOptimizer", "broadcast_model", "metric_average"]

import hashlib
import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from panther._version import __version__
from panther.distributed.comm.agreement import LAYER, difference_error
from panther.distributed.sync.replicas import describe_tensors
from panther.distributed.sync.sketches import describe_layer, drawing_modules, sketch_ids, sketched_layers
from panther.errors import ConfigError, MissingExtraError, check_version, require_extra

try:
    hvd: Any = require_extra("horovod.torch", "horovod")
except MissingExtraError:
    raise MissingExtraError(
        "horovod is needed here and is not installed: build it with docs/howto/scripts/build_horovod.sh ENVIRONMENT, "
        "because no package of it works with this torch"
    ) from None
check_version("horovod", require_extra("horovod", "horovod").__version__, 0, least=(0, 28))

_COMPRESSIONS = ("none", "fp16")


def broadcast_model(model: nn.Module, root_rank: int = 0) -> None:
    """Send the sketches, parameters and buffers of one process to all processes. Every process must call it.

    The models are compared first. Seeded sketches are sent as seeds, and fitted sketches with the parameters. Horovod
    is initialised if it is not yet.

    Args:
        model: The model, built in the same way on every process.
        root_rank: The process that sends its model.

    Raises:
        SketchMismatchError: On every process, if the sketched layers differ in more than their seeds.
        DistributedError: On every process, if models or versions differ.
        ConfigError: If ``root_rank`` is not a rank.

    Cost: a gather of 8 bytes a process, 8 bytes a seeded layer, and the parameters and buffers once.

    Example:
        >>> import panther as pr
        >>> from panther.integrations.horovod import broadcast_model
        >>> broadcast_model(pr.nn.SKLinear(64, 64, 2))
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, not a {type(model).__name__}: build it first")
    _init()
    _check_same(model, root_rank)  # root_rank is compared too, so that every process raises the next error
    if not isinstance(root_rank, int) or not 0 <= root_rank < hvd.size():
        raise ConfigError(f"root_rank={root_rank!r} must be one of the {hvd.size()} ranks, from 0")
    layers, drawing = sketched_layers(model), drawing_modules(model)
    states = {name: module.get_extra_state() for name, module in drawing.items()}
    seeds, states = hvd.broadcast_object(
        ([layer.seed for layer in layers.values()], states), root_rank, name="panther.seeds"
    )
    for layer, seed in zip(layers.values(), seeds, strict=True):
        if seed is not None:
            layer.set_seeded_(seed)
    for name, state in states.items():
        drawing[name].set_extra_state(state)
    # Buffers that are seeded sketches or records of seeds are equal on all processes now.
    equal = sketch_ids(model)
    tensors = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if id(b) not in equal)]
    hvd.broadcast_parameters([(name, tensor.data) for name, tensor in tensors], root_rank)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, *, compression: str = "none", root_rank: int = 0, **options: Any
) -> Any:
    """Return Horovod's optimizer, which averages gradients, after sending one model and optimizer state to all ranks.

    Args:
        optimizer: The optimizer of the model's parameters.
        model: The model, with sketched layers or without; see :func:`broadcast_model`.
        compression: ``"fp16"`` sends gradients in 16 bits, half of the bytes of float32; ``"none"`` does not convert.
        root_rank: The process that sends its model and optimizer state.
        **options: Further arguments of ``horovod.torch.DistributedOptimizer``, such as ``backward_passes_per_step``.

    Raises:
        ConfigError: If ``compression`` is unknown or ``named_parameters`` is given. :func:`broadcast_model` can raise
            further errors.

    Example:
        >>> import torch, panther as pr
        >>> from panther.integrations.horovod import DistributedOptimizer
        >>> model = pr.nn.SKLinear(64, 64, 2)
        >>> optimizer = DistributedOptimizer(
        ...     torch.optim.AdamW(model.parameters()), model, compression="fp16"
        ... )
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch optimizer, not a {type(optimizer).__name__}: make it first")
    if compression not in _COMPRESSIONS:
        raise ConfigError(f"compression={compression!r} is unknown: use 'none' or 'fp16'")
    if "named_parameters" in options:
        raise ConfigError("named_parameters are taken from the model: leave them out")
    broadcast_model(model, root_rank)
    # Horovod's broadcast_optimizer_state takes a step to create the state, in which AdamW would decay the weights.
    state = hvd.broadcast_object(optimizer.state_dict(), root_rank, name="panther.optimizer")
    if hvd.rank() != root_rank:
        optimizer.load_state_dict(state)
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        **options,
    )


def metric_average(value: float | Tensor, name: str) -> float:
    """Return the mean of a number over the processes. Every process must call it with the same name.

    Args:
        value: A number, or a tensor with one element.
        name: Name of the metric, by which Horovod finds the calls that belong together.

    Raises:
        ConfigError: If the value is not one number.
    """
    number = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    if number.numel() != 1:
        raise ConfigError(
            f"{name} must be one number, not a tensor of shape {tuple(number.shape)}: take its mean first"
        )
    _init()
    return hvd.allreduce(number.reshape(1), name=f"panther.metric.{name}").item()


def _init() -> None:
    """Initialise Horovod, with a limit for waiting for processes that do not call, which Horovod does not have."""
    if not hvd.is_initialized():
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "300")
        hvd.init()


def _check_same(model: nn.Module, root_rank: int) -> None:
    """Compare the models of all processes, because a broadcast between different models would wait without a limit."""
    layers = {f"{LAYER}{name!r}": describe_layer(layer) for name, layer in sketched_layers(model).items()}
    versions = {"Panther's version": __version__, "torch's version": torch.__version__, "root_rank": str(root_rank)}
    described = layers | describe_tensors(model) | versions
    digest = hashlib.blake2b(json.dumps(list(described.items())).encode(), digest_size=7).digest()
    local_digest = torch.tensor([int.from_bytes(digest)], dtype=torch.int64)
    if len(set(hvd.allgather(local_digest, name="panther.digests").tolist())) == 1:
        return
    by_rank = dict(enumerate(hvd.allgather_object(described, name="panther.models")))
    raise difference_error(by_rank, "models", "build the same model on every rank")

"""The norm of a gradient that is sharded over ranks. A norm costs one all-reduce of one number."""

__all__ = ["clip_gradients", "gradient_norm", "scale_gradients"]

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def gradient_norm(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None, stages: int = 1
) -> Tensor:
    """Return the Euclidean norm of the gradient of a whole model of ``stages`` stages, the same number on every rank.

    If gradients are sharded or belong to other stages, every rank must call it; replicated gradients send nothing.
    Partial gradients, for example with torch's SequenceParallel, are sent completely.
    """
    parameters = list(parameters)
    by_shards: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            shards, local = _local(gradient)
            by_shards[shards].append(local)
    device = next(map(_sends_on, parameters), torch.device("cpu"))
    sharded = stages > 1 or any(isinstance(parameter, DTensor) for parameter in parameters)
    if not sharded:
        gradients = by_shards.get(1, [])
        return _norm(gradients) if gradients else torch.zeros((), device=device)
    copies = dist.get_world_size(group) // stages
    square = torch.zeros((), dtype=torch.float64, device=device)  # squares of large float32 norms overflow
    for shards, gradients in by_shards.items():  # each rank that has a shard counts it
        square += _norm(gradients).double() ** 2 * shards / copies
    dist.all_reduce(square, group=group)
    return square.sqrt()


def _norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of tensors, in float64 where squares or the norm overflow in their dtype."""
    norm = get_total_norm(gradients)
    if norm.isinf():
        norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float64)) for x in gradients]
        norm = torch.stack([x.to(norm.device) for x in norms]).norm()
    return norm


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients so that their norm, from :func:`gradient_norm`, is at most ``max_norm``; nothing is sent."""
    parameters = list(parameters)
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            # The norm is a plain tensor, and torch does not multiply a DTensor by a plain tensor.
            shard = parameter.grad.to_local()
            shard.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(shard.device))
        elif parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(parameter.grad.device))
    plain = [p for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor) and not p.grad.is_sparse]
    clip_grads_with_norm_(plain, max_norm, norm)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply gradients, sharded or not, by a number that is equal on all ranks; nothing is sent."""
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


def _sends_on(parameter: nn.Parameter) -> torch.device:
    """Return the device on which gradients of a parameter are sent: the GPU also if it is offloaded to the CPU."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def _local(gradient: Tensor) -> tuple[int, Tensor]:
    """Return the number of shards of a gradient, and the shard of this rank."""
    if not isinstance(gradient, DTensor):
        # Embeddings with sparse=True have sparse gradients. Rows that occur several times are added up first.
        return 1, gradient.coalesce().values() if gradient.is_sparse else gradient
    if any(placement.is_partial() for placement in gradient.placements):  # norm layers in a sharded sequence
        placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=placements)
    axes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in axes if not placement.is_replicate()), gradient.to_local()

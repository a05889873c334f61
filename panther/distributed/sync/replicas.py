"""Give every rank the same model: compare the models of all ranks, then broadcast the first one's."""

__all__ = ["broadcast_model", "check_same_model", "describe_library", "describe_tensors", "send_model"]

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from panther._version import __version__
from panther.distributed.comm._agreement import agree, in_words
from panther.distributed.comm._diagnostics import watched
from panther.distributed.comm._ranks import name_ranks, ranks_of
from panther.distributed.sync.sketches import describe_source, send_sketches
from panther.errors import DistributedError
from panther.nn._sketched import SketchedModule


def describe_tensors(model: nn.Module) -> dict[str, str]:
    """Describe a model's tensors by name; sketches have descriptions of their own."""
    described = {"model": type(model).__name__}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        skipped = (*module.sketch_names, "sketch_seed") if isinstance(module, SketchedModule) else ()
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in skipped:
                trained = "trained" if parameter.requires_grad else "frozen"
                described[f"parameter '{dot}{name}'"] = f"{trained} {_in_short(parameter)}"
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in skipped:
                described[f"buffer '{dot}{name}'"] = _in_short(buffer)
    return described


def describe_library() -> dict[str, str]:
    """Describe the settings of a whole process that change its results."""
    # Different versions may draw, pack or split differently without any error.
    return {
        "Panther's version": __version__,
        "torch's version": torch.__version__,
        "the default dtype": str(torch.get_default_dtype()),
        "use_deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }


def _in_short(tensor: torch.Tensor) -> str:
    placed = f" sharded as {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{placed}"


def broadcast_model(
    model: nn.Module,
    group: dist.ProcessGroup,
    what: str = "broadcast_model",
    settings: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Give every rank the sketches, parameters and buffers of the group's first rank.

    Ranks compare models and settings first, in one exchange: a broadcast between different models would hang, or mix
    their tensors.

    Args:
        model: Built equally on every rank.
        group: The ranks.
        what: The public call that does this, for errors.
        settings: Checks the arguments of the call, and returns those that must be equal on every rank. If it raises on
            one rank, all raise.

    Raises:
        DistributedError: On every rank, before anything is changed, if models, settings or versions differ, or a tensor
            is sharded over the ranks.
        SketchMismatchError: On every rank, if sketched layers differ.
    """
    check_same_model(model, group, what, settings)
    send_model(model, group, what)


def send_model(model: nn.Module, group: dist.ProcessGroup, what: str) -> None:
    """Broadcast a model after :func:`check_same_model` has compared it between ranks."""
    src = dist.get_process_group_ranks(group)[0]
    with watched(what, group):
        send_sketches(model, src, group)
        # Sketches are buffers or parameters too, but equal now: seeded ones were drawn from one seed, others sent.
        layers = [module for module in model.modules() if isinstance(module, SketchedModule)]
        sent = {id(getattr(layer, name)) for layer in layers for name in (*layer.sketch_names, "sketch_seed")}
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) in sent:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            dist.broadcast(local.detach(), src, group=group)


def _check_replicated(model: nn.Module, ranks: list[int]) -> None:
    """Raise if tensors are sharded over the ranks: a broadcast would replace every shard by the first one."""
    named = (*model.named_parameters(), *model.named_buffers())
    sharded = [name for name, tensor in named if isinstance(tensor, DTensor) and _is_sharded_over(tensor, ranks)]
    if sharded:
        more = f" and {len(sharded) - 1} more" if len(sharded) > 1 else ""
        raise DistributedError(
            f"parameters must be replicated, and {sharded[0]!r}{more} are sharded over {name_ranks(ranks)} already: "
            "use the model as it is, or build a new one"
        )


def _is_sharded_over(tensor: DTensor, ranks: list[int]) -> bool:
    mesh = tensor.device_mesh
    # Shards along another axis of the mesh, whose ranks are not in this group, are equal on all of its ranks.
    return any(
        not placement.is_replicate() and len({*ranks}.intersection(dist.get_process_group_ranks(mesh.get_group(i)))) > 1
        for i, placement in enumerate(tensor.placements)
    )


def check_same_model(
    model: nn.Module, group: dist.ProcessGroup | None, what: str, settings: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Compare models, settings and versions between ranks; see :func:`broadcast_model`."""

    def describe() -> dict[str, str]:
        given = in_words(settings())
        ranks = ranks_of(group)
        _check_replicated(model, ranks)
        layers = describe_source(model, ranks[0], group)
        return {**layers, **describe_tensors(model), **given, **describe_library()}

    fix = "build the same model and pass the same arguments on every rank"
    agree(what, describe, group, fix, "models or settings")

"""Give every rank the same model: compare what the ranks built, then broadcast the first one's."""

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
from panther.distributed.sync.sketches import describe_source, send_sketches, verify_sketches
from panther.errors import DistributedError
from panther.nn._sketched import SketchedModule


def describe_tensors(model: nn.Module) -> dict[str, str]:
    """Names, shapes, dtypes and kinds of a model's tensors, but for sketches, which have descriptions of their own."""
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
    """What is set for a whole process and changes what ranks compute."""
    return {
        "Panther's version": __version__,
        "torch's version": torch.__version__,
        "the default dtype": str(torch.get_default_dtype()),
        "use_deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }


def _in_short(tensor: torch.Tensor) -> str:
    cut = f" cut as {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{cut}"


def broadcast_model(
    model: nn.Module,
    group: dist.ProcessGroup,
    what: str = "broadcast_model",
    settings: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Give every rank the sketches, parameters and buffers of the group's first rank.

    Args:
        model: Built alike on every rank.
        group: The ranks.
        what: The public call that does this, for errors.
        settings: Checks what the call was given and returns what must be the same on every rank; what it raises, all
            ranks hear of.

    Raises:
        DistributedError: On every rank, before anything is changed, if models, settings or versions differ, or a tensor
            is cut over the ranks.
        SketchMismatchError: The same, for sketched layers.
    """
    check_same_model(model, group, what, settings)
    send_model(model, group, what)


def send_model(model: nn.Module, group: dist.ProcessGroup, what: str) -> None:
    """The second half of :func:`broadcast_model`, for models that are known to be alike."""
    ranks = dist.get_process_group_ranks(group)
    _check_whole(model, ranks)
    src = ranks[0]
    with watched(what, group):
        send_sketches(model, group)
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            dist.broadcast(local.detach(), src, group=group)
    verify_sketches(model, group)


def _check_whole(model: nn.Module, ranks: list[int]) -> None:
    """Of tensors that are cut over the ranks each has another part, which must not be sent to the others."""
    named = (*model.named_parameters(), *model.named_buffers())
    cut = [name for name, tensor in named if isinstance(tensor, DTensor) and _is_sharded_over(tensor, ranks)]
    if cut:
        more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        raise DistributedError(
            f"parameters must be whole on every rank, and {cut[0]!r}{more} are cut over "
            f"{name_ranks(ranks)} already: use the model as it is, or build it anew"
        )


def _is_sharded_over(tensor: DTensor, ranks: list[int]) -> bool:
    mesh = tensor.device_mesh
    return any(
        not placement.is_replicate() and len({*ranks}.intersection(dist.get_process_group_ranks(mesh.get_group(i)))) > 1
        for i, placement in enumerate(tensor.placements)
    )


def check_same_model(
    model: nn.Module, group: dist.ProcessGroup | None, what: str, settings: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Compare models, settings and versions; see :func:`broadcast_model`."""

    def describe() -> dict[str, str]:
        given = in_words(settings())
        ranks = ranks_of(group)
        _check_whole(model, ranks)
        layers = describe_source(model, ranks[0], group)
        return {**layers, **describe_tensors(model), **given, **describe_library()}

    fix = "build the same model and pass the same arguments on every rank"
    agree(what, describe, group, fix, "models or settings")

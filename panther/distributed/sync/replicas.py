"""Give every rank the same model: compare the models of all ranks, then broadcast the first rank's."""

__all__ = ["broadcast_model", "built", "check_same_model", "describe_tensors", "send_model", "warn_of_pickled_shards"]

import copyreg
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from panther._version import __version__
from panther.distributed.comm.agreement import agree, describe_settings
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.ranks import name_ranks, ranks_of
from panther.distributed.sync.sketches import describe_source, send_sketches, sketch_ids
from panther.errors import DistributedError


def broadcast_model(
    model: nn.Module,
    group: dist.ProcessGroup,
    call_name: str = "broadcast_model",
    settings: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Give every rank the sketches, parameters and buffers of the group's first rank, if all have the same model.

    ``settings`` checks the arguments of the public function ``call_name``, and returns those that must be equal on
    every rank. Otherwise all ranks raise before anything is changed. Tensors on the meta device are not sent.
    """
    check_same_model(model, group, call_name, settings)
    send_model(model, group, call_name)


def built(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the model; a function that builds one is called with the meta device, so that the model has no values."""
    if isinstance(model, nn.Module | type) or not callable(model):
        return model  # type: ignore[return-value]  # callers raise an error for a class
    with torch.device("meta"):
        return model()


def check_same_model(
    model: nn.Module, group: dist.ProcessGroup | None, call_name: str, settings: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Compare models, settings and versions between ranks: a broadcast between different models would hang."""

    def describe() -> dict[str, str]:
        described_settings = describe_settings(settings())
        ranks = ranks_of(group)
        _check_replicated(model, ranks)
        # Different versions may draw, pack or split differently, and different settings of the process compute
        # differently. Neither would raise an error by itself.
        process = {
            "Panther's version": __version__,
            "torch's version": torch.__version__,
            "the default dtype": str(torch.get_default_dtype()),
            "use_deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        }
        return {
            **describe_source(model, ranks[0], group, empty_too=True),
            **describe_tensors(model),
            **described_settings,
            **process,
        }

    fix = "build the same model and pass the same arguments on every rank"
    agree(call_name, describe, group, fix, "models or settings")


def send_model(model: nn.Module, group: dist.ProcessGroup, call_name: str) -> None:
    """Broadcast a model after :func:`check_same_model` has compared it between ranks."""
    src = dist.get_process_group_ranks(group)[0]
    with watched(call_name, group):
        send_sketches(model, src, group)
        # Sketches are buffers or parameters too, but equal already, because send_sketches has sent them.
        sketches = sketch_ids(model)
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in sketches and not tensor.is_meta:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                dist.broadcast(local.detach(), src, group=group)


def describe_tensors(model: nn.Module) -> dict[str, str]:
    """Describe a model's tensors by name, except for sketches, which are described by layer."""
    described, sketches = {"model": type(model).__name__}, sketch_ids(model)
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if id(tensor) not in sketches:
                # A rank with a frozen parameter would not take part in the sum of its gradients.
                trained = ("trained " if tensor.requires_grad else "frozen ") if kind == "parameter" else ""
                placed = f" sharded as {tensor.placements}" if isinstance(tensor, DTensor) else ""
                placed += " without values" if tensor.is_meta else ""
                described[f"{kind} {name!r}"] = f"{trained}{tensor.dtype} {tuple(tensor.shape)}{placed}"
    return described


def _check_replicated(model: nn.Module, ranks: list[int]) -> None:
    """Raise if tensors are sharded over the ranks, because a broadcast would replace every shard by the first one."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    sharded = [name for name, tensor in tensors if isinstance(tensor, DTensor) and _is_sharded_over(tensor, ranks)]
    if sharded:
        more = f" and {len(sharded) - 1} more" if len(sharded) > 1 else ""
        raise DistributedError(
            f"parameters must be replicated, and {sharded[0]!r}{more} are sharded over {name_ranks(ranks)} already: "
            "use the model as it is, or build a new one"
        )


def _is_sharded_over(tensor: DTensor, ranks: list[int]) -> bool:
    mesh = tensor.device_mesh
    # Shards along an axis of the mesh whose ranks are not in this group are equal on all ranks of the group.
    return any(
        not placement.is_replicate() and len({*ranks}.intersection(dist.get_process_group_ranks(mesh.get_group(i)))) > 1
        for i, placement in enumerate(tensor.placements)
    )


_warned = threading.Event()
_PICKLING = 4  # frames from the warning to the caller of torch.save


def warn_of_pickled_shards() -> None:
    """Warn when this process first pickles a DTensor of several ranks. Sharding a model calls this function.

    ``torch.save(model.state_dict())`` on one rank writes that rank's shards. Checkpoints pickle no DTensor.
    """
    copyreg.pickle(DTensor, _reduce)


def _reduce(shard: DTensor) -> Any:
    if not _warned.is_set() and shard.device_mesh.size() > 1:
        _warned.set()
        local, full = tuple(shard.to_local().shape), tuple(shard.shape)
        warnings.warn(
            f"a tensor of a distributed model was pickled, as by torch.save, and this rank holds {local} of its {full}:"
            " the file loads only on as many processes, each with a file of its own. Call Trainer.export(folder), or "
            "panther.distributed.checkpoint.export(model, folder), on every rank to save the whole model, or "
            "full_tensor() of each tensor; panther.distributed.checkpoint.save is for continuing the training",
            UserWarning,
            stacklevel=_PICKLING,
        )
    return shard.__reduce_ex__(2)

"""Ask whether all ranks mean the same, before anything that would go wrong silently if they do not."""

__all__ = ["agree", "describe_library", "describe_tensors", "in_words", "ranks_of"]

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from panther import errors
from panther._version import __version__
from panther.distributed._checkin import name_ranks
from panther.distributed._faults import gather_all, watched
from panther.errors import DistributedError, SketchMismatchError
from panther.nn._sketched import SketchedModule

LAYER = "layer "
"""What a description of a sketched layer begins with; ranks that differ there raise SketchMismatchError."""


def agree(
    what: str, describe: Callable[[], Mapping[str, str]], group: dist.ProcessGroup | None, fix: str, noun: str = "calls"
) -> None:
    """Raise the same error on every rank unless all give the same description.

    Args:
        what: The call, for errors.
        describe: Checks what this rank was given, and describes it. What it raises, every rank hears of.
        group: Process group; None is the world.
        fix: What to do about differences.
        noun: What differs then.

    Raises:
        DistributedError: If descriptions differ, or ``describe`` fails on some ranks; differences and ranks are named.
            SketchMismatchError, if sketched layers do. What ``describe`` raises, if it is the same everywhere.

    Cost: a gather of 16 bytes a rank; the descriptions only where they differ.
    """
    if not (dist.is_available() and dist.is_initialized()):
        describe()  # which may have more to say
    ranks = ranks_of(group)
    failure, described = None, {}
    try:
        described = dict(describe())
    except Exception as error:  # the other ranks are about to wait for this one, so it must not leave now
        failure = error
    told = None if failure is None else (type(failure).__name__, str(failure))
    digest = hashlib.blake2b(json.dumps([what, list(described.items())]).encode(), digest_size=8).digest()
    mine = torch.tensor(
        [int.from_bytes(digest, signed=True), failure is not None], dtype=torch.int64, device=transport(group)
    )
    gathered = [torch.empty_like(mine) for _ in ranks]
    if "nccl" in dist.get_backend(group) and len(ranks) > 1:
        gather_all(what, group)
    with watched(what, group):
        dist.all_gather(gathered, mine, group=group)
        prints = [tensor.tolist() for tensor in gathered]
        if all(print_ == prints[0] for print_ in prints) and not prints[0][1]:
            return
        answers: list[Any] = [None] * len(ranks)
        dist.all_gather_object(answers, (what, told, described), group=group)
    failures = {rank: told for rank, (_, told, _) in zip(ranks, answers, strict=True) if told is not None}
    if failure is not None and len(failures) == len(ranks) and len(set(failures.values())) == 1:
        raise failure
    if failures:
        names = {name for name, _ in failures.values()}
        kind = getattr(errors, names.pop(), DistributedError) if len(names) == 1 else DistributedError
        raise kind("; ".join(f"rank {rank}: {text}" for rank, (_, text) in failures.items()))
    if len({call for call, _, _ in answers}) > 1:
        calls = {rank: {"the call": call} for rank, (call, _, _) in zip(ranks, answers, strict=True)}
        raise DistributedError(f"ranks call different things: {'; '.join(_differences(calls).values())}: call the same")
    differences = _differences({rank: found for rank, (_, _, found) in zip(ranks, answers, strict=True)})
    sketches = any(name.startswith(LAYER) for name in differences)
    parts = list(differences.values())
    more = f"; and {len(parts) - 5} more" if len(parts) > 5 else ""
    text = "; ".join(parts[:5]) + more or "it is the same in another order"
    kind = SketchMismatchError if sketches else DistributedError
    raise kind(f"{'sketches' if sketches else noun} differ between ranks: {text}: {fix}")


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


def in_words(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a call, so that they can be compared: values that are plain by themselves, others by their type."""
    plain = (str, int, float, bool, type(None), torch.dtype, torch.Size, torch.device, tuple, list)
    return {
        f"{name}=": repr(value) if isinstance(value, plain) else type(value).__name__
        for name, value in settings.items()
    }


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks of the group, in its order.

    Raises:
        DistributedError: If there is no process group, or this rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    if dist.get_rank(group) < 0:
        raise DistributedError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may call this")
    return dist.get_process_group_ranks(group)


def transport(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group exchanges small tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _in_short(tensor: torch.Tensor) -> str:
    cut = f" cut as {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tensor.dtype} {tuple(tensor.shape)}{cut}"


def _differences(described: dict[int, dict[str, str]]) -> dict[str, str]:
    """By name, what each rank has where they differ."""
    parts = {}
    for name in dict.fromkeys(name for descriptions in described.values() for name in descriptions):
        by_value: dict[str, list[int]] = {}
        for rank, descriptions in described.items():
            by_value.setdefault(descriptions.get(name, "missing"), []).append(rank)
        if len(by_value) > 1:
            found = " and ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
            parts[name] = f"{name}{'' if name.endswith('=') else ' is '}{found}"
    return parts

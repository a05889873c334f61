"""Keep the sketches of all ranks one and the same, at the price of a seed a layer."""

__all__ = ["start_alike", "sync_sketches", "verify_sketches"]

import hashlib
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from panther.distributed._checkin import name_ranks
from panther.errors import DistributedError, SketchMismatchError
from panther.nn._sketched import SketchedModule

_FITTED = -1
_ODD = 0x1E3779B97F4A7C15  # odd and irregular, below 2^63
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sync_sketches(model: nn.Module, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the sketches of rank ``src``. Every rank of the group must call it.

    Seeded layers take the seed of ``src`` and draw their sketches from it; fitted sketches are sent whole. Trained
    factors are left alone: wrapping the model for data parallelism sends those.

    Args:
        model: Built alike on every rank.
        src: Global rank to take the sketches from.
        group: Process group; None is the world.

    Raises:
        SketchMismatchError: On every rank, if models differ in names, shapes, modes or num_terms of their sketched
            layers or in ``src``, ``src`` is not in the group, or it holds a damaged seed. Layers and ranks are named
            and nothing is changed.
        DistributedError: If there is no process group.

    Cost: a gather of 16 bytes a rank, and a broadcast of 8 bytes a seeded layer; fitted sketches at their size.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> sync_sketches(pr.nn.SKLinear(256, 256, 4))
        >>> pr.distributed.shutdown()
    """
    ranks = _ranks(group)
    layers = _sketched_layers(model)

    def describe() -> dict[str, str]:
        if src not in ranks:
            raise DistributedError(f"src={src} must be a global rank of the group, one of {ranks}")
        if dist.get_rank() == src:  # the others' seeds do not matter
            for layer in layers.values():
                layer.check_record()
        return {f"layer {name!r}": _describe(layer) for name, layer in layers.items()} | {"src": str(src)}

    _agree(describe, group, ranks, "build the same model on every rank, and pass the same src")
    if not layers:
        return
    device = _transport(group)
    seeds = [_FITTED if layer.seed is None else layer.seed for layer in layers.values()]
    packed = torch.tensor(seeds, dtype=torch.int64, device=device)
    dist.broadcast(packed, src, group=group)
    for layer, seed in zip(layers.values(), packed.tolist(), strict=True):
        if seed == _FITTED:
            for name in layer.sketch_names:
                sketch = getattr(layer, name).detach()
                sent = sketch.to(device).contiguous()
                dist.broadcast(sent, src, group=group)
                sketch.copy_(sent)
        else:
            layer.set_seeded_(seed)


def verify_sketches(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank has the same sketches. Every rank of the group must call it.

    A ``sketch_seed`` that was changed in place, by a broadcast of buffers say, is adopted first. Sketches of fitted
    layers are compared by a digest.

    Args:
        model: The model, wrapped or not.
        group: Process group; None is the world.

    Raises:
        SketchMismatchError: On every rank, if anything differs; layers, ranks and values are named.
        DistributedError: If there is no process group.

    Cost: a gather of 16 bytes a rank, and one pass over fitted sketches.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> verify_sketches(pr.nn.SKLinear(256, 256, 4))
        >>> pr.distributed.shutdown()
    """
    ranks = _ranks(group)

    def describe() -> dict[str, str]:
        described = {}
        for name, layer in _sketched_layers(model).items():
            layer.check_record()
            described[f"layer {name!r}"] = f"{_describe(layer)}, {_contents(layer)}"
        return described

    _agree(describe, group, ranks, "call sync_sketches(model) on every rank before training")


def start_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the sketches, parameters and buffers of the group's first rank."""
    src = dist.get_process_group_ranks(group)[0]
    sync_sketches(model, src=src, group=group)
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        dist.broadcast(local.detach(), src, group=group)
    verify_sketches(model, group)


def _sketched_layers(model: nn.Module) -> dict[str, SketchedModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SketchedModule)}


def _agree(describe: Callable[[], dict[str, str]], group: dist.ProcessGroup | None, ranks: list[int], fix: str) -> None:
    """Raise the same error on every rank unless all give the same description."""
    failure, described = None, {}
    try:
        described = describe()
    except Exception as error:  # the other ranks are about to wait for this one, so it must not leave now
        failure = str(error)
    digest = hashlib.blake2b(json.dumps(list(described.items())).encode(), digest_size=8).digest()
    device = _transport(group)
    mine = torch.tensor([int.from_bytes(digest, signed=True), failure is not None], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(gathered, mine, group=group)
    prints = [tensor.tolist() for tensor in gathered]
    if all(print_ == prints[0] for print_ in prints) and not prints[0][1]:
        return
    answers: list[tuple[str | None, dict[str, str]]] = [(None, {})] * len(ranks)
    dist.all_gather_object(answers, (failure, described), group=group)
    failures = [f"rank {rank}: {text}" for rank, (text, _) in zip(ranks, answers, strict=True) if text is not None]
    if failures:
        raise SketchMismatchError("; ".join(failures))
    differences = _differences({rank: described for rank, (_, described) in zip(ranks, answers, strict=True)})
    raise SketchMismatchError(f"sketches differ between ranks: {differences}: {fix}")


def _describe(layer: SketchedModule) -> str:
    shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in layer.sketch_shapes().items())
    mode = "fitted" if layer.is_fitted else "seeded"
    like = layer.sketch_like()
    if layer.is_fitted and like.is_meta:
        raise DistributedError("a fitted layer is on the meta device and has no sketches to send: load it first")
    return f"{mode} {type(layer).__name__} in {like.dtype} with num_terms={layer.num_terms}, {shapes}"


def _contents(layer: SketchedModule) -> str:
    if layer.seed is not None:
        return f"seed {layer.seed}"
    return "contents " + " ".join(f"{_digest(getattr(layer, name)):016x}" for name in layer.sketch_names)


def _digest(sketch: Tensor) -> int:
    """64 bits of the exact contents, computed where they are; sums wrap around, so any order gives the same."""
    whole = sketch.full_tensor() if isinstance(sketch, DTensor) else sketch
    bits = whole.detach().contiguous().flatten().view(_INTEGER_OF_SIZE[sketch.element_size()]).to(torch.int64)
    mixed = bits + _ODD * torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=bits.device)
    for shift in (30, 27, 31):  # multiplying alone is linear, and patterns of signs would cancel
        mixed = (mixed ^ (mixed >> shift)) * _ODD
    return int(mixed.sum()) % (1 << 64)


def _differences(described: dict[int, dict[str, str]]) -> str:
    parts = []
    for name in dict.fromkeys(name for descriptions in described.values() for name in descriptions):
        by_value: dict[str, list[int]] = {}
        for rank, descriptions in described.items():
            by_value.setdefault(descriptions.get(name, "missing"), []).append(rank)
        if len(by_value) > 1:
            found = " and ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
            parts.append(f"{name} is {found}")
    more = f"; and {len(parts) - 5} more" if len(parts) > 5 else ""
    return "; ".join(parts[:5]) + more or "the layers are the same in another order"


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks of the group, in its order."""
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    if dist.get_rank(group) < 0:
        raise DistributedError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may call this")
    return dist.get_process_group_ranks(group)


def _transport(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group exchanges small tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

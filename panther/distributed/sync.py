"""Keep the sketches of all ranks one and the same, at the price of a seed a layer."""

__all__ = ["sync_sketches", "verify_sketches"]

import hashlib
import json

import torch
import torch.distributed as dist
from torch import Tensor, nn

from panther.distributed._checkin import name_ranks
from panther.errors import DistributedError, PantherError, SketchMismatchError
from panther.nn._sketched import SketchedModule

_FITTED = -1
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
            layers, or one holds a damaged seed. The layers and ranks are named and nothing is changed.
        DistributedError: If there is no process group, or ``src`` is not in it.

    Cost: a gather of 16 bytes a rank, and a broadcast of 8 bytes a seeded layer; fitted sketches at their size.

    Example:
        >>> import panther as pr
        >>> pr.distributed.init()
        >>> sync_sketches(pr.nn.SKLinear(256, 256, 4))
        >>> pr.distributed.shutdown()
    """
    ranks = _ranks(group)
    if src not in ranks:
        raise DistributedError(f"src={src} must be a global rank of the group, one of {ranks}")
    layers = _sketched_layers(model)
    _agree(layers, group, ranks, contents=False)
    if not layers:
        return
    device = _transport(group)
    seeds = [_FITTED if layer.seed is None else layer.seed for layer in layers.values()]
    packed = torch.tensor(seeds, dtype=torch.int64, device=device)
    dist.broadcast(packed, src, group=group)
    for layer, seed in zip(layers.values(), packed.tolist(), strict=True):
        if layer.is_fitted:
            for name in layer.sketch_names:
                sketch = getattr(layer, name).detach()
                sent = sketch.to(device).contiguous()
                dist.broadcast(sent, src, group=group)
                sketch.copy_(sent)
        elif seed != layer.seed:
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
    _agree(_sketched_layers(model), group, _ranks(group), contents=True)


def _sketched_layers(model: nn.Module) -> dict[str, SketchedModule]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SketchedModule)}


def _agree(
    layers: dict[str, SketchedModule], group: dist.ProcessGroup | None, ranks: list[int], *, contents: bool
) -> None:
    """Raise the same error on every rank unless all of them describe their layers alike."""
    failure = None
    described: dict[str, str] = {}
    try:
        for name, layer in layers.items():
            layer.refresh_sketches_()
            described[name] = _describe(layer, contents)
    except PantherError as error:  # the other ranks are about to wait for this one, so it must not leave now
        failure = f"layer {name!r}: {error}"
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
    raise SketchMismatchError(_explain(dict(zip(ranks, answers, strict=True)), contents))


def _describe(layer: SketchedModule, contents: bool) -> str:
    shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in layer.sketch_shapes().items())
    mode = "fitted" if layer.is_fitted else "seeded"
    text = f"{mode} {type(layer).__name__} with num_terms={layer.num_terms}, {shapes}"
    if not contents:
        return text
    if layer.seed is not None:
        return f"{text}, seed {layer.seed}"
    digests = [f"{_digest(getattr(layer, name)):016x}" for name in layer.sketch_names]
    return f"{text}, contents {' '.join(digests)}"


def _digest(sketch: Tensor) -> int:
    """64 bits of the exact contents; integer sums wrap around, so any order of summation gives the same."""
    bits = sketch.detach().contiguous().flatten().view(_INTEGER_OF_SIZE[sketch.element_size()]).to(torch.int64)
    odd = 2 * torch.arange(bits.numel(), dtype=torch.int64, device=bits.device) + 1
    return int((bits * odd).sum()) % (1 << 64)


def _explain(answers: dict[int, tuple[str | None, dict[str, str]]], contents: bool) -> str:
    failures = [f"rank {rank}, {failure}" for rank, (failure, _) in answers.items() if failure is not None]
    if failures:
        return "; ".join(failures)
    names = dict.fromkeys(name for _, described in answers.values() for name in described)
    differences = []
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, (_, described) in answers.items():
            by_value.setdefault(described.get(name, "missing"), []).append(rank)
        if len(by_value) > 1:
            found = " and ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
            differences.append(f"layer {name!r} is {found}")
    if not differences:
        return "the ranks have the same sketched layers in another order: build the same model on every rank"
    more = f"; and {len(differences) - 5} more layers" if len(differences) > 5 else ""
    fix = (
        "call sync_sketches(model) on every rank before training" if contents else "build the same model on every rank"
    )
    return f"sketches differ between ranks: {'; '.join(differences[:5])}{more}: {fix}"


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

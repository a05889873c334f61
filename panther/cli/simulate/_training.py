"""The work behind ``panther simulate``: data-parallel training on digits, with all kept that there is to see of it."""

__all__ = ["Settings", "record_rank", "record_single", "shard"]

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from panther.cli.demo._training import accuracy, build, load_digits
from panther.distributed import CommunicationCounter, data_parallel, get_rank, sync_sketches

SHOWN = "2"  # the layer whose gradients are kept, by its place in the network
_LEARNING_RATE, _MOMENTUM = 0.02, 0.9


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user chose."""

    kind: str
    world: int
    batch: int
    """Samples of a step, of all ranks together; a multiple of ``world``."""
    epochs: int
    steps: int | None
    """In place of whole epochs."""
    hidden: int
    sketch_size: int
    seed: int


def shard(samples: int, settings: Settings, rank: int, epoch: int = 0) -> list[int]:
    """The samples that torch's DistributedSampler gives a rank in an epoch, in their order."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        range(samples),  # type: ignore[arg-type]
        num_replicas=settings.world,
        rank=rank,
        seed=settings.seed,
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def record_rank(settings: Settings) -> dict[str, Any]:
    """Train as one rank of the process group.

    Returns:
        ``seen``, the samples of each step; ``losses``, of each step; ``local`` and ``averaged``, a layer's gradient in
        the first step before and after the all-reduce; bytes sent at each stage; fingerprints of the model before the
        ranks were made alike and after training; and at the end ``parameters`` (rank 0 only) and ``accuracy``.
    """
    train, test = _digits()
    model = _draw(settings, get_rank())
    drawn = fingerprint(model)
    with CommunicationCounter() as sketch_traffic:
        sync_sketches(model)
    with CommunicationCounter() as start_traffic:
        parallel = data_parallel(model)
    optimizer = _optimizer(parallel)
    record: dict[str, Any] = {"seen": [], "losses": [], "gradient_bytes": [], "drawn": drawn}
    for x, y, places in _batches(train, settings, get_rank()):
        if not record["seen"]:
            record["local"] = _gradient(model, x, y)
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(x), y)
        with CommunicationCounter() as traffic:
            loss.backward()
        if not record["seen"]:
            record["averaged"] = _shown(model).grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        record["seen"].append(places)
        record["losses"].append(loss.item())
        record["gradient_bytes"].append(traffic.bytes)
    return {
        **record,
        "dense_bytes": _dense_bytes(settings) if settings.kind == "sketched" else record["gradient_bytes"][0],
        "sketch_bytes": sketch_traffic.bytes,
        "start_bytes": start_traffic.bytes,
        "trained": fingerprint(model),
        "accuracy": accuracy(model, test, "cpu"),
        "parameters": [parameter.detach() for parameter in model.parameters()] if get_rank() == 0 else None,
    }


def record_single(settings: Settings, seen: Sequence[Tensor]) -> dict[str, Any]:
    """Train in one process, without a process group, on the global batches ``seen``.

    Returns:
        ``losses`` of each step, ``gradient`` of the layer in the first one, ``parameters`` and ``accuracy`` at the end,
        and ``moved``, how far training took the parameter that it took farthest.
    """
    train, test = _digits()
    model = _draw(settings, 0)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = _optimizer(model)
    losses, gradient = [], None
    for places in seen:
        x, y = train[places]
        gradient = _gradient(model, x, y) if gradient is None else gradient
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = [parameter.detach() for parameter in model.parameters()]
    return {
        "losses": losses,
        "gradient": gradient,
        "parameters": parameters,
        "moved": largest_difference(parameters, start),
        "accuracy": accuracy(model, test, "cpu"),
    }


def _dense_bytes(settings: Settings) -> int:
    """Gradient bytes that this rank hands over in a step of the network with dense layers."""
    parallel = data_parallel(build("dense", settings.hidden, settings.sketch_size).double())
    loss = parallel(torch.zeros(1, 64, dtype=torch.float64)).sum()
    with CommunicationCounter() as traffic:
        loss.backward()
    return traffic.bytes


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Between entries of two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def fingerprint(model: nn.Module) -> str:
    """Eight hexadecimal digits of the exact parameters and sketches."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:8]


def _draw(settings: Settings, rank: int) -> nn.Sequential:
    """Every rank draws a network of its own; what they share later was sent, not the luck of equal generators."""
    torch.manual_seed(settings.seed + 1000 * rank)
    return build(settings.kind, settings.hidden, settings.sketch_size).double()


def _digits() -> list[TensorDataset]:
    """In float64: training multiplies the rounding of float32 until it can no longer be told from a fault."""
    return [TensorDataset(x.double(), y) for x, y in (part.tensors for part in load_digits())]


def _optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), _LEARNING_RATE, _MOMENTUM)


def _batches(train: TensorDataset, settings: Settings, rank: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A rank's part of every global batch: pixels, classes, and which samples they are."""
    data = TensorDataset(*train.tensors, torch.arange(len(train)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=settings.seed)
    loader = DataLoader(data, settings.batch // settings.world, sampler=sampler)

    def epochs() -> Iterator[Any]:
        for epoch in count() if settings.steps else range(settings.epochs):
            sampler.set_epoch(epoch)
            yield from loader

    return islice(epochs(), settings.steps)


def _shown(model: nn.Module) -> nn.Parameter:
    return next(model.get_submodule(SHOWN).parameters())


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The shown layer's gradient, without a hook that would send it."""
    return torch.autograd.grad(F.cross_entropy(model(x), y), _shown(model))[0]

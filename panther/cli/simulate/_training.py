"""Data-parallel training on digits that ``panther simulate`` runs and records, and its twin in one process."""

__all__ = ["Settings", "largest_difference", "record_rank", "record_single", "shard"]

import hashlib
from collections.abc import Iterable, Iterator, Sequence
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

_SHOWN = "2"  # name of the layer whose gradients are recorded, the first of the two in the middle
_LEARNING_RATE, _MOMENTUM = 0.02, 0.9


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the command; ``batch`` is of all ranks together, and ``steps`` replaces whole epochs."""

    kind: str
    world: int
    batch: int
    epochs: int
    steps: int | None
    hidden: int
    sketch_size: int
    seed: int

    def build(self, kind: str = "") -> nn.Sequential:
        """Return the network in float64: in float32, training amplifies rounding until it looks like a fault."""
        return build(kind or self.kind, self.hidden, self.sketch_size).double()


def shard(samples: int, settings: Settings, rank: int, epoch: int = 0) -> list[int]:
    """Return the samples that torch's DistributedSampler gives a rank in an epoch, in their order."""
    sampler = _sampler(range(samples), settings, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


def record_rank(settings: Settings) -> dict[str, Any]:
    """Train as one rank of the process group.

    Returns:
        ``seen``, the samples of each step; ``losses`` of each step; ``local`` and ``averaged``, a layer's gradient in
        the first step before and after the all-reduce; bytes sent at each stage; fingerprints of the model before the
        ranks were made equal and after training; ``accuracy``, and on rank 0 the final ``parameters``.
    """
    train, test = _digits()
    model = _draw(settings, get_rank())
    drawn = _fingerprint(model)
    with CommunicationCounter() as sketch_traffic:
        sync_sketches(model)
    with CommunicationCounter() as start_traffic:
        parallel = data_parallel(model)
    seen: list[Tensor] = []
    record = _train(model, parallel, _batches(train, settings, get_rank(), seen))
    return {
        **record,
        "seen": seen,
        "drawn": drawn,
        "sketch_bytes": sketch_traffic.bytes,
        "start_bytes": start_traffic.bytes,
        "trained": _fingerprint(model),
        "accuracy": accuracy(model, test, "cpu"),
        "parameters": [parameter.detach() for parameter in model.parameters()] if get_rank() == 0 else None,
    }


def record_single(settings: Settings, seen: Sequence[Tensor]) -> dict[str, Any]:
    """Train in one process, without a process group, on the global batches ``seen``.

    Returns:
        ``losses`` of each step, ``local``, the gradient of the layer in the first one, ``parameters`` and ``accuracy``
        at the end, and ``moved``, the largest change of a parameter by training.
    """
    train, test = _digits()
    model = _draw(settings, 0)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    record = _train(model, model, (train[places] for places in seen))
    parameters = [parameter.detach() for parameter in model.parameters()]
    return {
        **record,
        "parameters": parameters,
        "moved": largest_difference(parameters, start),
        "accuracy": accuracy(model, test, "cpu"),
    }


def _train(model: nn.Module, forward: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> dict[str, Any]:
    """Train and record; ``forward`` is the model, or what sends its gradients."""
    optimizer = torch.optim.SGD(model.parameters(), _LEARNING_RATE, _MOMENTUM)
    shown = next(model.get_submodule(_SHOWN).parameters())
    record: dict[str, Any] = {"losses": []}
    for x, y in batches:
        first = not record["losses"]
        if first:  # through the model itself, whose gradients no hook sends
            record["local"] = torch.autograd.grad(F.cross_entropy(model(x), y), shown)[0]
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        with CommunicationCounter() as traffic:
            loss.backward()
        if first:
            record |= {"averaged": shown.grad.clone(), "gradient_bytes": traffic.bytes}  # type: ignore[union-attr]
        optimizer.step()
        record["losses"].append(loss.item())
    return record


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference between entries of two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def _fingerprint(model: nn.Module) -> str:
    """Return eight hexadecimal digits of the exact parameters and sketches."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:8]


def _draw(settings: Settings, rank: int) -> nn.Sequential:
    """Return a network that differs by rank: if ranks agree later, it is by communication, not by equal generators."""
    torch.manual_seed(settings.seed + 1000 * rank)
    return settings.build()


def _digits() -> list[TensorDataset]:
    return [TensorDataset(x.double(), y) for x, y in (data.tensors for data in load_digits())]


def _sampler(data: Any, settings: Settings, rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(data, num_replicas=settings.world, rank=rank, seed=settings.seed)


def _batches(
    train: TensorDataset, settings: Settings, rank: int, seen: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's shard of every global batch, and append to ``seen`` which samples it holds."""
    data = TensorDataset(*train.tensors, torch.arange(len(train)))
    sampler = _sampler(data, settings, rank)
    loader = DataLoader(data, settings.batch // settings.world, sampler=sampler)

    def epochs() -> Iterator[Any]:
        for epoch in count() if settings.steps else range(settings.epochs):
            sampler.set_epoch(epoch)
            yield from loader

    for x, y, places in islice(epochs(), settings.steps):
        seen.append(places)
        yield x, y

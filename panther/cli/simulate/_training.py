"""The data-parallel training on digits that ``panther simulate`` runs, and the same training in one process."""

__all__ = ["Run", "Settings", "shard", "train"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from panther.cli.demo.training import TRAIN_SAMPLES, accuracy, build, load_digits
from panther.distributed import CommunicationCounter, data_parallel, get_rank, get_world_size

_MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the command; ``batch`` is of all ranks together."""

    kind: str
    world: int
    batch: int
    epochs: int
    hidden: int
    sketch_size: int
    lr: float
    seed: int

    def build(self, kind: str) -> nn.Sequential:
        """Return the network in float64: in float32, training amplifies rounding until it looks like a fault."""
        return build(kind, self.hidden, self.sketch_size).double()


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of the training, on a rank or in a single process."""

    samples: list[Tensor]
    """Samples of each step."""
    losses: list[float]
    """Loss of each step."""
    gradient: Tensor
    """Gradient of a layer in the first step, before the all-reduce."""
    averaged: Tensor
    """The same gradient after the all-reduce."""
    sent_bytes: int
    """Bytes of the tensors that the first step sends."""
    parameters: Tensor
    """All parameters after training, in one vector."""
    accuracy: float
    """Share of the test samples that the trained model classifies correctly."""


def shard(settings: Settings, rank: int, epoch: int) -> Tensor:
    """Return the samples that torch's DistributedSampler gives a rank in an epoch, in their order."""
    data: Any = range(TRAIN_SAMPLES)  # the sampler only reads its length
    sampler = DistributedSampler[int](data, settings.world, rank, seed=settings.seed)
    sampler.set_epoch(epoch)
    return torch.tensor(list(sampler))


def train(settings: Settings) -> Run:
    """Train on the samples of this rank or, without a process group, on the samples of all ranks."""
    alone, rank = get_world_size() == 1, get_rank()
    data, test = ((x.double(), y) for x, y in (part.tensors for part in load_digits()))
    # Every rank draws a different network. If the networks agree later, the ranks have communicated.
    torch.manual_seed(settings.seed + 1000 * rank)
    model = settings.build(settings.kind)
    forward = model if alone else data_parallel(model)  # sends the network of rank 0 to all ranks
    optimizer = torch.optim.SGD(model.parameters(), settings.lr, _MOMENTUM)
    parameter = next(model[2].parameters())  # the first parameter of the first middle layer
    samples, losses, sent_bytes = list[Tensor](), list[float](), 0
    for step in _batches(settings, range(settings.world) if alone else [rank]):
        x, y = data[0][step], data[1][step]
        if not samples:  # the model itself has no hook that sends its gradients
            gradient = torch.autograd.grad(F.cross_entropy(model(x), y), parameter)[0]
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        with CommunicationCounter() as traffic:
            loss.backward()
        if not samples:
            averaged, sent_bytes = parameter.grad.clone(), traffic.bytes  # type: ignore[union-attr]
        optimizer.step()
        samples.append(step)
        losses.append(loss.item())
    return Run(
        samples=samples,
        losses=losses,
        gradient=gradient,
        averaged=averaged,
        sent_bytes=sent_bytes,
        parameters=nn.utils.parameters_to_vector(model.parameters()).detach(),
        accuracy=accuracy(model, TensorDataset(*test), "cpu"),
    )


def _batches(settings: Settings, ranks: Sequence[int]) -> Iterator[Tensor]:
    """Yield the samples that these ranks have in each step."""
    for epoch in range(settings.epochs):
        shards = [shard(settings, rank, epoch).split(settings.batch // settings.world) for rank in ranks]
        yield from map(torch.cat, zip(*shards, strict=True))

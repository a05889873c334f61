"""The training on digits that ``panther simulate`` runs, the same training in one process, and the report of both."""

__all__ = ["Run", "Settings", "print_counts", "print_samples", "print_training", "shard", "train"]

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from panther._text import counted, format_table
from panther.cli.demo.training import TRAIN_SAMPLES, accuracy, build, load_digits
from panther.distributed import (
    ClusterSpec,
    CommunicationCounter,
    ModelStats,
    data_parallel,
    get_rank,
    get_world_size,
    launch,
)  # fmt: skip
from panther.distributed.advisor.cost import Estimate, Layout, estimate
from panther.distributed.comm.mesh import physical_memory
from panther.errors import DistributedError

_MOMENTUM = 0.9
_ROUNDING = 1e-9  # relative; float64 rounds at 1e-16, and 40 epochs of training amplified it to 1e-13 at most


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


def print_samples(settings: Settings) -> None:
    """Print the network, and which samples torch's sampler gives the ranks."""
    world = settings.world
    widths = "-".join(map(str, (64, *[settings.hidden] * 3, 10)))
    layers = f"sketched, sketch size {settings.sketch_size}" if settings.kind == "sketched" else "dense"
    print(f"Data parallelism on {world:,} ranks: the network {widths} ({layers}), in float64.")
    rows = [["rank", "first of epoch 1", "first of epoch 2"]]
    for rank in range(world) if world <= 8 else (0, 1, 2, 3, world - 1):
        if rank > len(rows):
            rows.append(["...", "", ""])
        firsts = (" ".join(f"{sample:4d}" for sample in shard(settings, rank, epoch)[:5].tolist()) for epoch in (0, 1))
        rows.append([f"{rank:,}", *firsts])
    print("\n1. Samples: each rank has its own\n" + format_table(rows, align="<>"))
    share = len(shard(settings, 0, 0))
    repeated = share * world - TRAIN_SAMPLES
    more = f"; it repeats {repeated:,}, so that each of them has {share:,}" if repeated else ""
    samples = f"{TRAIN_SAMPLES:,} samples of an epoch"
    print(f"The sampler shuffles the {samples} and deals them to {world:,} ranks in turn{more}.")


def print_counts(settings: Settings, processes: int) -> dict[str, int]:
    """Print the bytes that a rank sends and the memory it needs, by the cost model of ``panther advise``.

    Returns:
        The counts by their names.

    Raises:
        DistributedError: If the memory of this machine is too small for so many processes.
    """
    share = len(shard(settings, 0, 0))
    size = min(settings.batch // settings.world, share)
    cost = _cost(settings, settings.kind, size)
    counts = {
        "samples per step, of each rank": size,
        "samples per step, of all ranks": size * settings.world,
        "steps per epoch": -(-share // size),
        "gradient bytes of a rank per step": cost.traffic[0].payload,
        "  with dense layers": _cost(settings, "dense", size).traffic[0].payload,
        "  sent in a ring all-reduce": cost.sent(),
        "bytes of memory per rank": cost.memory.total,
        **{f"  {name}": value for name, value in cost.memory.parts().items() if value},
    }
    print("\n2. Counts\n" + format_table([[name, f"{value:,.0f}"] for name, value in counts.items()], align="<>"))
    note = "The memory is that of tensors, and its parts peak at different times; each process loads torch in addition."
    print(note, flush=True)
    needed, available = processes * int(cost.memory.total), physical_memory()
    if needed > available:
        raise DistributedError(
            f"the tensors of {counted(processes, 'rank')} need {needed:,} bytes of memory, and this machine has "
            f"{available:,}: use a smaller --hidden{' or --world-size' if processes > 1 else ''}"
        )
    return {name.strip(): round(value) for name, value in counts.items()}


def _cost(settings: Settings, kind: str, size: int) -> Estimate:
    """Return the cost of a step in which every rank has ``size`` samples."""
    with torch.device("meta"):
        model, x = settings.build(kind), torch.empty(size, 64, dtype=torch.float64)
    stats = ModelStats.of(model, x, loss_fn=lambda y: F.cross_entropy(y, torch.zeros(len(y), dtype=torch.int64)))
    layout = Layout(dp=settings.world, strategy="ddp")
    cluster = ClusterSpec.preset("cpu", settings.world)
    states = 1  # SGD with momentum has one copy.
    return estimate(stats, cluster, layout, size * settings.world, optimizer_states=states)


def print_training(settings: Settings, sent_bytes: int) -> dict[str, Any]:
    """Train on several processes and on one, and print what happens and its checks.

    Args:
        settings: The options.
        sent_bytes: Bytes of gradients that a rank should send in a step.

    Returns:
        Mean losses by epoch and test accuracies, by run, and whether each check passes.
    """
    start_method = "fork" if sys.platform == "linux" else "spawn"  # elsewhere forking is missing or unsafe
    ranks = launch(train, settings, nproc=settings.world, start_method=start_method)
    single = train(settings)
    mean = torch.stack([rank.gradient for rank in ranks]).mean(0)
    _print_gradients(settings, ranks, mean, single)
    steps = len(single.losses) // settings.epochs
    report = _print_losses(steps, ranks, single)
    samples = {sample for rank in ranks for step in rank.samples[:steps] for sample in step.tolist()}
    differences = {  # each with the largest difference that passes
        "every sample is seen in epoch 1": (TRAIN_SAMPLES - len(samples), 0),
        "each rank sends the counted bytes": (max(abs(rank.sent_bytes - sent_bytes) for rank in ranks), 0),
        "the all-reduce gives the mean of the gradients": (
            max(_relative_difference(r.averaged, mean) for r in ranks),
            _ROUNDING,
        ),
        "the mean is the gradient of the whole batch": (_relative_difference(mean, single.gradient), _ROUNDING),
        "all ranks end with the same parameters": (
            max(_relative_difference(r.parameters, ranks[0].parameters) for r in ranks),
            0,
        ),
        "one process ends with the same parameters": (
            _relative_difference(single.parameters, ranks[0].parameters),
            _ROUNDING,
        ),
    }
    passed = {name: bool(difference <= most) for name, (difference, most) in differences.items()}  # NaN fails, too
    rows = [
        [name, "yes" if passed[name] else "NO", f"difference {difference:.2g}"]
        for name, (difference, _) in differences.items()
    ]
    print("\n5. Checks\n" + format_table(rows))
    print("The processes share this machine, so their speed does not predict the speed of several nodes.")
    return report | {"checks": passed}


def _print_gradients(settings: Settings, ranks: list[Run], mean: Tensor, single: Run) -> None:
    layer = "S1 of the first SKLinear" if settings.kind == "sketched" else "the weight of the second nn.Linear"
    gradients = {f"rank {index}, before the all-reduce": rank.gradient for index, rank in enumerate(ranks)}
    gradients |= {"their mean": mean, "every rank, after the all-reduce": ranks[0].averaged}
    gradients |= {"one process, on the whole batch": single.gradient}
    row = int(mean.norm(dim=1).argmax())  # the unit is active on most ranks, so that the row is not zero
    rows = [["", "norm", f"first entries of row {row}, times 1000"]]
    for name, gradient in gradients.items():
        entries = "".join(f"{1000 * value:>9.4f}" for value in gradient[row, :4].tolist())
        rows.append([name, f"{gradient.norm():.6f}", entries])
    print(f"\n3. Gradients: of {layer}, in the first step\n" + format_table(rows, align="<>"))
    print("The mean over ranks is the mean over the whole batch, as all ranks have equally many of its samples.")


def _print_losses(steps: int, ranks: list[Run], single: Run) -> dict[str, Any]:
    runs = {**{f"rank {index}": rank for index, rank in enumerate(ranks)}, "one process": single}
    starts = range(0, len(single.losses), steps)
    losses = {
        name: [statistics.mean(run.losses[start : start + steps]) for start in starts] for name, run in runs.items()
    }
    accuracies = {name: run.accuracy for name, run in runs.items()}
    rows = [["epoch", *runs]]
    for epoch, means in enumerate(zip(*losses.values(), strict=True), 1):
        rows.append([str(epoch), *(f"{mean:.4f}" for mean in means)])
    rows.append(["test accuracy", *(f"{100 * accuracy:.1f} %" for accuracy in accuracies.values())])
    print("\n4. Training: mean loss of each epoch, on the samples of each rank\n" + format_table(rows, align="<>"))
    print("Each rank draws its own network; before the first step all receive that of rank 0.")
    return {"losses": losses, "accuracies": accuracies}


def _relative_difference(output: Tensor, reference: Tensor) -> float:
    """Return the largest difference of two tensors, relative to their largest entry."""
    return ((output - reference).abs().max() / reference.abs().max()).item()

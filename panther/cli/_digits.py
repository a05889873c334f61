"""The work behind ``panther demo``: handwritten digits, three networks, and training them on several processes."""

__all__ = ["KINDS", "Settings", "build", "evaluate_saved", "train_all"]

import statistics
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from panther.distributed import CommunicationCounter, data_parallel, sync_sketches
from panther.errors import PerformanceWarning, require_extra
from panther.nn import SKLinear
from panther.nn.io import load_compressed, save_compressed

KINDS = ("dense", "sketched", "low-rank")
BATCH_SIZE = 64
TRAIN_SAMPLES = 1347  # three quarters of 1,797


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user chose."""

    epochs: int
    hidden: int
    sketch_size: int
    device: str
    seed: int
    runs: int
    out: str


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Train and test set of scikit-learn's digits: 64 pixels in [0, 1], ten classes, always split alike."""
    datasets = require_extra("sklearn.datasets", "demo")
    selection = require_extra("sklearn.model_selection", "demo")
    images, labels = datasets.load_digits(return_X_y=True)
    parts = selection.train_test_split(images / 16, labels, train_size=TRAIN_SAMPLES, random_state=0, stratify=labels)
    x_train, x_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    y_train, y_test = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def build(kind: str, hidden: int, sketch_size: int) -> nn.Sequential:
    """A perceptron 64 - hidden - hidden - hidden - 10, its two hidden layers of the given kind."""

    def middle() -> nn.Module:
        if kind == "dense":
            return nn.Linear(hidden, hidden)
        if kind == "low-rank":  # the bytes of a seeded sketch: one pair of factors
            return nn.Sequential(nn.Linear(hidden, sketch_size, bias=False), nn.Linear(sketch_size, hidden))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # the command says it once
            return SKLinear(hidden, hidden, sketch_size)

    return nn.Sequential(
        nn.Linear(64, hidden), nn.ReLU(), middle(), nn.ReLU(), middle(), nn.ReLU(), nn.Linear(hidden, 10)
    )


def accuracy(model: nn.Module, data: TensorDataset, device: str) -> float:
    """Share of the samples whose class is found."""
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        return (model(x.to(device)).argmax(1).cpu() == y).double().mean().item()


def train_all(settings: Settings) -> list[dict[str, Any]]:
    """Train every kind of network for every run, in an initialised process group; every rank returns the results."""
    tqdm = require_extra("tqdm", "demo")
    tqdm.tqdm.set_lock(threading.RLock())  # its default is a semaphore, which outlives a process that is killed
    train, test = load_digits()
    steps = settings.runs * len(KINDS) * settings.epochs
    with tqdm.tqdm(total=steps, unit="epoch", disable=None if dist.get_rank() == 0 else True) as progress:
        return [
            _train(kind, settings.seed + run, train, test, settings, progress)
            for run in range(settings.runs)
            for kind in KINDS
        ]


def _train(
    kind: str, seed: int, train: TensorDataset, test: TensorDataset, settings: Settings, progress: Any
) -> dict[str, Any]:
    device = f"cuda:{torch.cuda.current_device()}" if settings.device == "cuda" else "cpu"
    progress.set_description(f"{kind}, seed {seed}")
    # Every rank draws its own weights and sketches; what they then share was sent, not the luck of equal generators.
    torch.manual_seed(seed + 1000 * dist.get_rank())
    model = build(kind, settings.hidden, settings.sketch_size).to(device)
    with CommunicationCounter() as sketch_traffic:
        if kind == "sketched":
            sync_sketches(model)
    parallel = data_parallel(model)

    # The same seed for every kind: they see the same batches in the same order.
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=seed)
    loader = DataLoader(train, max(1, BATCH_SIZE // dist.get_world_size()), sampler=sampler)
    optimizer = torch.optim.Adam(parallel.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=settings.epochs * len(loader))
    losses, seconds, gradient_bytes = [], [], []
    for epoch in range(settings.epochs):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(x.to(device)), y.to(device))
            with CommunicationCounter() as traffic:
                loss.backward()
            optimizer.step()
            schedule.step()
            gradient_bytes.append(traffic.bytes)
            total += loss.detach()
        losses.append(_mean_over_ranks(total / len(loader)))
        seconds.append(time.perf_counter() - start)
        progress.update()

    result = {
        "kind": kind,
        "seed": seed,
        "losses": losses,
        "seconds_per_epoch": statistics.median(seconds),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gradient_bytes": statistics.median(gradient_bytes),
        "sketch_bytes": sketch_traffic.bytes,
        "accuracy": accuracy(model, test, device),
    }
    if dist.get_rank() == 0:
        folder = save_compressed(model, Path(settings.out) / f"{kind}-{seed}")
        result["folder"] = str(folder)
        result["weight_bytes"] = (folder / "model.safetensors").stat().st_size
    return result


def _mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def evaluate_saved(folders: dict[str, str], hidden: int, sketch_size: int, device: str) -> dict[str, float]:
    """Test accuracy of saved networks, by folder; each is rebuilt from the dense or low-rank architecture alone."""
    _, test = load_digits()
    accuracies = {}
    for folder, kind in folders.items():
        architecture = build("dense" if kind == "sketched" else kind, hidden, sketch_size).to(device)
        accuracies[folder] = accuracy(load_compressed(folder, architecture), test, device)
    return accuracies

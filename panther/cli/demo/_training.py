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
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from panther.distributed import CommunicationCounter, sync_sketches
from panther.errors import PerformanceWarning, require_extra
from panther.nn import SKLinear
from panther.nn.io import load_compressed, save_compressed
from panther.train import Callback, TrainConfig, Trainer

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
    batch = max(1, BATCH_SIZE // dist.get_world_size())
    data = DataLoader(train, batch, shuffle=True)
    steps = -(-len(train) // (batch * dist.get_world_size()))
    config = TrainConfig(  # the same seed for every kind: they see the same batches in the same order
        epochs=settings.epochs,
        strategy="ddp",
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=settings.epochs * steps * 3 // 10,
        seed=seed,
        log_every_n_steps=steps,
        progress=False,
    )
    clock = _Clock(progress)
    trainer = Trainer(model, torch.optim.Adam, F.cross_entropy, config, [clock])
    losses = trainer.fit(data)["loss"][1]
    gradient_traffic = _bytes_of_a_step(trainer.model, next(iter(data)), device)

    result = {
        "kind": kind,
        "seed": seed,
        "losses": losses,
        "seconds_per_epoch": statistics.median(clock.seconds),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gradient_bytes": gradient_traffic,
        "sketch_bytes": sketch_traffic.bytes,
        "accuracy": accuracy(model, test, device),
    }
    if dist.get_rank() == 0:
        folder = save_compressed(model, Path(settings.out) / f"{kind}-{seed}")
        result["folder"] = str(folder)
        result["weight_bytes"] = (folder / "model.safetensors").stat().st_size
    return result


class _Clock(Callback):
    """Times epochs, and tells the progress bar of each."""

    def __init__(self, progress: Any) -> None:
        self.progress, self.seconds = progress, list[float]()

    def on_start(self, trainer: Trainer) -> None:
        self.begun = time.perf_counter()

    def on_epoch(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.begun)
        self.begun = now
        self.progress.update()


def _bytes_of_a_step(model: nn.Module, batch: Any, device: str) -> int:
    """What a backward sends."""
    x, y = batch
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    with CommunicationCounter() as traffic:
        loss.backward()
    return traffic.bytes


def evaluate_saved(folders: dict[str, str], hidden: int, sketch_size: int, device: str) -> dict[str, float]:
    """Test accuracy of saved networks, by folder; each is rebuilt from the dense or low-rank architecture alone."""
    _, test = load_digits()
    accuracies = {}
    for folder, kind in folders.items():
        architecture = build("dense" if kind == "sketched" else kind, hidden, sketch_size).to(device)
        accuracies[folder] = accuracy(load_compressed(folder, architecture), test, device)
    return accuracies

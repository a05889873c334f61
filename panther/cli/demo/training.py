"""The networks of ``panther demo`` and ``panther simulate`` on handwritten digits, and the training of the demo."""

__all__ = ["KINDS", "Settings", "accuracy", "build", "evaluate_saved", "load_digits", "train_all"]

import math
import statistics
import threading
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
from panther.nn import MonarchLinear, SKLinear
from panther.nn.io import load_compressed, save_compressed
from panther.train import TrainConfig, Trainer

KINDS = ("dense", "narrower", "pair", "sketched", "Monarch")
BATCH_SIZE = 64
TRAIN_SAMPLES = 1347  # three quarters of 1,797


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the demo."""

    epochs: int
    hidden: int
    sketch_size: int
    device: str
    seed: int
    runs: int
    out: str


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return a training and a test set of scikit-learn's digits: 64 pixels in [0, 1], ten classes, a fixed split."""
    datasets = require_extra("sklearn.datasets", "demo")
    selection = require_extra("sklearn.model_selection", "demo")
    images, labels = datasets.load_digits(return_X_y=True)
    split = selection.train_test_split(images / 16, labels, train_size=TRAIN_SAMPLES, random_state=0, stratify=labels)
    x_train, x_test = (torch.tensor(images, dtype=torch.float32) for images in split[:2])
    y_train, y_test = (torch.tensor(labels, dtype=torch.int64) for labels in split[2:])
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def build(kind: str, hidden: int, sketch_size: int) -> nn.Sequential:
    """Return a perceptron 64 - hidden - hidden - hidden - 10 with two middle layers of the given kind.

    All kinds but ``"dense"`` have as many numbers as ``"sketched"``: a ``"narrower"`` network has dense layers and the
    width for it, rounded down.
    """
    if kind == "narrower":
        hidden = _narrower_width(hidden, sketch_size)

    def middle() -> nn.Module:
        if kind in ("dense", "narrower"):
            return nn.Linear(hidden, hidden)
        if kind == "pair":
            return nn.Sequential(nn.Linear(hidden, sketch_size, bias=False), nn.Linear(sketch_size, hidden))
        if kind == "Monarch":
            return MonarchLinear(hidden, hidden, num_blocks=sketch_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # the command prints a note
            return SKLinear(hidden, hidden, sketch_size)

    return nn.Sequential(
        nn.Linear(64, hidden), nn.ReLU(), middle(), nn.ReLU(), middle(), nn.ReLU(), nn.Linear(hidden, 10)
    )


def _narrower_width(hidden: int, sketch_size: int) -> int:
    """Return the largest width w whose ``2 w^2 + 77 w`` numbers are at most those of the sketched network."""
    numbers = 77 * hidden + 4 * hidden * sketch_size
    return int((math.sqrt(77**2 + 8 * numbers) - 77) / 4)


def accuracy(model: nn.Module, data: TensorDataset, device: str) -> float:
    """Return the share of the samples that are classified correctly."""
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        return (model(x.to(device)).argmax(1).cpu() == y).double().mean().item()


def train_all(settings: Settings) -> list[dict[str, Any]]:
    """Train a network of every kind in every run, in an initialised process group; every rank returns the results."""
    tqdm = require_extra("tqdm", "demo").tqdm
    tqdm.set_lock(threading.RLock())  # the default is a semaphore, which outlives a killed process
    train, test = load_digits()
    jobs = [(kind, settings.seed + run) for run in range(settings.runs) for kind in KINDS]
    results = []
    for kind, seed in tqdm(jobs, unit="network", leave=False, disable=None if dist.get_rank() == 0 else True):
        results.append(_train(kind, seed, train, test, settings))
        if kind == KINDS[-1] and dist.get_rank() == 0:
            latest = results[-len(KINDS) :]
            tqdm.write(f"seed {seed}: " + ", ".join(f"{r['kind']} {100 * r['accuracy']:.1f} %" for r in latest))
    return results


def _train(kind: str, seed: int, train: TensorDataset, test: TensorDataset, settings: Settings) -> dict[str, Any]:
    device = f"cuda:{torch.cuda.current_device()}" if settings.device == "cuda" else "cpu"
    # Every rank draws different weights and sketches: if they agree later, it is by communication.
    torch.manual_seed(seed + 1000 * dist.get_rank())
    model = build(kind, settings.hidden, settings.sketch_size).to(device)
    with CommunicationCounter() as sketch_traffic:
        if kind == "sketched":
            sync_sketches(model)
    batch = max(1, BATCH_SIZE // dist.get_world_size())
    data = DataLoader(train, batch, shuffle=True)
    steps = -(-len(train) // (batch * dist.get_world_size()))
    config = TrainConfig(  # with the same seed, every kind sees the same batches in the same order
        epochs=settings.epochs,
        strategy="ddp",
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=settings.epochs * steps * 3 // 10,
        seed=seed,
        log_every_n_steps=steps,
        progress=False,
    )
    trainer = Trainer(model, torch.optim.Adam, F.cross_entropy, config)
    history = trainer.fit(data)
    x, y = next(iter(data))
    loss = F.cross_entropy(trainer.model(x.to(device)), y.to(device))
    with CommunicationCounter() as gradient_traffic:
        loss.backward()

    result = {
        "kind": kind,
        "seed": seed,
        "seconds_per_epoch": len(train) / statistics.median(history["samples_per_s"][1]),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gradient_bytes": gradient_traffic.bytes,
        "sketch_bytes": sketch_traffic.bytes,
        "accuracy": accuracy(model, test, device),
    }
    if dist.get_rank() == 0:
        folder = save_compressed(model, Path(settings.out) / f"{kind}-{seed}")
        result["folder"] = str(folder)
        result["weight_bytes"] = (folder / "model.safetensors").stat().st_size
    return result


def evaluate_saved(folders: dict[str, str], settings: Settings) -> dict[str, float]:
    """Return the test accuracy of saved networks by folder; each is rebuilt from a plain architecture."""
    _, test = load_digits()
    accuracies = {}
    for folder, kind in folders.items():
        plain_kind = "dense" if kind in ("sketched", "Monarch") else kind
        architecture = build(plain_kind, settings.hidden, settings.sketch_size)
        model = load_compressed(folder, architecture.to(settings.device))
        accuracies[folder] = accuracy(model, test, settings.device)
    return accuracies

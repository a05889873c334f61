"""Optimizers with small states on a model of characters: loss at equal steps, bytes of the states, and time.

The model of ``benchmarks.trials.text_model`` with two blocks is trained on the text of Python's library, for equal
steps with the same batches. Every optimizer runs at several learning rates with one seed, and at its best rate with two
more. Embeddings, the head and vectors get AdamW from all of them. *State MB* is what the optimizer holds beside the
parameters, *loss* the mean over held-out text in nats a character.
"""

__all__ = ["OPTIMIZERS", "Run", "measured", "run"]

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import panther as pr
from benchmarks.harness import commit, figure, keep_freed_memory, print_table, write_csv
from benchmarks.trials.text_model import Shape, TextModel, blocks, gather

_BETAS = (0.9, 0.98)
_HELD_OUT = 64  # samples


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        optimizer: A name of ``OPTIMIZERS``.
        lr: Peak learning rate, after a warm-up over a twentieth of the steps; a cosine takes it down to a hundredth.
        seed: Seed of the model, of the batches and of the projections.
        steps: Number of steps.
        width: Width of the model.
        batch: Samples of a batch.
    """

    optimizer: str
    lr: float
    seed: int = 0
    steps: int = 300
    width: int = 192
    batch: int = 16


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=_BETAS)


def _muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    def is_hidden(name: str, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear) and name != "head"

    groups = pr.optim.param_groups(model, lr=lr, factor_lr=lr, include=is_hidden)
    return pr.optim.MuonAdamW(groups, betas=_BETAS)


def _sketched(rank: int, update: str) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    def make(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        groups = pr.optim.sketched_param_groups(model, rank=rank, lr=lr, weight_decay=0.1)
        return pr.optim.SketchedAdamW(groups, rank=rank, update=update, betas=_BETAS, seed=0)

    return make


OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "AdamW": _adamw,
    "Muon": _muon,
    **{f"channel, rank {rank}": _sketched(rank, "channel") for rank in (48, 24, 8)},
    "tensor, rank 1": _sketched(1, "tensor"),
    **{f"projected, rank {rank}": _sketched(rank, "projected") for rank in (48, 24)},
}
RATES = (3e-3, 6e-3, 1.2e-2, 2.4e-2)


def measured(settings: Run, text: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Train once, and return the row."""
    torch.manual_seed(settings.seed)
    model = TextModel(Shape(width=settings.width, hidden=4 * settings.width, layers=2))
    optimizer = OPTIMIZERS[settings.optimizer](model, settings.lr)
    steps, warm_up = settings.steps, max(1, settings.steps // 20)

    def rate(step: int) -> float:
        return min((step + 1) / warm_up, 0.505 + 0.495 * math.cos(math.pi * max(0, step - warm_up) / (steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    start, step_s = time.process_time(), 0.0
    for step in range(steps):
        samples = blocks(text, model.shape.context + 1, settings.batch, 1000 * settings.seed + step)
        loss = functional.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = time.process_time()
        optimizer.step()
        step_s += time.process_time() - before
        schedule.step()
    train_s = time.process_time() - start
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        **asdict(settings),
        "loss": figure(_loss(model.eval(), held_out)),
        "state_numbers": sum(value.numel() for value in states if value.dim()),
        "state_mb": figure(sum(value.nbytes for value in states) / 1e6),
        "train_s": figure(train_s),
        "optimizer_s": figure(step_s),
        "row_commit": commit(),
    }


@torch.no_grad()
def _loss(model: TextModel, text: Tensor) -> float:
    samples = blocks(text, model.shape.context + 1, _HELD_OUT, 0)
    losses = [
        functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) for part in samples.split(16)
    ]
    return torch.stack(losses).mean().item()


def run(names: list[str], rates: tuple[float, ...] = RATES, *, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of optimizers: all rates with one seed, and the best rate with two more."""
    text, held_out = gather(40 if quick else None)
    sizes: dict[str, int] = {"steps": 4, "width": 48, "batch": 2} if quick else {}
    for name in names:
        sweep = []
        for lr in rates:
            sweep.append(measured(Run(name, lr, **sizes), text, held_out))
            yield sweep[-1]
        best = min(sweep, key=lambda row: row["loss"])
        for seed in (1, 2):
            yield measured(Run(name, best["lr"], seed, **sizes), text, held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    for measured_row in run(arguments.optimizer, RATES[:2] if arguments.quick else RATES, quick=arguments.quick):
        rows.append(measured_row)
        print_table(rows[-1:])
        if not arguments.quick:
            write_csv("optimizers", rows, device="cpu")

"""Kinds of sketches for the moments of SketchedAdamW, and what happens to the moments when the projection changes.

A small model of characters is trained for equal steps with equal batches; only the projection P (rank x n), or the
moments at the beginning of a period, differ. The period is short, so that a run has several.
``sign, kept`` is what :class:`panther.optim.SketchedAdamW` does. *Loss* is the mean over held-out text in nats a
character; seeds change the model, the batches and the projections.

Moments: ``kept`` changes nothing. ``transferred`` replaces the first moment M by M P_old P_new^T, the sketch of the
gradient that M stands for; ``damped`` multiplies this by rank / (rank + n), which is the best factor for a mean of one
gradient; ``zero`` begins the first moment anew. The second moment is kept in all of them, because its expectation, the
squared norm of a row divided by the rank, is equal for all projections.
"""

__all__ = ["KINDS", "MOMENTS", "run"]

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

import panther as pr
from benchmarks.harness import commit, figure, print_table, write_csv
from benchmarks.trials.text_model import Shape, TextModel, blocks, gather
from panther.optim.sketched_update import SketchedUpdate, projection_seed

KINDS = ("sign", "gaussian", "sparse, 4 a column", "count sketch")
MOMENTS = ("kept", "transferred", "damped", "zero")
UPDATES = (("channel", 24), ("projected", 24), ("tensor", 1))
_PERIOD = 50
_LR = 6e-3
_BETAS = (0.9, 0.98)
_HELD_OUT = 64  # samples
Make: TypeAlias = Callable[[nn.Module, float], torch.optim.Optimizer]
"""A function of a model and a learning rate."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        optimizer: The update and its rank.
        lr: Peak learning rate, after a warm-up over a twentieth of the steps; a cosine takes it down to a hundredth.
        seed: Seed of the model, of the batches and of the projections.
        steps: Number of steps.
        width: Width of the model.
        batch: Samples of a batch.
    """

    optimizer: str
    lr: float
    seed: int
    steps: int
    width: int
    batch: int


def _projection(kind: str, seed: int, rank: int, size: int) -> Tensor:  # (rank, size), columns of norm sqrt(rank)
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(rank, size, generator=generator)
    # Entries +1 and -1 in some rows of each column.
    count = 1 if kind == "count sketch" else min(4, rank)
    rows = torch.rand(rank, size, generator=generator).argsort(0)[:count]
    signs = torch.randint(2, rows.shape, generator=generator).float().mul_(2).sub_(1)
    return torch.zeros(rank, size).scatter_(0, rows, signs).mul_((rank / count) ** 0.5)


class _Update(SketchedUpdate):
    """An update with another kind of projection, or with other moments at the beginning of a period."""

    kind = KINDS[0]
    moments = MOMENTS[0]

    def __init__(
        self, name: str, parameter: Tensor, group: dict[str, Any], state: dict[str, Any], layout: Any, signs: Any
    ) -> None:
        super().__init__(name, parameter, group, state, layout, signs)
        step = int(state["step"]) - 1
        if self.moments == "kept" or step == 0 or step % group["period"]:
            return
        first = self._oriented(state["sketch_avg"])  # a view (rows, rank)
        if self.moments == "zero":
            first.zero_()
            return
        seed = self._seed
        self._seed = projection_seed(name, group["seed"], step // group["period"] - 1)
        first_signs = self.signs()
        self._seed = seed
        size = first_signs.shape[1]
        factor = self.rank / (self.rank + size) if self.moments == "damped" else 1.0
        first.copy_(first @ (first_signs @ self.signs().mT) * (factor / self.rank))

    def signs(self) -> Tensor:
        if self.kind == "sign":
            return super().signs()
        return _projection(self.kind, self._seed, self.rank, min(self._parameter.shape))


def _maker(update: str, rank: int, kind: str, moments: str, seed: int) -> Make:
    class Variant(pr.optim.SketchedAdamW):
        _update_class = type("Update", (_Update,), {"kind": kind, "moments": moments})

    def make(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        groups = pr.optim.sketched_param_groups(model, rank=rank, lr=lr, weight_decay=0.1)
        return Variant(groups, rank=rank, update=update, period=_PERIOD, betas=_BETAS, seed=seed)

    return make


def _measured(settings: Run, training: Tensor, held_out: Tensor, make: Make) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    model = TextModel(Shape(width=settings.width, hidden=4 * settings.width, layers=2))
    optimizer = make(model, settings.lr)
    steps, warm_up = settings.steps, max(1, settings.steps // 20)

    def rate(step: int) -> float:
        return min((step + 1) / warm_up, 0.505 + 0.495 * math.cos(math.pi * max(0, step - warm_up) / (steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    start, step_s = time.process_time(), 0.0
    for step in range(steps):
        samples = blocks(training, model.shape.context + 1, settings.batch, 1000 * settings.seed + step)
        loss = functional.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        start_s = time.process_time()
        optimizer.step()
        step_s += time.process_time() - start_s
        schedule.step()
    train_s = time.process_time() - start
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        **asdict(settings),
        "loss": round(_loss(model.eval(), held_out), 4),
        "state_numbers": sum(value.numel() for value in states if value.dim()),
        "train_s": figure(train_s),
        "optimizer_s": figure(step_s),
        "row_commit": commit(),
    }


@torch.no_grad()
def _loss(model: TextModel, held_out: Tensor) -> float:
    samples = blocks(held_out, model.shape.context + 1, _HELD_OUT, 0)
    losses = [
        functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) for part in samples.split(16)
    ]
    return torch.stack(losses).mean().item()


def run(
    updates: Sequence[tuple[str, int]] = UPDATES, seeds: tuple[int, ...] = (0, 1), *, quick: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a row for each update, kind of sketch, rule for the moments and seed."""
    training, held_out = gather(40 if quick else None)
    sizes: dict[str, int] = {"steps": 4, "width": 48, "batch": 2} if quick else {"steps": 250, "width": 96, "batch": 8}
    variants = [(kind, MOMENTS[0]) for kind in KINDS] + [(KINDS[0], moments) for moments in MOMENTS[1:]]
    for seed in seeds:
        for update, rank in updates:
            for kind, moments in variants:
                make = _maker(update, rank, kind, moments, seed)
                row = _measured(Run(f"{update}, rank {rank}", _LR, seed, **sizes), training, held_out, make)
                yield {"kind": kind, "moments": moments, "period": _PERIOD, **row}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for measured_row in run(seeds=(0,) if arguments.quick else (0, 1), quick=arguments.quick):
        rows.append(measured_row)
        print_table(rows[-1:])
        if not arguments.quick:
            write_csv("sketch-variants", rows, device="cpu")

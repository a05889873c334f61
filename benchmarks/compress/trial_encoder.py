"""pr.compress on a transformer trained on the text of trials/text_model.py, measured on held-out documents.

A causal language model of characters: 4 layers of width 192 whose 24 linear layers hold 1.77 M numbers; the last layer
shares the embedding's weight and is left. The first run trains it, and the smaller ones that it is compared to, and
keeps them in the cache: an hour on one core, and comparing takes another.
"""

__all__ = ["run"]

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.compress.comparison import BOUND_AT, BUDGETS, Task, compare, distance, main
from benchmarks.trials.text_model import Shape, TextModel, blocks, gather, train, trained, twin

STEPS, RATE = 2600, 2e-3
QUICK, QUICK_STEPS, QUICK_RATE = Shape(width=64, hidden=256, layers=2, heads=4, context=32), 300, 6e-3


def run(quick: bool, cache: Path | None) -> list[dict[str, Any]]:
    """Train or load, compress by every method, and return the rows."""
    shape, steps, lr = (QUICK, QUICK_STEPS, QUICK_RATE) if quick else (Shape(), STEPS, RATE)
    training, held_out = gather(limit=200 if quick else None)
    print(f"{len(training):,} characters to train on, {len(held_out):,} held out")
    model, train_s = trained(shape, training, steps=steps, lr=lr, cache=cache)
    pieces = blocks(held_out, shape.context + 1, 200 if quick else 400, seed=1)
    tokens, labels = pieces[:, :-1], pieces[:, 1:].flatten()

    @torch.no_grad()
    def logits(model: nn.Module) -> torch.Tensor:
        return torch.cat([model(part).flatten(0, 1) for part in tokens.split(100)])

    original = logits(model)

    def evaluate(model: nn.Module) -> dict[str, float]:
        output = logits(model)
        loss = functional.cross_entropy(output, labels).item()
        accuracy = (output.argmax(-1) == labels).double().mean().item()
        return {"loss": loss, "accuracy": accuracy, **distance(output, original)}

    def smaller(kept: float) -> tuple[nn.Module, float]:
        return trained(twin(shape, kept), training, steps=steps, lr=lr, cache=cache)

    def train_on(model: nn.Module) -> TextModel:
        assert isinstance(model, TextModel)
        return train(model, training, steps=steps // 4, lr=5e-4, seed=10**6)

    calibration = list(blocks(training, shape.context, 16 * (24 if quick else 40), seed=2).split(16))
    task = Task(model, train_s, calibration, evaluate, smaller, train_on, 30 if quick else 300)
    return compare(task, (BOUND_AT,) if quick else BUDGETS, None if quick else BOUND_AT)


if __name__ == "__main__":
    main(run, "compress-encoder", __doc__)

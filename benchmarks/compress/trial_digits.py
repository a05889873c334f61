"""pr.compress on a convolutional net trained on scikit-learn's digits, 8 by 8 pixels, a third of them held out."""

__all__ = ["DigitNet", "run", "twin"]

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.compress.comparison import BOUND_AT, BUDGETS, Task, compare, distance, main
from panther.errors import require_extra

CHANNELS = (32, 64, 128)
STEPS, QUICK_STEPS = 1500, 100


class DigitNet(nn.Module):
    """Three convolutions with norms, the second one pooled, their mean over the image, and a linear layer."""

    def __init__(self, channels: tuple[int, int, int]) -> None:
        super().__init__()
        sizes = (1, *channels)
        self.convs = nn.ModuleList(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False) for inner, outer in zip(sizes, channels, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in channels)
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 1, 8, 8)`` to ``(batch, 10)``."""
        for index, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = functional.relu(norm(conv(x)))
            x = functional.max_pool2d(x, 2) if index == 1 else x
        return self.head(x.mean((2, 3)))


def twin(kept: float) -> tuple[int, int, int]:
    """Return the most channels, in the original's proportions, that hold at most the kept fraction of its numbers."""

    def numbers(channels: tuple[int, int, int]) -> int:
        a, b, c = channels
        return 9 * a * (1 + b) + 9 * b * c + 10 * c

    scaled = [(size // 4, size // 2, size) for size in range(8, CHANNELS[-1] + 1)]
    return max(channels for channels in scaled if numbers(channels) <= kept * numbers(CHANNELS))


def train(net: DigitNet, images: Tensor, labels: Tensor, *, steps: int, lr: float = 3e-3, seed: int = 0) -> DigitNet:
    """Train by AdamW on images moved by up to a pixel, one cycle of the rate."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    padded = functional.pad(images, (1, 1, 1, 1))
    net.train()
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,), generator=generator)
        down, right = torch.randint(3, (2,), generator=generator).tolist()
        output = net(padded[chosen, :, down : down + 8, right : right + 8])
        loss = functional.cross_entropy(output, labels[chosen], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


def run(quick: bool, cache: Path | None) -> list[dict[str, Any]]:
    """Train, compress by every method, and return the rows; a model that trains in a minute needs no cache."""
    digits = require_extra("sklearn.datasets", "bench").load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    held_out = len(labels) // 3
    steps = QUICK_STEPS if quick else STEPS

    def trained(channels: tuple[int, int, int]) -> tuple[DigitNet, float]:
        torch.manual_seed(0)
        start = time.process_time()
        net = train(DigitNet(channels), images[held_out:], labels[held_out:], steps=steps)
        return net, time.process_time() - start

    net, train_s = trained(CHANNELS)
    with torch.no_grad():
        original = net(images[:held_out])

    @torch.no_grad()
    def evaluate(net: nn.Module) -> dict[str, float]:
        output = net(images[:held_out])
        loss = functional.cross_entropy(output, labels[:held_out]).item()
        accuracy = (output.argmax(-1) == labels[:held_out]).double().mean().item()
        return {"loss": loss, "accuracy": accuracy, **distance(output, original)}

    def smaller(kept: float) -> tuple[nn.Module, float]:
        return trained(twin(kept))

    def train_on(net: nn.Module) -> DigitNet:
        assert isinstance(net, DigitNet)
        return train(net, images[held_out:], labels[held_out:], steps=steps // 4, lr=5e-4, seed=1)

    calibration = list(images[held_out:].split(64))
    task = Task(net, train_s, calibration, evaluate, smaller, train_on, 30 if quick else 300)
    return compare(task, (BOUND_AT,) if quick else BUDGETS, None if quick else BOUND_AT)


if __name__ == "__main__":
    main(run, "compress-digits", __doc__)

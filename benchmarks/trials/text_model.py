"""A small causal language model of characters and the text it is trained on, for the trial of pr.compress.

The text is what any machine with Python has: the standard library's sources with their docstrings, without tests and
character tables, and the licences of /usr/share/common-licenses where there are any (Debian has them). Equal documents
count once; a twentieth of the documents, by the hash of their text, is held out whole.
"""

__all__ = ["SYMBOLS", "Shape", "TextModel", "blocks", "gather", "train", "twin"]

import hashlib
import math
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

LICENCES = Path("/usr/share/common-licenses")
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "ensurepip", "__pycache__"}
SYMBOLS = 98  # the end of a document, what is not ASCII, newline, and the 95 printable characters


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; ``hidden`` is the width between the two layers of a feed-forward part."""

    width: int = 192
    hidden: int = 768
    layers: int = 4
    heads: int = 6
    context: int = 128


class Block(nn.Module):
    """Attention, causal or not, and a feed-forward part, each after a norm and added to what came in."""

    def __init__(self, shape: Shape, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(shape.width, shape.hidden), nn.Linear(shape.hidden, shape.width)
        for layer in (self.q, self.k, self.v, self.o, self.up, self.down):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5 / 2)
        with torch.no_grad():
            for layer in (self.o, self.down):
                layer.weight /= math.sqrt(2 * shape.layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, context, width)`` to the same shape."""
        h = self.norm_1(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        # (batch, heads, context, width / heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class TextModel(nn.Module):
    """Logits of the next character; the last layer shares the embedding's weight."""

    def __init__(self, shape: Shape, symbols: int = SYMBOLS) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(symbols, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, symbols, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(batch, context)`` to ``(batch, context, symbols)``."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def twin(
    shape: Shape, kept: float, beside: int | None = None, *, width: int | None = None, attention: float = 4.0
) -> Shape:
    """Return the narrower shape of as many numbers in all as ``shape`` has once its layers keep ``kept`` of theirs.

    ``beside`` is how many numbers for each feature a model has outside its blocks; None is what TextModel has. The
    width is the root of ``kept`` times that of ``shape`` if it is not given; ``attention`` is how many numbers the
    layers of attention of the narrower shape have, as a multiple of its squared width.
    """
    outside = (SYMBOLS + shape.context if beside is None else beside) / shape.layers
    layers = kept * (4 * shape.width**2 + 2 * shape.width * shape.hidden)
    room = layers + 5 * shape.width + shape.hidden + outside * shape.width
    width = width or int(shape.width * math.sqrt(kept)) // shape.heads * shape.heads
    hidden = (room - attention * width**2 - (5 + outside) * width) / (2 * width + 1)
    return replace(shape, width=width, hidden=int(hidden))


def gather(limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the text as symbols, to train on and held out; at most ``limit`` documents, for a quick run."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = (path for path in library.rglob("*.py") if not LEFT_OUT & set(path.relative_to(library).parts))
    licences = LICENCES.iterdir() if LICENCES.is_dir() else ()
    seen: dict[str, bytes] = {}
    for path in sorted((*sources, *licences), key=lambda path: (path.name, str(path)))[:limit]:
        content = path.read_bytes()
        if len(content) >= 500:
            seen.setdefault(hashlib.sha256(content).hexdigest(), content)
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    for digest in sorted(seen):
        kept[int(digest, 16) % 20 == 0].append(_encode(seen[digest]))
    return torch.cat(kept[0]), torch.cat(kept[1])


def _encode(content: bytes) -> Tensor:
    codes = torch.frombuffer(
        bytearray(content.decode("utf-8", "replace").expandtabs(4).encode("ascii", "replace")), dtype=torch.uint8
    )
    codes = codes[codes != ord("\r")].long()
    symbols = torch.where(codes == ord("\n"), 2, torch.where((codes < 32) | (codes > 126), 1, codes - 29))
    return torch.cat((symbols, torch.zeros(1, dtype=torch.long)))


def blocks(characters: Tensor, length: int, count: int, seed: int) -> Tensor:
    """Return ``count`` samples of the text, ``(count, length)``, from positions that the seed draws."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(characters) - length, (count, 1), generator=generator)
    return characters[starts + torch.arange(length)]


def train(
    model: TextModel,
    characters: Tensor,
    *,
    steps: int,
    batch: int = 16,
    lr: float = 2e-3,
    seed: int = 0,
    log_every: int = 200,
) -> TextModel:
    """Train by AdamW, with a warm-up over a twentieth of the steps and a cosine down to a hundredth of the rate."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    warm_up = max(1, steps // 20)

    def rate(step: int) -> float:
        return min((step + 1) / warm_up, 0.505 + 0.495 * math.cos(math.pi * max(0, step - warm_up) / (steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    start, total = time.process_time(), 0.0
    for step in range(1, steps + 1):
        pieces = blocks(characters, model.shape.context + 1, batch, seed + step)
        loss = functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % log_every == 0:
            print(f"  step {step} loss {total / log_every:.4f} {time.process_time() - start:.0f} s", flush=True)
            total = 0.0
    return model


def trained(
    shape: Shape, characters: Tensor, *, steps: int, lr: float = 2e-3, cache: Path | None = None, seed: int = 0
) -> tuple[TextModel, float]:
    """Return a trained model and the CPU seconds its training took, from the cache if it is there."""
    torch.manual_seed(seed)
    model = TextModel(shape)
    digest = hashlib.sha256(characters.to(torch.uint8).numpy().tobytes()).hexdigest()[:8]
    name = f"text-{shape.width}-{shape.hidden}-{shape.layers}-{shape.heads}-{shape.context}-{steps}-{seed}-{digest}.pt"
    if cache and (cache / name).exists():
        kept = torch.load(cache / name, weights_only=True)
        model.load_state_dict(kept["model"])
        return model.eval(), kept["train_s"]
    print(f"training {shape} for {steps} steps", flush=True)
    start = time.process_time()
    train(model, characters, steps=steps, lr=lr, seed=seed)
    train_s = time.process_time() - start
    if cache:
        cache.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "train_s": train_s}, cache / name)
    return model.eval(), train_s

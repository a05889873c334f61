"""
Compress an encoder to half
===========================

:func:`panther.compress` makes a trained model smaller within one budget. This example trains a small text encoder,
compresses it to half of its bytes by low rank alone, reads the report, compares the methods, and saves and loads the
result.
"""

import copy
import os
import re
import tempfile
import zlib
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn

import panther as pr

# Smaller sizes, with which the documentation is checked.
QUICK = "PANTHER_DOCS_QUICK" in os.environ

# %%
# A trained encoder
# -----------------
#
# Python brings the text of its language reference. The encoder reads 24 words of it, numbered by a hash, and says which
# of twelve topics they are from. Every fifth passage is held out.

length, width, vocabulary = 24, 128, 1024
names = sorted(topics, key=lambda name: -len(topics[name]))[:12]
x, y = [], []
for label, name in enumerate(names):
    tokens = re.findall(r"\w+|[^\w\s]", topics[name])[: 24 * 150]
    numbers = torch.tensor(
        [zlib.crc32(word.encode()) % vocabulary for word in tokens]
    )
    x.append(
        numbers[: len(numbers) // length * length].view(-1, length)
    )
    y.append(torch.full((len(x[-1]),), label))
x, y = torch.cat(x), torch.cat(y)
held_out = torch.arange(len(x)) % 5 == 0
training = (~held_out).nonzero().flatten()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, h):
        q, k, v = (
            self.qkv(self.norm1(h))
            .unflatten(-1, (3, 4, -1))
            .permute(2, 0, 3, 1, 4)
        )
        h = h + self.out(
            nn.functional.scaled_dot_product_attention(q, k, v)
            .transpose(1, 2)
            .flatten(2)
        )
        return h + self.down(nn.functional.gelu(self.up(self.norm2(h))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(Block(), Block())
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, len(names))

    def forward(self, tokens):  # (batch, length)
        h = self.blocks(
            self.dropout(self.embedding(tokens) + self.position)
        )
        return self.head(self.dropout(h.mean(dim=1)))


def accuracy(model):
    model.eval()
    with torch.no_grad():
        right = [
            model(part).argmax(1) for part in x[held_out].split(256)
        ]
    return (torch.cat(right) == y[held_out]).float().mean().item()


model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
steps = 60 if QUICK else 500
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
for _ in range(steps):
    model.train()
    batch = training[torch.randint(len(training), (16,))]
    loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
model.eval()
print(
    f"{len(training)} passages, accuracy on held-out passages "
    f"{accuracy(model):.3f}; chance is {1 / len(names):.3f}"
)

# %%
# Compress
# --------
#
# The calibration needs inputs and no labels. ``forms="low_rank"`` allows factors only; without it, quantized forms take
# part too (:doc:`/howto/compress`). The model is changed in place, so this compresses a copy.

calibration = list(
    x[
        training[
            torch.randperm(len(training))[: 256 if QUICK else 1024]
        ]
    ].split(64)
)
small = copy.deepcopy(model)
report = pr.compress(
    small,
    budget=0.5,
    calibration=calibration,
    forms="low_rank",
    seed=0,
    measure_speed=False,
)
print(report)

# %%
# Each layer has its own rank: one threshold over all layers gives every byte to the layer that needs it most. The whole
# model is larger than half: embeddings take codes alone, so they stay dense where only low rank is allowed.

share = report.bytes_after / report.bytes_before
print(
    f"before {accuracy(model):.3f}, after {accuracy(small):.3f} with "
    f"{share:.0%} of the bytes"
)

# %%
# Methods and budgets
# -------------------
#
# ``"two_sided"``, the default, weights an error by the layer's inputs and by its effect on the output; ``"activation"``
# by the inputs only; ``"svd"`` ignores the data.

budgets = (0.5,) if QUICK else (0.15, 0.3, 0.5, 0.75)
found = {}
for method in ("two_sided", "activation", "svd"):
    found[method] = []
    for budget in budgets:
        trial = copy.deepcopy(model)
        pr.compress(
            trial,
            budget,
            calibration,
            method=method,
            forms="low_rank",
            seed=0,
            measure_speed=False,
        )
        found[method].append(accuracy(trial))
    print(f"{method:10}", " ".join(f"{a:.3f}" for a in found[method]))

figure, (left, right) = plt.subplots(1, 2)
for method, accuracies in found.items():
    left.plot(
        [100 * b for b in budgets], accuracies, marker="o", label=method
    )
left.axhline(
    accuracy(model), color="gray", linestyle=":", label="original"
)
left.set(
    xlabel="budget, % of the eligible bytes",
    ylabel="accuracy, held out",
)
left.legend()
layers = [layer for layer in report.layers if layer.rank]
right.barh(
    [layer.names[0].removeprefix("blocks.") for layer in layers],
    [layer.rank for layer in layers],
)
right.invert_yaxis()
right.set(xlabel="rank at half of the bytes", title="layers")
plt.show()

# %%
# Save and load
# -------------
#
# The folder has no pickles. A new, dense ``Encoder`` becomes the compressed one.

with tempfile.TemporaryDirectory() as folder:
    pr.save_compressed(small, folder)
    restored = pr.load_compressed(folder, Encoder()).eval()
with torch.no_grad():
    print(
        "identical outputs:", torch.equal(restored(x[:8]), small(x[:8]))
    )

# %%
# :doc:`/howto/compress` has all budgets, forms and settings; :doc:`/benchmarks/compress` has pretrained models.

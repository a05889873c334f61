"""Models whose parts run one by one: blocks, and layers outside of them, with batches for these models."""

import torch
from torch import nn


class Block(nn.Module):
    """A residual block of the model's width."""

    def __init__(self, width=24):
        super().__init__()
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks, and layers before and after them; sub-classes run them in their own way."""

    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Linear(16, 24), nn.Linear(24, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


class Skips(Model):
    """Results that several later parts read, in both directions."""

    def forward(self, x):
        results = [self.start(x)]
        for block in self.blocks:
            results.append(block(sum(results)))
        return self.end(results[-1] * results[0].sigmoid())


class Tables(nn.Module):
    """A table that is also the head, and one that no batch reaches."""

    def __init__(self):
        super().__init__()
        self.table, self.idle = nn.Embedding(40, 24), nn.Embedding(30, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table((x.abs() * 20).long().clamp(max=39))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(width=16, count=6):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5 + i % 2, 7, width, generator=generator).double() for i in range(count)]

"""Models that somebody else wrote, for the tests of pr.compress: a network, its inputs and its true error.

Each test has a model with one habit. Expected is that the reported error is the error that the user measures, that the
batches and the model are as they were in everything but the replaced layers, and that the habit changes no figure.
"""

import copy
import random

import numpy as np
import torch
from compressing import low_rank
from torch import nn

import panther as pr

WIDTH = 32


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def inputs(count=6, rows=64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]


class Model(nn.Module):
    """A network of two layers; subclasses have habits."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x):
        return self.network(x)


def relative_error(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


@torch.no_grad()
def true_error(model, exact, batch, call=lambda model, batch: model(batch)):
    """Return the error as a user measures it: each model in eval mode, with its own batch and the same generators."""
    outputs = []
    for each in (model, exact):
        torch.manual_seed(9)
        random.seed(9)
        np.random.seed(9)
        outputs.append(call(each.eval(), copy.deepcopy(batch)))
    return relative_error(*outputs)


def compressed(model, batches, budget=0.3, **options):
    """Compress a model; return the report, the original, and the held-out batch, which is the last one."""
    exact = copy.deepcopy(model)
    return pr.compress(model, budget, batches, **{**low_rank, **options}), exact, batches[-1]

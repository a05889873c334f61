"""A small model with new layers for its blocks, and healing as compress runs it."""

__all__ = [
    "WIDTH",
    "Block",
    "compressed",
    "data",
    "distance",
    "healed",
    "runner_of",
    "same",
    "state",
]

import copy

import torch
from torch import nn

from panther.compression import HealConfig
from panther.compression.calibration.runner import Runner
from panther.compression.calibration.targets import swap_modules
from panther.compression.healing import heal
from panther.nn import LowRankLinear

WIDTH = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


def compressed(dtype=torch.float32, rank=4):
    """A model of two blocks and a head, and new layers for those of the blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))
    for p in model.parameters():
        if p.ndim == 2:
            p.data.mul_(2)  # so that blocks do something
    model.to(dtype)
    layers = [getattr(block, name) for block in model[:2] for name in ("up", "down")]
    return model, {dense: LowRankLinear.from_linear(dense, 2 * rank, seed=1) for dense in layers}


def data(count=12, dtype=torch.float32, seed=1):
    """Batches (8, 6, WIDTH) of inputs in a subspace of 6 dimensions: what plain SVD of a weight does not know."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(9))
    return [(torch.randn(8, 6, 6, generator=generator) @ mix / 2).to(dtype) for _ in range(count)]


def runner_of(model, *, batches=None, held_out=None, call=None, mask=None, group=None):
    dtype = next(model.parameters()).dtype
    runner = Runner(model, data(2), call, mask, group, False)
    runner.batches = data(dtype=dtype)[:9] if batches is None else batches
    runner.held_out = data(dtype=dtype)[9:] if held_out is None else held_out
    runner.difference = 0.0  # which compress measures before it heals
    return runner


def healed(model, new, *, seed=0, **options):
    """Heal, put the result into the model as compress does, and return what happened."""
    names = ("batches", "held_out", "call", "mask", "group")
    runner = runner_of(model, **{name: options.pop(name) for name in names if name in options})
    config = HealConfig(**{"max_steps": 40, "validate_every_n_steps": 10, "learning_rate": 5e-3} | options)
    result, write_ = heal(runner, new, config, seed=seed)
    write_()
    swap_modules(model, new)
    return result


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def distance(model, new, batches):
    """Relative squared error of the compressed model's output against the original's."""
    originals = {layer: dense for dense, layer in new.items()}
    x = torch.cat(batches)
    with torch.no_grad():
        output = copy.deepcopy(model).eval()(x).double()
        swap_modules(model, originals)
        wanted = copy.deepcopy(model).eval()(x).double()
        swap_modules(model, new)
    return ((output - wanted).square().mean() / wanted.var()).item()

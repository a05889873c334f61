"""Kinds of linear layers in a network that is trained from scratch: loss at equal steps and at equal time.

The hidden layers of a network are replaced by layers with a quarter or a tenth of their numbers: an SKLinear with
sparse sketches or with dense signs, a MonarchLinear, or a pair of factors. Beside them stand the dense network, and the
widest narrower one that has at most as many numbers. The tasks, the sweep of learning rates and the rows are those of
trial_optimizers.py. Each kind is trained at the dense network's best rate too, with one seed, and swept with Muon, with
SketchedAdamW, and with AdamW at the rates that layers state.
"""

__all__ = ["DENSE", "DENSE_RATES", "FRACTIONS", "KINDS", "METHODS", "OTHER_OPTIMIZERS", "sketch_rank", "with_layers"]

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import panther as pr
from benchmarks.train.optimizer_methods import (
    BETAS,
    DECAY,
    Method,
    adamw,
    hidden_layers,
    muon,
    replace_layer,
    sketched_adamw,
    whole,
)
from benchmarks.train.optimizer_tasks import OptimizerTask
from benchmarks.train.scratch_forms import LowRank
from benchmarks.train.trial_optimizers import main
from panther.errors import PerformanceWarning

DENSE = "dense"
FRACTIONS = {"a quarter": 0.25, "a tenth": 0.1}
WIDTHS = (192, 512)
DENSE_RATES = (1.5e-3,)
Builder = Callable[[int, int, float, bool], nn.Module]


def sketch_rank(in_features: int, out_features: int, fraction: float) -> int:
    """Return the R at which two factors have a fraction of a dense layer's numbers."""
    return max(1, round(fraction * in_features * out_features / (in_features + out_features)))


def _pair(in_features: int, out_features: int, fraction: float, bias: bool) -> nn.Module:
    return LowRank(in_features, out_features, sketch_rank(in_features, out_features, fraction), bias)


def _sketched(sketch: str) -> Builder:
    def build(in_features: int, out_features: int, fraction: float, bias: bool) -> nn.Module:
        rank = sketch_rank(in_features, out_features, fraction)
        return pr.nn.SKLinear(in_features, out_features, rank, bias=bias, sketch=sketch)

    return build


def _monarch(in_features: int, out_features: int, fraction: float, bias: bool) -> nn.Module:
    return pr.nn.MonarchLinear(in_features, out_features, fraction=fraction, bias=bias)


def with_layers(build: Builder, fraction: float, task: OptimizerTask) -> nn.Module:
    """Return the network of a task with small hidden layers, whose outputs begin with the size of the dense ones'."""
    model = task.build(1.0)
    for name, dense in hidden_layers(task, model).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # small layers, and a question of numbers
            layer = build(dense.in_features, dense.out_features, fraction, dense.bias is not None)
        _match_outputs(layer, dense)
        replace_layer(model, name, layer)
    return model


@torch.no_grad()
def _match_outputs(layer: Any, dense: nn.Linear) -> None:
    """Multiply the factors so that outputs have the size of the dense layer's; biases begin as the dense layer's."""
    factors = [p for p in layer.parameters() if p.ndim > 1]
    x = torch.randn(256, dense.in_features)
    bias = layer.bias
    layer.bias = None
    ratio = (nn.functional.linear(x, dense.weight).norm() / layer(x).norm()).item()
    layer.bias = bias
    if bias is not None:
        bias.copy_(dense.bias)
    power = 1 / len(factors) if isinstance(layer, LowRank | pr.nn.MonarchLinear) else 1.0  # else a sum of products
    for p in factors:
        p.mul_(ratio**power)


def narrower(fraction: float, task: OptimizerTask) -> nn.Module:
    """Return the widest network with at most as many numbers as the whole one with a fraction of its hidden ones."""
    model = task.build(1.0)
    hidden = sum(layer.weight.numel() for layer in hidden_layers(task, model).values())
    total = sum(p.numel() for p in model.parameters())
    return task.build(1 - (1 - fraction) * hidden / total)


KINDS: dict[str, tuple[Builder, tuple[float, ...]]] = {
    "sparse": (_sketched("sparse"), (3e-3,)),
    "signs": (_sketched("signs"), (1.5e-3,)),
    "pair": (_pair, (1.5e-3,)),
    "Monarch": (_monarch, (6e-3,)),
}
"""Functions that make a layer, and the learning rate that a sweep begins with."""


def _stated_rates(task: OptimizerTask, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW with one rate, times the factors that layers state."""
    return torch.optim.AdamW(pr.optim.sketched_param_groups(model, rank=None, lr=lr, weight_decay=DECAY), betas=BETAS)


OTHER_OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "stated rates": (_stated_rates, 1.5e-3),
    "Muon": (muon, 3e-3),
    "SketchedAdamW": (functools.partial(sketched_adamw, update="channel", rank=None), 6e-3),
}
"""Optimizers with the functions for parameter groups, and the learning rate that a sweep of one seed begins with."""
STACKS_RATE = 1.5e-3  # in place of SketchedAdamW's: AdamW moves the stacks of blocks of Monarch layers


def _methods() -> list[Method]:
    builders: dict[str, tuple[Callable[[OptimizerTask], nn.Module], tuple[float, ...]]] = {DENSE: (whole, DENSE_RATES)}
    for size, fraction in FRACTIONS.items():
        builders[f"narrower, {size}"] = functools.partial(narrower, fraction), DENSE_RATES
        for kind, (build, rates) in KINDS.items():
            builders[f"{kind}, {size}"] = functools.partial(with_layers, build, fraction), rates
    methods = [
        Method(name, network, adamw, rates, rate_of="" if name == DENSE else DENSE)
        for name, (network, rates) in builders.items()
    ]
    for other, (optimizer, lr) in OTHER_OPTIMIZERS.items():
        dense = DENSE if other == "stated rates" else f"{DENSE}, {other}"
        for name, (network, _) in builders.items():
            first = STACKS_RATE if name.startswith("Monarch") and other == "SketchedAdamW" else lr
            rate_of = "" if name == DENSE else dense
            methods.append(Method(f"{name}, {other}", network, optimizer, (first,), seeds=(0,), rate_of=rate_of))
    return methods


METHODS = {method.name: method for method in _methods()}

if __name__ == "__main__":
    main(METHODS, ["characters", "words", "images"], "layers", __doc__ or "", baseline=DENSE, widths=WIDTHS)

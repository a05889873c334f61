"""Ways to train a network of trial_optimizers.py: optimizers with large and small states, and smaller layers.

Embeddings, the last layer and vectors have the states of AdamW in all methods except for 8-bit AdamW and Adafactor.
Methods with a size (rank, R or width) have the largest size at which the states take at most a quarter of the memory
of AdamW's states, except for ``"tensor, rank 1"``.
"""

__all__ = [
    "BASELINE",
    "BETAS",
    "DECAY",
    "METHODS",
    "QUARTER",
    "Adapter",
    "Method",
    "adamw",
    "hidden_layers",
    "largest_size",
    "muon",
    "replace_layer",
    "sketched_adamw",
    "state_sizes",
    "whole",
]

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import panther as pr
from benchmarks.harness import figure
from benchmarks.train.optimizer_tasks import OptimizerTask
from panther.errors import PerformanceWarning, require_extra

BASELINE = "AdamW"
QUARTER = 0.25  # of the numbers that AdamW's states have
BETAS = (0.9, 0.98)
DECAY = 0.1
_FINE_TUNING = 0.02  # learning rates of pretrained networks, relative to those of random weights
_FIRST_RATES_WIDTH = 192  # of the networks whose best rates the first rates are near
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Method:
    """One way to train a network.

    Attributes:
        name: Name of the method.
        build: Return the network of a task.
        optimizer: Return the optimizer of this network at a learning rate.
        first_rates: Learning rates that a sweep begins with, for random weights and width 192.
        most_rates: Largest number of learning rates of a sweep.
        seeds: Seeds; the sweep has the first one.
        rate_of: Name of a method, measured before, at whose best learning rate the first seed is trained too.
    """

    name: str
    build: Callable[[OptimizerTask], nn.Module]
    optimizer: Callable[[OptimizerTask, nn.Module, float], Optimizer]
    first_rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    most_rates: int = 6
    seeds: tuple[int, ...] = (0, 1, 2)
    rate_of: str = ""

    def rates(self, task: OptimizerTask) -> tuple[float, ...]:
        """Return the learning rates that the sweep of a task begins with: lower ones for wide networks."""
        by_width = 2.0 ** min(0, round(math.log2(_FIRST_RATES_WIDTH / task.width)))  # keeps to the steps of 2
        factor = _FINE_TUNING if task.is_pretrained else by_width
        return tuple(figure(factor * lr) for lr in self.first_rates)


class Adapter(nn.Module):
    """A frozen linear layer and a trained product of two factors beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(*, in)`` to ``(*, out)``."""
        return self.layer(x) + functional.linear(functional.linear(x, self.A), self.B)


def whole(task: OptimizerTask) -> nn.Module:
    """Return the dense network of a task."""
    return task.build(1.0)


def hidden_layers(task: OptimizerTask, model: nn.Module) -> dict[str, nn.Linear]:
    """Return the hidden linear layers of a task's network by name."""
    layers = dict(model.named_modules())
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear) and task.is_hidden(name)}


def largest_size(numbers: Callable[[int], int], limit: float, most: int) -> int:
    """Return the largest size up to ``most`` that has at most ``limit`` numbers, and at least 1."""
    return max((size for size in range(1, most + 1) if numbers(size) <= limit), default=1)


def _trained_numbers(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _factor_size(task: OptimizerTask, model: nn.Module) -> int:
    """Return the number of rows R of two factors for each hidden layer: R (in + out) numbers, a quarter in all."""
    hidden = hidden_layers(task, model)
    total = _trained_numbers(model)
    beside = total - sum(layer.weight.numel() for layer in hidden.values())
    if task.is_pretrained:  # only the head is trained beside the factors
        beside = sum(p.numel() for name, p in model.named_parameters() if name.startswith("head."))
    sides = sum(layer.in_features + layer.out_features for layer in hidden.values())
    smallest_side = min(min(layer.weight.shape) for layer in hidden.values())
    return largest_size(lambda size: beside + size * sides, QUARTER * total, smallest_side)


def _with_adapters(task: OptimizerTask) -> nn.Module:
    model = task.build(1.0)
    rank = _factor_size(task, model)
    if task.is_pretrained:
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("head."))  # a new layer
    for name, layer in hidden_layers(task, model).items():
        replace_layer(model, name, Adapter(layer, rank))
    return model


def _with_sketched_layers(task: OptimizerTask) -> nn.Module:
    model = task.build(1.0)
    size = _factor_size(task, model)
    for name, layer in hidden_layers(task, model).items():
        has_bias = layer.bias is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # small layers, and a question of memory
            sketched = pr.nn.SKLinear(layer.in_features, layer.out_features, size, bias=has_bias, sketch="signs")
        _scale_outputs(sketched, layer)
        replace_layer(model, name, sketched)
    return model


@torch.no_grad()
def _scale_outputs(sketched: pr.nn.SKLinear, layer: nn.Linear) -> None:
    """Multiply the factors of a sketched layer so that its outputs have the size of a dense layer's outputs."""
    x = torch.randn(256, layer.in_features)
    ratio = functional.linear(x, layer.weight).norm() / sketched(x).norm()
    for p in sketched.parameters():
        if p.ndim > 1:
            p.mul_(ratio)


def replace_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of another, by its name."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the trained parameters in groups: matrices, and vectors without weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(task: OptimizerTask, model: nn.Module, lr: float) -> Optimizer:
    """Return AdamW for all parameters."""
    return torch.optim.AdamW(_groups(model), lr=lr, betas=BETAS)


def _adamw_of_8_bits(task: OptimizerTask, model: nn.Module, lr: float) -> Optimizer:
    torchao: Any = require_extra("torchao.optim", "torchao")
    optimizer: Optimizer = torchao.AdamW8bit(_groups(model), lr=lr, betas=BETAS)
    return optimizer


def _adafactor(task: OptimizerTask, model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.Adafactor(_groups(model), lr=lr)


def muon(task: OptimizerTask, model: nn.Module, lr: float) -> Optimizer:
    """Return MuonAdamW for the hidden layers."""
    groups = pr.optim.param_groups(
        model, lr=lr, factor_lr=lr, weight_decay=DECAY, include=lambda name, _: task.is_hidden(name)
    )
    return pr.optim.MuonAdamW(groups, betas=BETAS)


def sketched_adamw(task: OptimizerTask, model: nn.Module, lr: float, *, update: str, rank: int | None) -> Optimizer:
    """Return SketchedAdamW; rank None takes the largest with a quarter of the numbers that AdamW's states have."""
    if rank is None:
        limit, most = QUARTER * 2 * _trained_numbers(model), min(task.width, 256)
        rank = largest_size(functools.partial(_sketched_numbers, model), limit, most)
    groups = pr.optim.sketched_param_groups(model, rank=rank, lr=lr, weight_decay=DECAY)
    return pr.optim.SketchedAdamW(groups, rank=rank, update=update, betas=BETAS, seed=0)


def _sketched_numbers(model: nn.Module, rank: int) -> int:
    """Return how many numbers the states of SketchedAdamW have at a rank."""
    total = 0
    for group in pr.optim.sketched_param_groups(model, rank=rank):
        for _, p in group["params"]:
            total += 2 * p.numel() if group["rank"] is None else 2 * rank * max(p.shape) + 1
    return total


def _sketched(name: str, update: str, rank: int | None = None) -> Method:
    optimizer = functools.partial(sketched_adamw, update=update, rank=rank)
    return Method(name, whole, optimizer, (6e-3, 1.2e-2, 2.4e-2))


METHODS = {
    method.name: method
    for method in (
        Method(BASELINE, whole, adamw),
        _sketched("channel, a quarter", "channel"),
        _sketched("tensor, rank 1", "tensor", 1),
        Method("Muon", whole, muon),
        Method("AdamW, narrower", lambda task: task.build(QUARTER), adamw, (3e-3, 6e-3, 1.2e-2)),
        _sketched("projected, a quarter", "projected"),
        Method("LoRA", _with_adapters, adamw, (3e-3, 6e-3, 1.2e-2)),
        Method("sketched layers", _with_sketched_layers, adamw, (3e-3, 6e-3, 1.2e-2)),
        Method("Adafactor", whole, _adafactor, (2.4e-2, 4.8e-2, 9.6e-2)),
        Method("AdamW, 8 bits", whole, _adamw_of_8_bits),
    )
}


def state_sizes(optimizer: Optimizer) -> tuple[int, int]:
    """Return the numbers and the bytes of an optimizer's states, without the counts of steps."""
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    values = [value for value in values if value.dim()]
    stored = {tensor.data_ptr(): tensor.nbytes for value in values for tensor in _stored(value)}
    return sum(value.numel() for value in values), sum(stored.values())


def _stored(value: Any) -> list[Tensor]:
    """Return the tensors that a tensor stores: itself, or codes and scales of a quantized one."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value]
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]

"""Errors and speed of new layers against the ones they replace, on the held-out batches."""

__all__ = ["LayerFigures", "layer_figures", "model_speedup"]

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration import input_of
from panther.compression.planning import Target, replace_modules
from panther.compression.running import Runner, counted, relative_error, squares

_ROUNDS = 7


@dataclass
class LayerFigures:
    """Of one target: squares summed over the held-out batches, and its speed-up."""

    lost: float = 0.0
    total: float = 0.0
    speedup: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the layer's output, its bias left out; None where it was never called."""
        return relative_error(self.lost, self.total) if self.total else None


@torch.no_grad()
def layer_figures(
    runner: Runner, targets: Sequence[Target], replacement: Mapping[nn.Module, nn.Module], *, speed: bool
) -> dict[Target, LayerFigures]:
    """Run the original on the held-out batches, and give each new layer what the old one reads."""
    figures = {target: LayerFigures() for target in targets}
    hooks = []
    mask: Tensor | None = None
    for target in targets:
        for module in target.modules:
            if module not in replacement:
                continue

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor, target: Target = target) -> None:
                own, new, x = figures[target], replacement[module], input_of(args, kwargs)
                rows = mask if not isinstance(module, nn.Conv2d) else None
                own.lost += squares(counted(new(x) - output, rows))
                own.total += squares(counted(output, rows))
                if speed and own.speedup is None:
                    own.speedup = _speedup(lambda: module.forward(x), lambda: new(x), x.device)

            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        for batch in runner.over(runner.held_out, "layers' errors"):
            mask = runner.mask(batch)
            runner.output(batch)
    finally:
        for handle in hooks:
            handle.remove()
    sums = torch.tensor([[own.lost, own.total] for own in figures.values()], dtype=torch.float64)
    runner.sum_([sums])
    for own, (lost, total) in zip(figures.values(), sums.tolist(), strict=True):
        own.lost, own.total = lost, total
    return figures


@torch.no_grad()
def model_speedup(runner: Runner, replacement: Mapping[nn.Module, nn.Module]) -> float:
    """How many times faster the model runs the first held-out batch with its new layers."""
    batch = runner.held_out[0]

    def new() -> None:
        with replace_modules(runner.model, replacement):
            runner.output(batch)

    return _speedup(lambda: runner.output(batch), new, runner.device, rounds=3)


def _speedup(old: Callable[[], Any], new: Callable[[], Any], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Median over rounds of the ratio of the two times."""

    def timed(call: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    old(), new()
    return statistics.median(timed(old) / max(timed(new), 1e-9) for _ in range(rounds))

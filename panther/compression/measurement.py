"""Errors and speed of new layers against the ones they replace, on the held-out batches."""

__all__ = ["Measured", "measure"]

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.conversion import Replacement
from panther.compression.runner import Runner, counted, relative_error, squares
from panther.compression.survey import hooked
from panther.compression.targets import Target, replace_modules
from panther.errors import CompressionError

_ROUNDS = 7


@dataclass(frozen=True)
class Measured:
    """What was measured on the held-out batches; empty without calibration.

    Attributes:
        error: Relative error of the model's output.
        errors: That of each target's own output; None where it was never called.
        speedup: How many times faster the model is.
        speedups: How many times faster each new layer is.
        times: Seconds that it takes for its input in the first held-out batch.
    """

    error: float | None = None
    errors: Mapping[Target, float | None] = field(default_factory=dict)
    speedup: float | None = None
    speedups: Mapping[Target, float] = field(default_factory=dict)
    times: Mapping[Target, float] = field(default_factory=dict)


def measure(runner: Runner, targets: Sequence[Target], replacement: Replacement, *, speed: bool) -> Measured:
    """Measure errors, and speed if asked for; nothing without held-out batches."""
    if not runner.held_out:
        return Measured()
    replaced = [target for target in targets if target.modules[0] in replacement]
    (error,) = runner.errors([partial(_all_replaced, runner.model, replaced, replacement)], "error")
    errors, timings = _measure_layers(runner, replaced, replacement, speed=speed)
    errors = {target: errors.get(target, 0.0) for target in targets}
    return Measured(
        error,
        errors,
        _model_speedup(runner, replacement) if speed and replacement else None,
        {target: ratio for target, (ratio, _) in timings.items()},
        {target: seconds for target, (_, seconds) in timings.items()},
    )


@contextmanager
def _all_replaced(model: nn.Module, targets: Sequence[Target], replacement: Replacement) -> Iterator[None]:
    """Put the new layers into the model, and raise if an old one is called all the same."""

    def refuse(target: Target, *_: Any) -> None:
        raise CompressionError(
            f"layer {target.name!r} is called also from where it is not registered, such as a plain list, and "
            "cannot be replaced there: use an nn.ModuleList, or exclude the layer"
        )

    with replace_modules(model, replacement), hooked(targets, refuse):
        yield


@torch.no_grad()
def _measure_layers(
    runner: Runner, targets: Sequence[Target], replacement: Replacement, *, speed: bool
) -> tuple[dict[Target, float | None], dict[Target, tuple[float, float]]]:
    """Run the original on the held-out batches, give each new layer the old one's input, and return both figures."""
    sums = torch.zeros(len(targets), 2, dtype=torch.float64)
    sums_of = dict(zip(targets, sums, strict=True))  # lost, and whole
    timings: dict[Target, tuple[float, float]] = {}

    def hook(target: Target, module: nn.Module, x: Tensor, output: Tensor) -> None:
        new = replacement[module]
        rows = mask if not isinstance(module, nn.Conv2d) else None  # a mask is of sequences, not of images
        sums_of[target][0] += squares(counted(new(x) - output, rows))
        sums_of[target][1] += squares(counted(output, rows))
        if speed and target not in timings:
            # `forward`, because calling the module would call this hook again.
            timings[target] = _timed(lambda: module.forward(x), lambda: new(x), x.device)

    with hooked(targets, hook):
        for batch in runner.over(runner.held_out, "layers' errors"):
            mask = runner.mask(batch)
            runner.output(batch)
    runner.sum_([sums])
    figures = zip(targets, sums.tolist(), strict=True)
    return {target: relative_error(lost, whole) if whole else None for target, (lost, whole) in figures}, timings


@torch.no_grad()
def _model_speedup(runner: Runner, replacement: Replacement) -> float:
    """Return how many times faster the model runs the first held-out batch with its new layers."""
    batch = runner.held_out[0]

    def new() -> None:
        with replace_modules(runner.model, replacement):
            runner.output(batch)

    return _timed(lambda: runner.output(batch), new, runner.device, rounds=3)[0]


def _timed(
    old: Callable[[], Any], new: Callable[[], Any], device: torch.device, rounds: int = _ROUNDS
) -> tuple[float, float]:
    """Return the medians over rounds of the ratio of the two times, and of the new one in seconds."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def timed(call: Callable[[], Any]) -> float:
        begin = now()
        call()
        return now() - begin

    old(), new()  # the first calls allocate, and compile kernels on a GPU
    # The ratio within a round, because a shared machine gets slower and faster over the rounds.
    times = [(timed(old), max(timed(new), 1e-9)) for _ in range(rounds)]
    return statistics.median(before / after for before, after in times), statistics.median(after for _, after in times)

"""Measure errors and speed of new layers against the layers they replace, on the held-out batches."""

__all__ = ["Measured", "measure", "model_speed"]

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from panther._torch import tree_leaves
from panther.compression.calibration.batches import copy_batch
from panther.compression.calibration.masks import counted
from panther.compression.calibration.runner import Runner, relative_error, squares
from panther.compression.calibration.survey import hooked
from panther.compression.calibration.targets import Further, Target, replace_modules
from panther.compression.forms import Replacement
from panther.compression.selection.timing import compare_speed
from panther.errors import CompressionError

_MODEL_S = 2.0  # time for measuring the speed of the model, unless three rounds take longer


@dataclass(frozen=True)
class Measured:
    """Measurements on the held-out batches; empty without calibration.

    Attributes:
        error: Relative error of the model's output.
        errors: Relative error of the output of each target's layers; None for a target that was never called.
        speedup: How many times faster the model is.
        latency_s: Seconds of the new model for the first held-out batch.
        speedups: How many times faster each target's new layer is.
        times: Seconds of each target's new layer for its input in the first held-out batch.
    """

    error: float | None = None
    errors: Mapping[Target, float | None] = field(default_factory=dict)
    speedup: float | None = None
    latency_s: float | None = None
    speedups: Mapping[Target, float] = field(default_factory=dict)
    times: Mapping[Target, float] = field(default_factory=dict)


def measure(runner: Runner, targets: Sequence[Target], replacement: Replacement, *, speed: bool) -> Measured:
    """Measure errors, and speed if ``speed``, on the held-out batches; without such batches, nothing is measured."""
    if not runner.held_out:
        return Measured()
    replaced = [target for target in targets if target.modules[0] in replacement]
    (error,) = runner.errors([partial(_all_replaced, runner.model, replaced, replacement)], "error")
    errors, timings = _measure_layers(runner, replaced, replacement, speed=speed)
    errors = {target: errors.get(target, 0.0) for target in targets}
    dense_s, speedup = model_speed(runner, replacement) if speed and replacement else (None, None)
    return Measured(
        error,
        errors,
        speedup,
        dense_s / speedup if dense_s and speedup else None,
        {target: ratio for target, (ratio, _) in timings.items()},
        {target: seconds for target, (_, seconds) in timings.items()},
    )


@contextmanager
def _all_replaced(model: nn.Module, targets: Sequence[Target], replacement: Replacement) -> Iterator[None]:
    """Put the new layers into the model within the block, and raise if an old layer is still called."""

    def refuse(target: Target, *_: Any) -> None:
        raise CompressionError(
            f"layer {target.name!r} is also called from a place where it is not registered, such as a plain list, and "
            "cannot be replaced there: use an nn.ModuleList, or exclude the layer"
        )

    with replace_modules(model, replacement), hooked(targets, refuse):
        yield


@torch.no_grad()
def _measure_layers(
    runner: Runner, targets: Sequence[Target], replacement: Replacement, *, speed: bool
) -> tuple[dict[Target, float | None], dict[Target, tuple[float, float]]]:
    """Run the original model on the held-out batches, and compare each new layer with its old layer on the same input.

    Returns:
        The relative error of each target, and its speed-up and seconds, for targets that were called.
    """
    sums = torch.zeros(len(targets), 2, dtype=torch.float64)
    sums_of = dict(zip(targets, sums, strict=True))  # squares of the error and of the output
    timings: dict[Target, tuple[float, float]] = {}

    def hook(target: Target, module: nn.Module, x: Tensor, output: Tensor, further: Further) -> None:
        new, (args, kwargs) = replacement[module], further
        of = masks if target.kind.reads_positions else None
        sums_of[target][0] += squares(counted(new(x, *args, **kwargs) - output, of, module))
        sums_of[target][1] += squares(counted(output, of, module))
        if speed and target not in timings:
            # `forward`, because calling the module would call this hook again.
            call, new_call = (partial(layer, x, *args, **kwargs) for layer in (module.forward, new))
            old_s, speedup = compare_speed(call, new_call, x.device)
            timings[target] = speedup, old_s / speedup

    with hooked(targets, hook, masks_of=lambda: masks):
        for batch in runner.over(runner.held_out, "layers' errors"):
            masks = runner.mask(batch)
            runner.output(batch)
    runner.sum_([sums])
    figures = zip(targets, sums.tolist(), strict=True)
    return {target: relative_error(lost, total) if total else None for target, (lost, total) in figures}, timings


@torch.no_grad()
def model_speed(runner: Runner, replacement: Replacement) -> tuple[float, float]:
    """Return the model's seconds for the first held-out batch, and how many times faster it is with new layers.

    Both are means over the ranks of the group.
    """
    before = runner.held_out[0]
    batch = copy_batch(before)
    runner.plain_output(batch)
    # A copy for each run takes time, so that copies are made only if the forward writes to its batch.
    writes = not _is_equal_batch(batch, before)

    def run() -> None:
        runner.plain_output(copy_batch(before) if writes else batch)

    with runner.fast_paths():
        figures = compare_speed(run, run, runner.device, _MODEL_S, partial(replace_modules, runner.model, replacement))
    table = torch.tensor(figures, dtype=torch.float64)
    runner.mean_([table])
    dense_s, speedup = table.tolist()
    return dense_s, speedup


def _is_equal_batch(first: Any, second: Any) -> bool:
    """Return whether two batches have equal tensors in the same places."""
    leaves, other_leaves = tree_leaves(first), tree_leaves(second)
    return len(leaves) == len(other_leaves) and all(
        not isinstance(leaf, Tensor) or (leaf.shape == other.shape and torch.equal(leaf, other))
        for leaf, other in zip(leaves, other_leaves, strict=True)
    )

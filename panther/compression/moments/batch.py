"""Run a step forward and backward, and keep each layer's input until the gradient at the layer's output is known.

Each gradient is used as soon as backward computes it, and then freed together with the input. Nearly all memory is
therefore used by the model's own forward and by one copy of each input.
"""

__all__ = ["gradient_rows", "run_step"]

from collections.abc import Callable, Collection
from itertools import count
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.masks import Masks, counted
from panther.compression.calibration.runner import Runner, squares
from panther.compression.calibration.scores import ScoreFill
from panther.compression.calibration.steps import Receive, Step
from panther.compression.calibration.survey import input_key, watched
from panther.compression.calibration.targets import Further, Target
from panther.compression.moments.sums import Call, is_finite
from panther.errors import CompressionError


def run_step(
    runner: Runner,
    step: Step,
    compared: Collection[Target],
    add: Callable[[Target, Call, Tensor | None], None],
    *,
    gradients: bool,
) -> tuple[float, dict[Target, list[Any]]]:
    """Call ``add`` with each call of the targets and the rows of the gradient at its output (None without a gradient).

    Returns:
        The sum of squares of the output (zero if the step does not reach it), and the keys of the inputs of each target
        in ``compared``.
    """
    masks, number = runner.mask(step.batch), step.number
    input_keys: dict[Target, list[Any]] = {}
    alive: list[Tensor] = []  # inputs, kept so that no address is used twice within a forward
    copies: dict[Any, Tensor] = {}  # copies of inputs that more than one target reads, by key
    waiting: dict[int, tuple[Target, Call]] = {}
    indices = count()

    def kept_input(target: Target, module: nn.Module, x: Tensor) -> Tensor:
        rows = target.kind.counted_input(module, x, masks)
        if rows.is_floating_point() and not is_finite(rows):
            raise CompressionError(
                f"layer {target.name!r} reads NaN or infinite values in calibration batch {number}: check the "
                "batch and the model, or exclude the layer"
            )
        # The model may write to its input before the gradients are known. Selected rows are a copy already.
        return rows.clone() if gradients and rows.data_ptr() == x.data_ptr() else rows

    def note(target: Target, module: nn.Module, x: Tensor, further: Further) -> Receive | None:
        index = next(indices)
        rows = None
        if target in compared:
            alive.append(x)
            input_keys.setdefault(target, []).append(key := input_key(target, module, x))
            rows = copies.get(key)
        if rows is None:
            rows = kept_input(target, module, x)
            if gradients and target in compared:
                copies[key] = rows
        call = Call((number, index), module, rows, target.kind.group_of(further))
        if not gradients:
            add(target, call, None)
            return None
        waiting[index] = target, call

        def receive(gradient: Tensor) -> None:
            # The input is in `waiting` and not in the closure, because the closure lives as long as the graph.
            add(*waiting.pop(index), gradient_rows(module, gradient, masks, target))

        return receive

    size = 0.0
    with watched(step.targets, note, runner.model, masks_of=lambda: masks) as watch, torch.set_grad_enabled(gradients):
        output = step.forward()
        alive.clear()
        copies.clear()
        if output is not None:
            rows = counted(output.detach(), masks)
            size = squares(ScoreFill.of(rows).scores(rows))
            if not isfinite(size):
                raise CompressionError(
                    f"the model's output is NaN or infinite in calibration batch {number}: check the batch and the "
                    "model, or return a finite part of the output in forward_fn"
                )
        step.backward(output, watch)
    # Calls without a gradient, such as those under no_grad.
    for target, call in waiting.values():
        add(target, call, None)
    return size, input_keys


def gradient_rows(module: nn.Module, gradient: Tensor, masks: Masks, target: Target) -> Tensor:
    """Return the gradients at a layer's output, (groups, rows, outer) in float32 or wider."""
    rows = target.kind.gradient_rows(target, module, gradient, masks)
    return rows.to(torch.promote_types(rows.dtype, torch.float32))

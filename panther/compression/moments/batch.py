"""One batch forward and backward, in which the inputs of layers wait for the gradients at their outputs.

Each gradient is used as soon as backward has it, and then the input is let go with it: nearly all of the memory is that
of the model's own forward and of one copy of each input.
"""

__all__ = ["Call", "gradient_rows", "run_batch"]

from collections.abc import Callable, Collection, Sequence
from itertools import count
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from panther.compression.calibration.masks import Masks, counted
from panther.compression.moments.sums import is_finite
from panther.compression.runner import Runner, squares
from panther.compression.survey import Receive, input_key, send_gradients, watched
from panther.compression.targets import Target
from panther.errors import CompressionError


class Call(NamedTuple):
    """One call of a layer in a batch.

    Attributes:
        place: The number of the batch, and how many calls were before this one in it.
        module: The layer.
        x: Its input; of a linear layer the rows that count.
    """

    place: tuple[int, int]
    module: nn.Module
    x: Tensor


def run_batch(
    runner: Runner,
    batch: Any,
    targets: Sequence[Target],
    compared: Collection[Target],
    add: Callable[[Target, Call, Tensor | None], None],
    *,
    number: int,
    seed: int,
    gradients: bool,
) -> tuple[float, dict[Target, list[Any]]]:
    """Call ``add`` with each call of the targets, and the rows of the gradient at its output, or None without one.

    Returns the squares of the output, and for each target of ``compared`` what its inputs are recognised by. ``number``
    is that of the batch.
    """
    masks = runner.mask(batch)
    seen: dict[Target, list[Any]] = {}
    alive: list[Tensor] = []  # so that an address is not used again within a forward
    copies: dict[Any, Tensor] = {}  # of inputs that several targets read
    waiting: dict[int, tuple[Target, Call]] = {}
    indices = count()

    def hold(target: Target, module: nn.Module, x: Tensor) -> Tensor:
        rows = x if isinstance(module, nn.Conv2d) else counted(x, masks, module)
        if not is_finite(rows):
            raise CompressionError(
                f"layer {target.name!r} reads NaN or infinite values in calibration batch {number}: check the "
                "batch and the model, or exclude the layer"
            )
        # A copy, because the model may write to its own before gradients are known; rows that were picked are one.
        return rows.clone() if gradients and rows.data_ptr() == x.data_ptr() else rows

    def note(target: Target, module: nn.Module, x: Tensor) -> Receive | None:
        index = next(indices)
        held = None
        if target in compared:
            alive.append(x)
            seen.setdefault(target, []).append(key := input_key(module, x))
            held = copies.get(key)
        if held is None:
            held = hold(target, module, x)
            if gradients and target in compared:
                copies[key] = held
        call = Call((number, index), module, held)
        if not gradients:
            add(target, call, None)
            return None
        waiting[index] = target, call

        def receive(gradient: Tensor) -> None:
            # What waits is not in the closure, which lives as long as the graph does.
            add(*waiting.pop(index), gradient_rows(module, gradient, masks, target))

        return receive

    with watched(targets, note, runner.model) as watch, torch.set_grad_enabled(gradients):
        output = runner.output(batch)
        alive.clear()
        copies.clear()
        size = squares(counted(output.detach(), masks))
        if not isfinite(size):
            raise CompressionError(
                f"the model's output is NaN or infinite in calibration batch {number}: check the batch and the model, "
                "or return a finite part of the output in forward_fn"
            )
        if output.requires_grad and (watch.tapped or watch.untracked):
            send_gradients(runner, output, batch, watch, seed)
    # Calls without a gradient, such as those under no_grad.
    for target, call in waiting.values():
        add(target, call, None)
    return size, seen


def gradient_rows(module: nn.Module, gradient: Tensor, masks: Masks, target: Target) -> Tensor:
    """Return the gradients at a layer's output, (groups, rows, outer) in float32 or wider."""
    if isinstance(module, nn.Conv2d):
        rows = gradient.movedim(-3, -1).reshape(-1, target.groups, target.outer).movedim(1, 0)
    else:
        rows = counted(gradient, masks, module)[None]
    return rows.to(torch.promote_types(rows.dtype, torch.float32))

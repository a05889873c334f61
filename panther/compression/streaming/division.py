"""Find the parts of a model, and compare its output with that of its parts, one by one."""

__all__ = ["SAME_OUTPUT", "checked_part_modules", "output_difference"]

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.masks import Masks, ScoreFill, counted
from panther.compression.calibration.runner import relative_error, squares
from panther.compression.calibration.survey import blocks_of
from panther.compression.calibration.targets import Selector, Target, holder_of
from panther.compression.streaming.parts import Parts, dispatched, named_blocks
from panther.compression.streaming.spool import Spool
from panther.errors import CompressionError

SAME_OUTPUT = 1e-3  # largest relative difference of outputs of the whole model and of its parts, also in 16 bits


def checked_part_modules(
    model: nn.Module,
    targets: Sequence[Target],
    blocks: Selector | Sequence[Selector] | None,
    forward: Callable[[], Tensor],
    rows: Masks,
    spool: Spool,
) -> list[nn.Module]:
    """Return the modules of the parts, in the order of their calls, if they can run one by one.

    Args:
        model: The model.
        targets: The weights to compress, whose layers are parts where no block contains them.
        blocks: The blocks by name, which are found by the model's structure if it is None.
        forward: A function that returns the model's output for the first batch.
        rows: The rows of this output that count.
        spool: The files for the results of the parts.

    Raises:
        CompressionError: If the model calls none of its layers, or not all of the blocks, or if its output is another
            one where the parts run one by one.
    """
    names = {module: name for name, module in model.named_modules()}
    layers = {holder_of(module) for target in targets for module in target.modules}
    if blocks is None:
        block_modules = [parent.get_submodule(name) for parent, name in blocks_of(model, layers)]
    else:
        block_modules = named_blocks(model, blocks)
    inside = {module for block in block_modules for module in block.modules()}
    units = [*dict.fromkeys(block_modules), *(layer for layer in layers if layer not in inside)]
    calls, output = _called(units, forward)
    if blocks is not None and (uncalled := [block for block in block_modules if block not in calls]):
        raise CompressionError(
            f"blocks name {names[uncalled[0]]!r}, which the model does not call for the first batch: name modules "
            "whose forward it calls, such as the elements of a list"
        )
    if not calls:
        raise CompressionError(
            "the forward of the model calls none of its layers, so that it cannot run part by part: compress "
            "it in memory, with pr.compress"
        )
    parts = Parts(calls, names, spool)
    difference = output_difference(parts, forward, output, rows)
    if not difference <= SAME_OUTPUT:
        raise CompressionError(
            f"the output of the model changes by {difference:.2g} if its {len(calls)} parts, from {parts.name(0)} to "
            f"{parts.name(len(calls) - 1)}, run one by one: they pass something to each other beside arguments and "
            "results, such as attributes. Compress the model in memory, with pr.compress"
        )
    return calls


def output_difference(
    parts: Parts,
    forward: Callable[[], Tensor],
    expected: Tensor,
    rows: Masks,
    drop_after: Callable[[int], Iterable[int]] = lambda place: (),
) -> float:
    """Return the relative difference of the output for the first batch if the parts run one by one.

    Args:
        parts: The parts.
        forward: A function that returns the model's output for the first batch.
        expected: The output of the whole model.
        rows: The rows of the output that count.
        drop_after: A function that takes a part that has run, and returns those whose results to drop then.
    """
    last = len(parts.calls) - 1
    with torch.no_grad():
        for place in range(last):
            parts.run(forward, place, 0, record=not parts.is_recorded(place, 0))
            parts.drop(drop_after(place), [0])
        output = parts.run(forward, last, 0).output
    assert output is not None
    if output.shape != expected.shape:
        return inf
    output, expected = counted(output, rows), counted(expected, rows)
    fill = ScoreFill.of(expected)
    change = fill.replaced(output) - fill.replaced(expected)
    return relative_error(squares(change), squares(fill.scores(expected)))


def _called(units: Sequence[nn.Module], forward: Callable[[], Tensor]) -> tuple[list[nn.Module], Tensor]:
    """Return the modules that a forward calls, in the order of the calls, and its output."""
    calls: list[nn.Module] = []
    depth = 0

    def call(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        if not depth:
            calls.append(module)
        depth += 1
        try:
            return forward(*args, **kwargs)
        finally:
            depth -= 1

    with torch.no_grad(), dispatched(units, call):
        output = forward().clone()
    return calls, output

r"""Second moments of the layers' inputs and of the output's gradients at the layers, from unlabelled batches.

For a layer :math:`y = x W^T + b`, the error that a change :math:`\Delta` of W makes in the model's output is, to first
order and with inputs and sensitivities taken as independent,

.. math:: n \operatorname{tr}(G \Delta A \Delta^T), \qquad A = \frac1n \sum x x^T, \quad G = \frac1n \sum g g^T

over the n positions where the layer is applied, g being the gradient at y of the output times a normal vector, so that
:math:`E\, g g^T = J^T J` (the Kronecker factorisation of J. Martens and R. Grosse, "Optimizing neural networks with
Kronecker-factored approximate curvature", ICML 2015, arXiv:1503.05671). All sums are in float64.
"""

__all__ = ["Moments", "gather_drift", "gather_moments", "moments_bytes", "split_passes"]

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther.compression.runner import Runner, counted, squares
from panther.compression.survey import input_key, output_gradients, watched
from panther.compression.targets import Target
from panther.errors import CompressionError
from panther.nn._conv import pad_input

_DOUBLE = torch.float64.itemsize
_CHUNK = 2**22  # entries of unfolded input at a time


@dataclass(frozen=True)
class Moments:
    """Moments of one target, in float64.

    Attributes:
        A: Second moment of its inputs, (groups, inner, inner).
        mean: Mean of its inputs, (groups, inner).
        G: Second moment of the gradients at its outputs, (groups, outer, outer), or None.
        positions: How often the layer was applied, over all batches.
        cross: Where the inputs are those in the compressed model, the moment of the original's inputs, in rows, with
            them, (groups, inner, inner).
    """

    A: Tensor
    mean: Tensor
    G: Tensor | None
    positions: float
    cross: Tensor | None = None


def moments_bytes(targets: Sequence[Target], gradients: bool) -> int:
    """Return the bytes of the moments of targets that read one input."""
    A = targets[0].groups * targets[0].inner ** 2
    return _DOUBLE * (A + gradients * sum(target.groups * target.outer**2 for target in targets))


def split_passes(
    inputs: Sequence[Sequence[Target]], gradients: bool, limit: int | None
) -> tuple[list[list[Sequence[Target]]], int]:
    """Return passes of sets of targets whose moments fit into ``limit`` bytes, and the bytes of the largest one.

    A set that is larger by itself has a pass of its own. None is the memory that the three largest layers need.
    """
    if limit is None:
        each = sorted(moments_bytes([target], gradients) for several in inputs for target in several)
        limit = sum(each[-3:])
    split: list[list[Sequence[Target]]] = []
    sizes: list[int] = []
    for several in inputs:
        size = moments_bytes(several, gradients)
        if split and sizes[-1] + size <= limit:
            split[-1].append(several)
            sizes[-1] += size
        else:
            split.append([several])
            sizes.append(size)
    return split, max(sizes, default=0)


class _Sums:
    """Sums over the rows of one input, and over the gradients of the targets that read it."""

    def __init__(self, targets: Sequence[Target], gradients: bool, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.leader = targets[0]
        groups, n = self.leader.groups, self.leader.inner
        self.A, self.mean, self.rows = zeros(groups, n, n), zeros(groups, n), zeros(1)
        self.G = {target: zeros(groups, target.outer, target.outer) for target in targets if gradients}

    def add(self, rows: Tensor) -> None:  # (groups, rows, inner)
        self.A.baddbmm_(rows.mT, rows)  # in place: moments are the largest tensors here
        self.mean += rows.sum(1)
        self.rows += rows.shape[1]


def gather_moments(
    runner: Runner, inputs: Sequence[Sequence[Target]], *, gradients: bool, seed: int, description: str
) -> tuple[dict[Target, Moments], float]:
    """Pass over the batches once: return the moments, which targets of one input share, and the output's squares."""
    sums: dict[Target, _Sums] = {}
    for several in inputs:
        sums |= dict.fromkeys(several, _Sums(several, gradients, runner.device))
    # Sharing was seen on the first batch only; a model that branches could break it on a later one.
    compared = {target for several in inputs if len(several) > 1 for target in several}
    seen: dict[Target, list[Any]] = {}
    alive: list[Tensor] = []  # so that an address is not used again within a batch
    energy = torch.zeros(1, dtype=torch.float64)

    def note(target: Target, module: nn.Module, x: Tensor) -> None:
        if target in compared:
            alive.append(x)
            seen.setdefault(target, []).append(input_key(module, x))
        if sums[target].leader is not target:
            return
        for rows in input_rows(module, x, mask, target.groups):
            if not rows.isfinite().all():
                raise CompressionError(
                    f"layer {target.name!r} reads NaN or infinite values in calibration batch {number}: check the "
                    "batch and the model, or exclude the layer"
                )
            sums[target].add(rows)

    for number, batch in enumerate(runner.over(runner.batches, description)):
        mask = runner.mask(batch)
        with watched(list(sums), note, gradients=gradients) as watch, torch.set_grad_enabled(gradients):
            output = runner.output(batch)
            found = output_gradients(runner, output, batch, watch, seed + number) if watch.taps else []
        for several in inputs:
            for other in several[1:]:
                if seen.get(several[0]) != seen.get(other):
                    raise CompressionError(
                        f"layers {several[0].name!r} and {other.name!r} read the same input in the first batch and "
                        f"different ones in batch {number}: exclude one of them"
                    )
        seen.clear()
        alive.clear()
        size = squares(counted(output.detach(), mask))
        if not isfinite(size):
            raise CompressionError(
                f"the model's output is NaN or infinite in calibration batch {number}: check the batch and the model, "
                "or return a finite part of the output in forward_fn"
            )
        energy += size
        for (target, module, _), gradient in zip(watch.taps, found, strict=True):
            if gradient is None:
                continue
            rows = _gradient_rows(module, gradient, mask, target)
            if not rows.isfinite().all():
                raise CompressionError(
                    f"the gradient at layer {target.name!r} is NaN or infinite in calibration batch {number}: use "
                    "method='activation', or a model in float32"
                )
            sums[target].G[target].baddbmm_(rows.mT, rows)
    runner.sum_([energy])
    result: dict[Target, Moments] = {}
    for several in inputs:
        own = sums[several[0]]
        moments = [own.A, own.mean, *own.G.values()]
        runner.sum_([*moments, own.rows])
        positions = max(own.rows.item(), 1.0)
        for moment in moments:
            moment /= positions
        result |= {target: Moments(own.A, own.mean, own.G.get(target), positions) for target in several}
    return result, energy.item()


class _Stop(BaseException):
    """End a forward once the layer of interest has run; not an Exception, which the runner would explain."""


def gather_drift(
    runner: Runner, several: Sequence[Target], calls: int, compressed: Callable[[], Any], description: str
) -> Moments:
    """Compare the input that targets share in the original and under ``compressed``, which replaces layers."""
    sums = _Sums(several, False, runner.device)
    cross = torch.zeros_like(sums.A)

    def read(batch: Any) -> list[Tensor]:
        found: list[Tensor] = []
        mask, left = runner.mask(batch), calls

        def note(target: Target, module: nn.Module, x: Tensor) -> None:
            nonlocal left
            found.extend(input_rows(module, x, mask, target.groups))
            left -= 1
            if left == 0:
                raise _Stop

        with watched(several[:1], note, gradients=False), suppress(_Stop):
            runner.output(batch)
        return found

    with torch.no_grad():
        for batch in runner.over(runner.batches, description):
            before = read(batch)
            with compressed():
                after = read(batch)
            for x, z in zip(before, after, strict=True):
                sums.add(z)
                cross.baddbmm_(x.mT, z)
    runner.sum_([sums.A, cross, sums.mean, sums.rows])
    positions = sums.rows.item()
    return Moments(sums.A / positions, sums.mean / positions, None, positions, cross / positions)


def _gradient_rows(module: nn.Module, gradient: Tensor, mask: Tensor | None, target: Target) -> Tensor:
    """Return the gradients at a layer's output, (groups, rows, outer) in float64."""
    if isinstance(module, nn.Conv2d):
        rows = gradient.movedim(-3, -1).reshape(-1, target.groups, target.outer).movedim(1, 0)
    else:
        rows = counted(gradient, mask)[None]
    return rows.to(torch.float64)


def input_rows(module: nn.Module, x: Tensor, mask: Tensor | None, groups: int) -> Iterator[Tensor]:
    """Yield the rows that a layer multiplies its weight with, (groups, rows, inner) in float64, in chunks."""
    if not isinstance(module, nn.Conv2d):
        yield counted(x, mask).to(torch.float64)[None]
        return
    x = x if x.dim() == 4 else x[None]  # Conv2d takes one image without a batch too
    x, padding = pad_input(x, module.kernel_size, module.padding, module.dilation, module.padding_mode)
    per_sample = max(1, x[0].numel() * module.weight[0, 0].numel()) if len(x) else 1
    for part in x.split(max(1, _CHUNK // per_sample)):
        columns = F.unfold(
            part, module.kernel_size, module.dilation, padding, module.stride
        )  # (N, in * kernel, places)
        rows = columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        yield rows.to(torch.float64)

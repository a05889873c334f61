r"""Second moments of the layers' inputs and of the output's gradients at the layers, from unlabelled batches.

For a layer :math:`y = x W^T + b`, the error that a change :math:`\Delta` of W makes in the model's output is, to first
order and with inputs and sensitivities taken as independent,

.. math:: n \operatorname{tr}(G \Delta A \Delta^T), \qquad A = \frac1n \sum x x^T, \quad G = \frac1n \sum g g^T

over the n positions where the layer is applied, g being the gradient at y of the output times a normal vector, so that
:math:`E\, g g^T = J^T J` (the Kronecker factorisation of J. Martens and R. Grosse, "Optimizing neural networks with
Kronecker-factored approximate curvature", ICML 2015, arXiv:1503.05671).

Rows are multiplied in blocks, in float32 (of float64 models in float64), and the blocks are summed in float64. Inputs
are taken about the mean of the first rows: where the mean is large, their covariance would cancel in float32.
"""

__all__ = ["Moments", "check_calibration", "gather_drift", "gather_moments", "moments_bytes", "split_passes"]

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import frexp, isfinite, ldexp
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther.compression.runner import Runner, counted, squares
from panther.compression.survey import input_key, output_gradients, watched
from panther.compression.targets import Target
from panther.errors import CompressionError
from panther.linalg._operand import driver
from panther.nn._conv import pad_input

_DOUBLE = torch.float64.itemsize
_CHUNK = 2**22  # entries of unfolded input at a time
# Rows of a block: float32 rounds a sum of so many squares by less than the products themselves.
_ROWS = 2048
# Only what is right of the diagonal is computed, in strips of so many rows: 0.61 of the time at 1536 columns.
_STRIP = 256
_CONSTANT = 1e-11  # of the square of an input is its variance at most, where rounding alone makes it vary
_SAFE_POWER = 40  # largest entries up to two to this, and down to its inverse, have float32 squares as exact as any


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

    @property
    def constant(self) -> bool:
        """Return whether every row of the inputs was the same, to rounding."""
        squares = self.A.diagonal(dim1=-2, dim2=-1)
        return bool((squares - self.mean.square() <= _CONSTANT * squares).all())


def check_calibration(positions: Mapping[Target, float], constant: Collection[Target]) -> tuple[str, ...]:
    """Return why the batches say too little about some layers, or raise CompressionError if they do about all.

    ``positions`` has how often each layer was applied, and ``constant`` the layers whose inputs never varied.
    """
    if positions and len(constant) == len(positions):
        raise CompressionError(
            f"every layer reads one input only at all {max(positions.values()):.0f} positions of the calibration "
            "batches (a single sample, constants or zeros), which says nothing about others: give batches like those "
            "that the model will read"
        )
    notes = []
    if constant:
        names = ", ".join(repr(target.name) for target in list(constant)[:3])
        notes.append(
            f"layers that read one input only in all calibration batches (constants or zeros): {len(constant)} of "
            f"{len(positions)} ({names}): exclude them, or give batches like those that the model will read"
        )
    few = [target for target, count in positions.items() if count < target.inner and target not in constant]
    if few:
        widest = max(few, key=lambda target: target.inner)
        notes.append(
            f"layers with more inputs than calibration positions: {len(few)} of {len(positions)} ({widest.name!r} has "
            f"{widest.inner} and was applied {positions[widest]:.0f} times): give batches with at least "
            f"{widest.inner} positions, better ten times as many"
        )
    return tuple(notes)


def moments_bytes(targets: Sequence[Target], gradients: bool) -> int:
    """Return the bytes of the moments of targets that read one input."""
    A = targets[0].groups * targets[0].inner ** 2
    return _DOUBLE * (A + gradients * sum(target.groups * target.outer**2 for target in targets))


def split_passes(
    inputs: Sequence[Sequence[Target]], gradients: bool, limit: int
) -> tuple[list[list[Sequence[Target]]], int]:
    """Return passes of sets of targets whose moments fit into ``limit`` bytes, and the bytes of the largest one.

    A set that is larger by itself has a pass of its own.
    """
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


class _Shifted:
    """The sum of rows about the mean of the first ones, so that products of what is left are exact in float32."""

    def __init__(self, groups: int, n: int, device: torch.device) -> None:
        self.sum = torch.zeros(groups, n, dtype=torch.float64, device=device)
        self.rows = torch.zeros(1, dtype=torch.float64, device=device)
        self.shift: Tensor | None = None  # (groups, 1, n)

    def add(self, rows: Tensor) -> Tensor:  # (groups, rows, n)
        """Add rows, and return them without the shift."""
        if self.shift is None:
            if not rows.shape[1]:
                return rows
            self.shift = rows.mean(1, keepdim=True, dtype=torch.float64).to(rows.dtype)
        rows = rows - self.shift
        self.sum += rows.sum(1, dtype=torch.float64)
        self.rows += rows.shape[1]
        return rows

    def whole(self) -> Tensor:  # (groups, n)
        """Return the sum of the rows as they were."""
        return self.sum if self.shift is None else self.sum + self.rows * self.shift[:, 0]

    def restore_(self, products: Tensor, other: "_Shifted") -> None:
        """Turn sums of products, of these rows by those of another sum, into products of rows as they were."""
        if self.shift is not None and other.shift is not None:  # (x + s)(y + t)^T = x y^T + x t^T + s (y + t)^T
            products.baddbmm_(self.sum[:, :, None], other.shift.double())
            products.baddbmm_(self.shift.double().mT, other.whole()[:, None, :])


class _Sums:
    """Sums over the rows of one input, and over the gradients of the targets that read it."""

    def __init__(self, targets: Sequence[Target], gradients: bool, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.leader = targets[0]
        groups, n = self.leader.groups, self.leader.inner
        self.A, self.inputs = zeros(groups, n, n), _Shifted(groups, n, device)
        self.G = {target: zeros(groups, target.outer, target.outer) for target in targets if gradients}

    def add(self, rows: Tensor) -> bool:  # (groups, rows, inner)
        """Add rows of the input; return whether they are finite."""
        return _add_squares(self.A, self.inputs.add(rows))

    def finish_(self) -> None:
        """Turn the moments into those of whole rows, and mirror the triangles that were summed."""
        self.inputs.restore_(self.A, self.inputs)
        for moment in (self.A, *self.G.values()):
            for start in range(0, moment.shape[-1], _STRIP):
                end = start + _STRIP
                moment[:, end:, start:end] = moment[:, start:end, end:].mT


@driver
def _add_squares(total: Tensor, rows: Tensor) -> bool:  # (groups, n, n) in float64, (groups, rows, n)
    """Add rows^T rows right of the diagonal and in the strips on it; return whether the rows are finite."""
    if not rows.numel():
        return True
    low, high = torch.stack(torch.aminmax(rows)).tolist()  # five times as fast as isfinite; NaN is passed on
    if not (isfinite(low) and isfinite(high)):
        return False
    rows, power = _scaled(rows, max(-low, high))
    for block in rows.split(_ROWS, 1):
        for start in range(0, total.shape[-1], _STRIP):
            end = start + _STRIP
            total[:, start:end, start:].add_(block[..., start:end].mT @ block[..., start:], alpha=ldexp(1.0, 2 * power))
    return True


@driver
def _add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right."""
    for rows, others in zip(left.split(_ROWS, 1), right.split(_ROWS, 1), strict=True):
        total += rows.mT @ others


def _scaled(rows: Tensor, largest: float) -> tuple[Tensor, int]:
    """Return rows over a power of two with which their squares neither overflow nor vanish, and the power."""
    power = min(max(frexp(largest)[1], -126), 126)  # so that float32 has its inverse
    if abs(power) <= _SAFE_POWER or rows.dtype is torch.float64:
        return rows, 0
    return rows * ldexp(1.0, -power), power


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
            if not sums[target].add(rows):
                raise CompressionError(
                    f"layer {target.name!r} reads NaN or infinite values in calibration batch {number}: check the "
                    "batch and the model, or exclude the layer"
                )

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
            if not _add_squares(sums[target].G[target], rows):
                raise CompressionError(
                    f"the gradient at layer {target.name!r} is NaN or infinite in calibration batch {number}: use "
                    "method='activation', or a model in float32"
                )
    runner.sum_([energy])
    result: dict[Target, Moments] = {}
    for several in inputs:
        own = sums[several[0]]
        own.finish_()
        rows, mean = own.inputs.rows, own.inputs.whole()
        moments = [own.A, mean, *own.G.values()]
        runner.sum_([*moments, rows])
        positions = max(rows.item(), 1.0)
        for moment in moments:
            moment /= positions
        result |= {target: Moments(own.A, mean, own.G.get(target), positions) for target in several}
    return result, energy.item()


class _Stop(BaseException):
    """End a forward once the layer of interest has run; not an Exception, which the runner would explain."""


def gather_drift(
    runner: Runner, several: Sequence[Target], calls: int, compressed: Callable[[], Any], description: str
) -> Moments:
    """Compare the input that targets share in the original and under ``compressed``, which replaces layers."""
    sums = _Sums(several, False, runner.device)
    cross, original = torch.zeros_like(sums.A), _Shifted(several[0].groups, several[0].inner, runner.device)

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
                z = sums.inputs.add(z)
                _add_squares(sums.A, z)
                _add_products(cross, original.add(x), z)
    sums.finish_()
    original.restore_(cross, sums.inputs)
    mean, rows = sums.inputs.whole(), sums.inputs.rows
    runner.sum_([sums.A, cross, mean, rows])
    positions = rows.item()
    return Moments(sums.A / positions, mean / positions, None, positions, cross / positions)


def _gradient_rows(module: nn.Module, gradient: Tensor, mask: Tensor | None, target: Target) -> Tensor:
    """Return the gradients at a layer's output, (groups, rows, outer) in float32 or wider."""
    if isinstance(module, nn.Conv2d):
        rows = gradient.movedim(-3, -1).reshape(-1, target.groups, target.outer).movedim(1, 0)
    else:
        rows = counted(gradient, mask)[None]
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def input_rows(module: nn.Module, x: Tensor, mask: Tensor | None, groups: int) -> Iterator[Tensor]:
    """Yield the rows that a layer multiplies its weight with, (groups, rows, inner), in float32 or wider, in chunks."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not isinstance(module, nn.Conv2d):
        yield counted(x, mask)[None]
        return
    x = x if x.dim() == 4 else x[None]  # Conv2d takes one image without a batch too
    x, padding = pad_input(x, module.kernel_size, module.padding, module.dilation, module.padding_mode)
    per_sample = max(1, x[0].numel() * module.weight[0, 0].numel()) if len(x) else 1
    for part in x.split(max(1, _CHUNK // per_sample)):
        columns = F.unfold(
            part, module.kernel_size, module.dilation, padding, module.stride
        )  # (N, in * kernel, places)
        rows = columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        yield rows

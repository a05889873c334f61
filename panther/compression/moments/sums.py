"""Weighted sums of a layer's inputs and of their products, block by block.

Rows are multiplied in blocks, in float32 (in float64 for float64 models), and the blocks are summed in float64. The
mean of the first rows is subtracted from the inputs, because a large mean would cancel the covariance in float32.
"""

__all__ = [
    "Call", "Moments", "RootsOf", "ShiftedSum", "Sums", "add_squares", "is_finite", "mirror_",
    "square_zeros",
]  # fmt: skip

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp, isfinite, ldexp
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from panther.compression.calibration.targets import Target
from panther.linalg.operand import driver

_CONSTANT = 1e-11  # an input is constant, up to rounding, if its variance is at most this share of its mean square
# Rows of a block. In float32, the rounding error of a sum of this many squares is below the one of the products.
_ROWS = 2048
# Rows of a strip. Each strip is computed from the diagonal to the right only, which takes 0.61 of the time of the full
# matrix at 1536 columns.
_STRIP = 256
_OWN_PAGES = 2**18  # a moment of at least this many bytes has a memory map of its own
# If the largest entry is between two to the negative and to the positive of this power, squares in float32 neither
# overflow nor vanish.
_SAFE_POWER = 40


class ShiftedSum:
    """The weighted sum of rows minus a shift, the mean of the first rows, so that products are accurate in float32."""

    def __init__(self, groups: int, n: int, device: torch.device) -> None:
        self.sum = torch.zeros(groups, n, dtype=torch.float64, device=device)
        self.weight = torch.zeros(groups, 1, dtype=torch.float64, device=device)  # sum over all rows
        # Allocated now, because long-lived memory between activations would keep malloc from joining freed blocks. The
        # values are rounded to the rows' dtype.
        self.shift = torch.zeros(groups, 1, n, dtype=torch.float64, device=device)
        self._shifted = False

    def add(self, rows: Tensor, roots: Tensor | None) -> Tensor:  # (groups, rows, n), (groups, rows)
        """Add rows, and return them without the shift, times the roots of their weights."""
        if not self._shifted:
            if not rows.shape[1]:
                return rows
            self._shifted = True
            self.shift.copy_(rows.mean(1, keepdim=True, dtype=torch.float64).to(rows.dtype))
        rows = rows - self.shift.to(rows.dtype)
        if roots is None:
            self.sum += rows.sum(1, dtype=torch.float64)
            self.weight += rows.shape[1]
            return rows
        roots = roots.to(rows.dtype)[..., None]
        rows = rows * roots
        self.sum += (rows * roots).sum(1, dtype=torch.float64)
        self.weight += roots.double().square().sum(1)
        return rows

    def total(self) -> Tensor:  # (groups, n)
        """Return the weighted sum of the original rows."""
        return self.sum + self.weight * self.shift[:, 0]

    def undo_shift_(self, products: Tensor) -> None:
        """Undo the shift: convert X^T X of the shifted rows into X^T X of the original rows, in place."""
        # (x + s)(x + s)^T = x x^T + x s^T + s (x + s)^T
        products.baddbmm_(self.sum[:, :, None], self.shift)
        products.baddbmm_(self.shift.mT, self.total()[:, None, :])


@dataclass(frozen=True)
class Moments:
    """Moments of one target, in float64.

    Attributes:
        A: Second moment of its inputs, (groups, inner, inner), weighted where there are gradients. Large stacks of
            experts have one for all experts, (1, inner, inner), or the diagonals alone, (groups, inner).
        mean: Mean of its inputs, (groups, inner), with the same weights.
        G: Second moment of the gradients at its outputs, (groups, outer, outer), or None; for experts as A.
        positions: How often the layer was applied, over all batches.
        tokens: Number of tokens of each expert; empty for layers without experts.
        shares: Share with which the error of each expert counts, (experts,); None for layers without experts.
    """

    A: Tensor
    mean: Tensor
    G: Tensor | None
    positions: float
    tokens: tuple[float, ...] = ()
    shares: Tensor | None = None

    @property
    def constant(self) -> bool:
        """Return whether every row of the inputs was the same, to rounding."""
        squares = self.A.diagonal(dim1=-2, dim2=-1) if self.A.dim() > 2 else self.A
        return bool((squares - self.mean.square() <= _CONSTANT * squares).all())


class Call(NamedTuple):
    """One call of a layer in a batch.

    Attributes:
        batch: The number of the batch.
        module: The layer.
        x: What the moments need of the input, see :meth:`WeightKind.counted_input`.
        group: The group whose matrix multiplies the input, where each call multiplies by one.
    """

    batch: int
    module: nn.Module
    x: Tensor
    group: int = 0


RootsOf = Callable[[Tensor | None], Tensor | float | None]
"""Returns the roots of the weights of a call's rows from the gradients there, (groups, rows, outer).

They are (groups, rows), one number for all rows if the call has no gradients, or None if all weights are 1.
"""


class Sums:
    """Sums over the rows of an input, and over the gradients of the targets that read it."""

    def __init__(self, targets: Sequence[Target], gradients: bool, device: torch.device) -> None:
        self.leader = targets[0]
        groups, n = self.leader.groups, self.leader.inner
        self.A, self.inputs = square_zeros(groups, n, device), ShiftedSum(groups, n, device)
        self.G = {target: square_zeros(groups, target.outer, device) for target in targets if gradients}
        self.positions = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, target: Target, call: Call, slope: Tensor | None, roots_of: RootsOf) -> bool:
        """Add a call of a target, with the gradients at its output; return whether the gradients are finite."""
        if slope is not None and not add_squares(self.G[target], slope):
            return False
        if target is self.leader:
            self._add_input(call, roots_of(slope))
        return True

    def _add_input(self, call: Call, roots: Tensor | float | None) -> None:
        """Add the finite input of a call."""
        start = 0
        for rows in self.leader.kind.input_rows(call.module, call.x, self.leader.groups):
            end = start + rows.shape[1]
            chunk_roots = roots[:, start:end] if isinstance(roots, Tensor) else roots
            if isinstance(chunk_roots, float):
                chunk_roots = torch.full(rows.shape[:2], chunk_roots, dtype=rows.dtype, device=rows.device)
            add_squares(self.A, self.inputs.add(rows, chunk_roots))
            start = end
        self.positions += start

    def finish_(self) -> None:
        """Undo the shift of the moments, and mirror the triangles that were summed, in place."""
        self.inputs.undo_shift_(self.A)
        for moment in (self.A, *self.G.values()):
            mirror_(moment)

    def moments(self, sum_: Callable[[Sequence[Tensor]], Any]) -> Moments:
        """Return the moments of the leader; ``sum_`` adds tensors over the ranks of a group, in place."""
        self.finish_()
        weight, mean = self.inputs.weight, self.inputs.total()
        sum_([self.A, mean, *self.G.values(), weight, self.positions])
        positions = max(self.positions.item(), 1.0)
        weight = torch.where(weight > 0, weight, 1.0)
        self.A /= weight[..., None]
        mean /= weight
        for G in self.G.values():
            G /= positions
        return Moments(self.A, mean, self.G.get(self.leader), positions)


def mirror_(moment: Tensor) -> None:  # (groups, n, n)
    """Mirror the triangle that :func:`add_squares` has summed, in place."""
    for start in range(0, moment.shape[-1], _STRIP):
        end = start + _STRIP
        moment[:, end:, start:end] = moment[:, start:end, end:].mT


def square_zeros(groups: int, n: int, device: torch.device) -> Tensor:  # (groups, n, n), float64
    """Return zeros in memory that is returned to the system when freed.

    After a block of up to 32 MB was freed, glibc allocates blocks of this size on the heap, which shrinks only at its
    end: moments that live longer than the activations around them would keep the memory of all of them.
    """
    size = torch.float64.itemsize * groups * n * n
    if device.type != "cpu" or size < _OWN_PAGES:
        return torch.zeros(groups, n, n, dtype=torch.float64, device=device)
    pages = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)  # zeros, and private to this process
    return torch.frombuffer(pages, dtype=torch.float64).view(groups, n, n)


@driver
def add_squares(total: Tensor, rows: Tensor) -> bool:  # (groups, n, n) in float64, (groups, rows, n)
    """Add rows^T rows in the upper triangle (and in the strips on the diagonal); return whether the rows are finite."""
    if not rows.numel():
        return True
    low, high = _range(rows)
    if not (isfinite(low) and isfinite(high)):
        return False
    rows, power = _scaled(rows, max(-low, high))
    for block in rows.split(_ROWS, 1):
        for start in range(0, total.shape[-1], _STRIP):
            end = start + _STRIP
            total[:, start:end, start:].add_(block[..., start:end].mT @ block[..., start:], alpha=ldexp(1.0, 2 * power))
    return True


def _range(x: Tensor) -> tuple[float, float]:
    low, high = torch.stack(torch.aminmax(x)).tolist()  # five times as fast as isfinite; aminmax returns NaN if any is
    return low, high


def is_finite(x: Tensor) -> bool:
    """Return whether all entries are finite."""
    return not x.numel() or all(map(isfinite, _range(x)))


def _scaled(rows: Tensor, largest: float) -> tuple[Tensor, int]:
    """Return rows divided by a power of two, so that their squares neither overflow nor vanish, and the exponent."""
    power = min(max(frexp(largest)[1], -126), 126)  # clamped, so that float32 can represent the inverse
    if abs(power) <= _SAFE_POWER or rows.dtype is torch.float64:
        return rows, 0
    return rows * ldexp(1.0, -power), power

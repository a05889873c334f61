"""Weighted sums of a layer's inputs and of their products, block by block.

Rows are multiplied in blocks, in float32 (in float64 for float64 models), and the blocks are summed in float64. The
mean of the first rows is subtracted from the inputs, because a large mean would cancel the covariance in float32.
"""

__all__ = ["ShiftedSum", "Sums", "add_products", "add_squares", "input_rows", "is_finite", "mirror_", "square_zeros"]

import mmap
from collections.abc import Iterator, Sequence
from math import frexp, isfinite, ldexp

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther.compression.calibration.targets import Target
from panther.linalg.operand import driver
from panther.nn.conv.padding import pad_input

_CHUNK = 2**22  # entries of unfolded input at a time
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

    def undo_shift_(self, products: Tensor, other: "ShiftedSum") -> None:
        """Undo the shift: convert X^T Y of the shifted rows into X^T Y of the original rows, in place."""
        # (x + s)(y + t)^T = x y^T + x t^T + s (y + t)^T
        products.baddbmm_(self.sum[:, :, None], other.shift)
        products.baddbmm_(self.shift.mT, other.total()[:, None, :])


class Sums:
    """Sums over the rows of an input, and over the gradients of the targets that read it.

    With ``keep``, the roots of the weights are stored.
    """

    def __init__(self, targets: Sequence[Target], gradients: bool, device: torch.device, *, keep: bool = False) -> None:
        self.leader, self.keep = targets[0], keep
        groups, n = self.leader.groups, self.leader.inner
        self.A, self.inputs = square_zeros(groups, n, device), ShiftedSum(groups, n, device)
        self.G = {target: square_zeros(groups, target.outer, device) for target in targets if gradients}
        self.positions = torch.zeros(1, dtype=torch.float64, device=device)
        self.roots: list[tuple[tuple[int, int], Tensor]] = []  # (batch, call), and roots of the weights

    def add(self, module: nn.Module, x: Tensor, roots: Tensor | float | None, place: tuple[int, int]) -> None:
        """Add a finite input of the layer (only the rows that count, for a linear layer), with roots of the weights.

        ``roots`` are (groups, rows), or one number for all rows. ``place`` is the batch and the call, by which calls
        are sorted.
        """
        start = 0
        for rows in input_rows(module, x, self.leader.groups):
            end = start + rows.shape[1]
            chunk_roots = roots[:, start:end] if isinstance(roots, Tensor) else roots
            if isinstance(chunk_roots, float):
                chunk_roots = torch.full(rows.shape[:2], chunk_roots, dtype=rows.dtype, device=rows.device)
            add_squares(self.A, self.inputs.add(rows, chunk_roots))
            if chunk_roots is not None and self.keep:
                self.roots.append((place, chunk_roots))
            start = end
        self.positions += start

    def finish_(self) -> None:
        """Undo the shift of the moments, and mirror the triangles that were summed, in place."""
        self.inputs.undo_shift_(self.A, self.inputs)
        for moment in (self.A, *self.G.values()):
            mirror_(moment)


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


@driver
def add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right to ``total``."""
    for left_rows, right_rows in zip(left.split(_ROWS, 1), right.split(_ROWS, 1), strict=True):
        total += left_rows.mT @ right_rows


def _scaled(rows: Tensor, largest: float) -> tuple[Tensor, int]:
    """Return rows divided by a power of two, so that their squares neither overflow nor vanish, and the exponent."""
    power = min(max(frexp(largest)[1], -126), 126)  # clamped, so that float32 can represent the inverse
    if abs(power) <= _SAFE_POWER or rows.dtype is torch.float64:
        return rows, 0
    return rows * ldexp(1.0, -power), power


def input_rows(module: nn.Module, x: Tensor, groups: int) -> Iterator[Tensor]:
    """Yield the rows that a layer multiplies its weight with, (groups, rows, inner), in float32 or wider, in chunks.

    ``x`` is the input of a convolution, or the rows that count of a linear layer's input.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not isinstance(module, nn.Conv2d):
        yield x[None]
        return
    x = x if x.dim() == 4 else x[None]  # Conv2d also takes a single image without a batch dimension
    x, padding = pad_input(x, module.kernel_size, module.stride, module.padding, module.dilation, module.padding_mode)
    per_sample = max(1, x[0].numel() * module.weight[0, 0].numel()) if len(x) else 1
    for part in x.split(max(1, _CHUNK // per_sample)):
        columns = F.unfold(
            part, module.kernel_size, module.dilation, padding, module.stride
        )  # (N, in * kernel, places)
        rows = columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        yield rows

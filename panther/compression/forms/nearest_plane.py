r"""Codes of matrices whose entries are rounded one after the other, each moved by the errors of earlier entries.

With :math:`Y = E (I + a)^T`, entry (i, j) is moved by :math:`(Y - E)_{ij} + (g Y)_{ij}`, which needs the rows up to i
and the columns up to j. All entries of an anti-diagonal are therefore independent of each other, and without g all
entries of a column. A step takes few operations on small tensors, so their overhead decides the time: many matrices
are rounded at once, and each operation writes to views that are made once.
"""

__all__ = ["round_entries"]

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Rows and columns of a block. Larger blocks need more scalar products, smaller blocks more calls.
_BLOCK = 64


def round_entries(
    W: Tensor,  # (matrices, outer, inner)
    scale: Tensor,  # (matrices, outer, inner)
    zero: Tensor,  # (matrices, outer, inner)
    largest: Tensor,  # (matrices,)
    owners: Tensor,  # (matrices,), the index in a and g of each matrix
    a: Tensor | None,  # (owners, inner, inner), strictly lower triangular; None is zero, as for g
    g: Tensor | None,  # (owners, outer, outer), strictly lower triangular
) -> Tensor:  # (matrices, outer, inner), uint8
    """Return the codes of W on the grids ``scale * (codes - zero)``, from 0 to ``largest``, rounded in their order.

    A matrix has the same codes alone as together with other matrices.
    """
    _, outer, inner = W.shape
    B = min(_BLOCK, max(outer, inner))
    rows, columns = -(-outer // B) * B, -(-inner // B) * B
    down, right = rows - outer, columns - inner
    # Padding has no error.
    W, zero, scale = _padded(W, down, right), _padded(zero, down, right), _padded(scale, down, right, 1.0)
    a = None if a is None else _padded(a, right, right)
    if g is not None:
        a = W.new_zeros(1, 1, 1).expand(len(g), columns, columns) if a is None else a
        codes = _round_diagonals(W, scale, zero, largest, owners, a, _padded(g, down, down), B)
    elif a is not None:
        codes = _round_columns(W, scale, zero, largest, owners, a, B)
    else:
        codes = _nearest(W, scale, zero, largest[:, None, None])
    return codes[:, :outer, :inner]


def _padded(x: Tensor, down: int, right: int, value: float = 0.0) -> Tensor:
    return pad(x, (0, right, 0, down), value=value) if down or right else x


def _nearest(W: Tensor, scale: Tensor, zero: Tensor, largest: Tensor) -> Tensor:
    return (W / scale).add_(zero).round_().clamp_min_(0).minimum(largest).to(torch.uint8)


def _round_columns(
    W: Tensor, scale: Tensor, zero: Tensor, largest: Tensor, owners: Tensor, a: Tensor, B: int
) -> Tensor:
    """Return the codes without g, column by column."""
    W, scale, zero = (x.unflatten(1, (-1, B)) for x in (W, scale, zero))  # (matrices, blocks of rows, B, inner)
    E, codes = torch.zeros_like(W), torch.zeros_like(W, dtype=torch.uint8)
    largest = largest[:, None, None]
    product, sums = torch.empty_like(W[..., :B]), torch.empty_like(W[..., 0])
    moved, smallest = torch.empty_like(sums), sums.new_zeros(())
    for start in range(0, W.shape[3], B):
        block = slice(start, start + B)
        rounded, error = torch.empty_like(product), torch.zeros_like(product)
        beside = torch.zeros_like(product)
        if start:
            coefficients = a[owners, block, :start].mT
            for i in range(W.shape[1]):
                beside[:, i] = E[:, i, :, :start] @ coefficients
        operands = (*(x[..., block] for x in (W, scale, zero)), beside, rounded, error)
        coefficients = a[owners, block, block][:, None, None]  # (matrices, 1, 1, B, B)
        for row, *views in zip(coefficients.unbind(3), *(x.unbind(-1) for x in operands), strict=True):
            w, s, z, along, code, new_error = views
            torch.mul(error, row, out=product)
            torch.sum(product, -1, out=sums)
            torch.add(along, sums, out=moved)
            torch.sub(w, moved, out=moved)
            moved.div_(s).add_(z).round_()
            torch.clamp(moved, smallest, largest, out=code)
            torch.sub(code, z, out=moved)
            torch.sub(moved.mul_(s), w, out=new_error)
        codes[..., block], E[..., block] = rounded, error
    return codes.flatten(1, 2)


def _round_diagonals(
    W: Tensor, scale: Tensor, zero: Tensor, largest: Tensor, owners: Tensor, a: Tensor, g: Tensor, B: int
) -> Tensor:
    """Return the codes, by anti-diagonals of blocks; blocks bring most of the sums into matrix products."""
    matrices = len(W)
    high, wide = W.shape[1] // B, W.shape[2] // B
    E, Y, codes = torch.zeros_like(W), torch.zeros_like(W), torch.zeros_like(W, dtype=torch.uint8)
    workspaces: dict[int, _Workspace] = {}
    for diagonal in range(high + wide - 1):
        blocks = [
            (slice(row * B, row * B + B), slice(column * B, column * B + B))
            for row in range(high)
            if 0 <= (column := diagonal - row) < wide
        ]
        if (work := workspaces.get(len(blocks))) is None:
            work = workspaces[len(blocks)] = _Workspace(len(blocks) * matrices, B, W)
        work.clear()
        for number, (i, j) in enumerate(blocks):
            place = slice(number * matrices, number * matrices + matrices)
            work.W[place], work.scale[place], work.zero[place] = W[:, i, j], scale[:, i, j], zero[:, i, j]
            work.along[place] = E[:, i, : j.start] @ a[owners, j, : j.start].mT
            work.across[place] = g[owners, i, : i.start] @ Y[:, : i.start, j]
            work.left[place, :, 1] = g[owners, i, i]
            work.right[place, :, 0] = a[owners, j, j].flip(1)
        work.round(largest.repeat(len(blocks))[:, None])
        parts = (work.codes, work.left[:, :, 0], work.right[:, :, 1].flip(1).mT)
        for (i, j), code, error, moved in zip(blocks, *(x.split(matrices) for x in parts), strict=True):
            codes[:, i, j], E[:, i, j], Y[:, i, j] = code, error, moved
    return codes


class _Step(NamedTuple):
    """Views of one anti-diagonal of every block, by growing rows."""

    left: Tensor  # (blocks, entries, 2, B): rows of E and of g
    right: Tensor  # (blocks, entries, 2, B): rows of a and of Y^T
    product: Tensor  # (blocks, entries, 2, B)
    sums: Tensor  # (blocks, entries, 2)
    error: Tensor  # (blocks, entries), like all further views
    Y: Tensor
    row: Tensor
    moved: Tensor
    operands: tuple[Tensor, ...]
    sum_pair: tuple[Tensor, ...]


class _Workspace:
    """Memory for blocks of one anti-diagonal of blocks, and the views that each step reads and writes.

    On an anti-diagonal, rows and columns run in opposite directions. With the rows of ``right`` in reverse order, all
    operands are strided views, which cost less than indices.

    Attributes:
        W, scale, zero: The blocks to round, (blocks, B, B).
        along, across: The sums over earlier blocks of the same rows and columns, (blocks, B, B).
        codes: The codes, (blocks, B, B).
        left: Rows of E and of g, (blocks, B, 2, B).
        right: Rows of a and of Y^T, the last row first, (blocks, B, 2, B).
    """

    def __init__(self, blocks: int, B: int, like: Tensor) -> None:
        self._memory = like.new_empty(6, blocks, B, B)
        self.W, self.scale, self.zero, self.along, self.across, self.codes = self._memory
        self.left, self.right = like.new_empty(2, blocks, B, 2, B)
        self._smallest = like.new_zeros(())
        self._steps = list(self._views(blocks, B, like))

    def clear(self) -> None:
        """Set E and Y to zero."""
        self.left[:, :, 0] = 0
        self.right[:, :, 1] = 0

    def _views(self, blocks: int, B: int, like: Tensor) -> Iterator[_Step]:
        product, sums, scratch = (
            like.new_empty(blocks * B * 2 * B),
            like.new_empty(blocks * B * 2),
            like.new_empty(2, blocks * B),
        )
        left, right, block = self.left, self.right, 2 * B * B
        for diagonal in range(2 * B - 1):
            first, last = max(0, diagonal - B + 1), min(B - 1, diagonal)
            entries = last + 1 - first
            size, column = (blocks, entries), diagonal - first  # the column of the entry in row `first`
            reverse = B - 1 - column  # the row of that column in `right`
            strides = (entries * 2 * B, 2 * B, B, 1)
            sum_views = sums.as_strided((*size, 2), (entries * 2, 2, 1))
            row, moved = scratch.as_strided((2, *size), (blocks * B, entries, 1))
            operands = self._memory.as_strided((6, *size), (blocks * B * B, B * B, max(B - 1, 1)), first * B + column)
            yield _Step(
                left[:, first : last + 1],
                right[:, reverse : reverse + entries],
                product.as_strided((*size, 2, B), strides),
                sum_views,
                left.as_strided(size, (block, 2 * B - 1), left.storage_offset() + first * 2 * B + column),
                right.as_strided(size, (block, 2 * B + 1), right.storage_offset() + reverse * 2 * B + B + first),
                row,
                moved,
                operands.unbind(0),
                sum_views.unbind(-1),
            )

    def round(self, largest: Tensor) -> None:  # (blocks, 1)
        """Write the codes, E to ``left`` and Y to ``right``."""
        for left, right, product, sums, error, Y, row, moved, operands, (beside, above) in self._steps:
            w, s, z, along, across, code = operands
            torch.mul(left, right, out=product)
            torch.sum(product, -1, out=sums)
            torch.add(along, beside, out=row)
            torch.add(row, across, out=moved)
            torch.sub(w, moved.add_(above), out=moved)
            moved.div_(s).add_(z).round_()
            torch.clamp(moved, self._smallest, largest, out=code)
            torch.sub(code, z, out=moved)
            torch.sub(moved.mul_(s), w, out=error)
            torch.add(row, error, out=Y)

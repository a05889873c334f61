r"""Moments of weights with very many rows or columns: embeddings, heads, and both if they share their weight.

A lookup is a product with a row of zeros and a single one. The second moment of these rows is diagonal, with the
frequencies of the indices, and the moment of the gradients at the output is as wide as a row of the table. The error
:math:`\Delta` of a table therefore costs :math:`\sum_v f_v \Delta_v G \Delta_v^T`. A head that multiplies by the same
weight adds :math:`\sum_v g_v \Delta_v A \Delta_v^T`, with A the moment of its inputs and g the mean squares of the
gradients at its outputs. Of the gradients' moment over all outputs only the diagonal is kept, because a vocabulary has
tens of thousands of them, and of A if there are as many inputs. Where the head ends the model, the gradients' moment is
the identity, and its estimate adds noise: a head of 4,000 rows in 4 bits had a relative error of 0.016 with feedback
along its rows, and of 0.025 with the moment of 2,000 gradients as well (0.106 and 0.119 behind a softmax).
"""

__all__ = ["TableMoments", "TableSums", "Use", "smoothed"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from panther.compression.calibration.targets import TABLES, Target
from panther.compression.moments.sums import add_squares, is_finite, mirror_, square_zeros

# Frequencies are mixed with this much of their mean, because most rows of a vocabulary are not read in calibration.
_SMOOTHING = 0.25
# Share of the frequencies in the weights of rows; the remaining weight goes by the squares of the gradients.
_EVEN = 0.25


@dataclass(frozen=True)
class Use:
    """What an error of a table costs in the lookups, or in the products of a head, as means over positions.

    Attributes:
        positions: Number of positions.
        rows: Weight of each row, (rows,); None is 1.
        columns: Moment in which the error of a row is measured, (columns, columns), or its diagonal alone, (columns,);
            None is the identity.
        own_rows: As ``rows``, for the layer's own output instead of the model's.
        own_columns: As ``columns``.
    """

    positions: float
    rows: Tensor | None
    columns: Tensor | None
    own_rows: Tensor | None
    own_columns: Tensor | None


@dataclass(frozen=True)
class TableMoments:
    """The uses of a table, in float64.

    Attributes:
        uses: Lookups, and the products of a head.
        positions: Number of positions of all uses.
    """

    uses: tuple[Use, ...]
    positions: float

    def columns(self, size: int, rows: int) -> Tensor | None:
        """Return the moment in which rows are rounded: the sum over the uses, weighted by their rows' weights.

        The result is None if it is the identity, and a diagonal if the moment of one use is. ``size`` and ``rows`` are
        the numbers of columns and of rows.
        """
        moments = [use.columns for use in self.uses if use.columns is not None]
        if not moments:
            return None
        is_diagonal = any(moment.dim() == 1 for moment in moments)
        identity = (torch.ones(size) if is_diagonal else torch.eye(size)).to(moments[0])
        total = torch.zeros_like(identity)
        for use in self.uses:
            weight = use.positions * (rows if use.rows is None else use.rows.sum())
            columns = identity if use.columns is None else use.columns
            total += weight * (columns.diagonal() if columns.dim() > total.dim() else columns)
        return total / self.positions


def smoothed(frequencies: Tensor) -> Tensor:
    """Return frequencies mixed with their mean, of the same sum: rows that were never read count, too."""
    return (frequencies + _SMOOTHING * frequencies.mean()) / (1 + _SMOOTHING)


class TableSums:
    """Sums over the calls of the layers of one table."""

    def __init__(self, target: Target, gradients: bool, device: torch.device) -> None:
        rows, columns = target.outer, target.inner
        self.leader, self.gradients = target, gradients

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        # Of lookups: how often each row was read, the squares of the gradients there, and their number.
        self.counts, self.energies, self.lookups = zeros(rows), zeros(rows), zeros(1)
        self.G = square_zeros(1, columns, device) if gradients and target.is_looked_up else None
        # Of products: the sum of the positions' weights, and the squares of the gradients at each output.
        self.products, self.weight = zeros(1), zeros(1)
        self.A: Tensor | None = None
        if target.is_multiplied:
            self.A = zeros(columns) if target.is_wide else square_zeros(1, columns, device)
        self.squares = zeros(rows)

    def add(self, module: nn.Module, x: Tensor, slope: Tensor | None, roots_of: Callable[[Tensor], Tensor]) -> bool:
        """Add a call: the indices or the rows of the input, and the gradients at the output, (1, positions, outputs).

        ``roots_of`` returns the roots of the weights of a head's positions. Return whether the gradients are finite.
        """
        if isinstance(module, TABLES):
            return self._add_lookups(module, x, slope)
        assert self.A is not None
        rows = x.to(torch.promote_types(x.dtype, torch.float32))[None]
        self.products += rows.shape[1]
        if slope is None:
            self.weight += rows.shape[1] * (_EVEN if self.gradients else 1.0)
            rows = rows * _EVEN**0.5 if self.gradients else rows
        else:
            roots = roots_of(slope)
            self.weight += roots.double().square().sum()
            self.squares += slope.square().sum((0, 1), dtype=torch.float64)
            rows = rows * roots[..., None]
        if self.A.dim() > 1:
            return (slope is None or is_finite(slope)) and add_squares(self.A, rows)
        self.A += rows.square().sum((0, 1), dtype=torch.float64)
        return slope is None or is_finite(slope)

    def _add_lookups(self, module: nn.Module, indices: Tensor, slope: Tensor | None) -> bool:
        indices = indices.long().flatten()
        if isinstance(module, nn.EmbeddingBag) and module.padding_idx is not None:
            indices = indices[indices != module.padding_idx]  # bags leave the row of the padding out
        share = 1.0
        if isinstance(module, nn.EmbeddingBag) and slope is not None and module.mode != "sum":
            # A mean gives each row of a bag an equal part of the gradient; of a maximum, each entry is of one row.
            share = slope.shape[1] / max(len(indices), 1)
        weight = share**2 if getattr(module, "mode", "") == "mean" else share
        ones = torch.ones(len(indices), dtype=torch.float64, device=indices.device)
        self.counts.index_add_(0, indices, weight * ones)
        self.lookups += slope.shape[1] if slope is not None else len(indices)
        if slope is None:
            return True
        if slope.shape[1] == len(indices):
            energies = weight * slope[0].square().sum(1, dtype=torch.float64)
        else:  # bags
            energies = weight * slope.square().sum(dtype=torch.float64) / max(slope.shape[1], 1) * ones
        self.energies.index_add_(0, indices, energies)
        assert self.G is not None
        return add_squares(self.G, slope)

    def moments(self, sum_: Callable[[Sequence[Tensor]], Any]) -> TableMoments:
        """Return the moments; ``sum_`` adds tensors over the ranks of a group, in place."""
        for matrix in (self.G, self.A):
            if matrix is not None and matrix.dim() > 1:
                mirror_(matrix)
        matrices = [matrix for matrix in (self.G, self.A) if matrix is not None]
        sum_([
            self.counts, self.energies, self.lookups, self.products, self.weight, self.squares, *matrices,
        ])  # fmt: skip
        uses = []
        if (lookups := self.lookups.item()) or not self.products.item():
            lookups = max(lookups, 1.0)
            frequencies = self.counts / lookups
            rows = frequencies
            if self.gradients and (energy := self.energies.sum().item()) > 0:
                by_gradient = self.energies * (frequencies.sum() / energy)
                rows = (by_gradient + _EVEN * frequencies) / (1 + _EVEN)
            columns = None if self.G is None else self.G[0] / lookups
            uses.append(Use(lookups, smoothed(rows), columns, smoothed(frequencies), None))
        if products := self.products.item():
            assert self.A is not None
            columns = (self.A[0] if self.A.dim() > 1 else self.A) / max(self.weight.item(), 1e-300)
            uses.append(Use(products, self.squares / products if self.gradients else None, columns, None, columns))
        return TableMoments(tuple(uses), sum(use.positions for use in uses))

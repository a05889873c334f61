r"""Weights with very many rows or columns: embeddings, heads, both if they share their weight, and large nn.Linear.

A lookup is a product with a row of zeros and a single one. The second moment of these rows is diagonal, with the
frequencies of the indices, and the moment of the gradients at the output is as wide as a row of the table. The error
:math:`\Delta` of a table therefore costs :math:`\sum_v f_v \Delta_v G \Delta_v^T`. A head that multiplies by the same
weight adds :math:`\sum_v g_v \Delta_v A \Delta_v^T`, with A the moment of its inputs and g the mean squares of the
gradients at its outputs. Of the gradients' moment over all outputs only the diagonal is kept, because a vocabulary has
tens of thousands of them, and of A if there are as many inputs. Where the head ends the model, the gradients' moment is
the identity, and its estimate adds noise: a head of 4,000 rows in 4 bits had a relative error of 0.016 with feedback
along its rows, and of 0.025 with the moment of 2,000 gradients as well (0.106 and 0.119 behind a softmax).

The rows of a table cost independent errors, so that feedback runs along rows alone, and all rows of a block are rounded
at once. A table can have a hundred million entries: only one block of it is in float64 at a time.
"""

__all__ = ["BLOCK_ENTRIES", "TABLES", "TableKind", "TableMoments", "TableSums", "Use", "smoothed"]

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from panther.compression.calibration.batches import Masks, counted
from panther.compression.calibration.targets import Target, register_kind
from panther.compression.forms.base import FormSettings, TargetFit
from panther.compression.forms.codes import add_ridge_, feedback
from panther.compression.forms.metric import Fit, QuantizedFit, QuantizedWeight
from panther.compression.moments import Call, RootsOf, add_squares, is_finite, mirror_, square_zeros
from panther.compression.weights.linear import DOUBLE, LinearKind
from panther.nn import QuantizedEmbedding, QuantizedEmbeddingBag
from panther.nn.quantized.matrix import QuantizedMatrix, quantization_grid, quantize

_TABLES = (nn.Embedding, nn.EmbeddingBag)
# Frequencies are mixed with this much of their mean, because most rows of a vocabulary are not read in calibration.
_SMOOTHING = 0.25
# Share of the frequencies in the weights of rows; the remaining weight goes by the squares of the gradients.
_EVEN = 0.25
BLOCK_ENTRIES = 2**20  # entries of a block of rows
_STRIP = 64  # Columns that are rounded before their errors go to all later columns in one product.
_PLAIN = torch.float64


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
    constant: ClassVar[bool] = False
    tokens: ClassVar[tuple[float, ...]] = ()

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
        self.G = square_zeros(1, columns, device) if gradients and _is_looked_up(target) else None
        # Of products: the sum of the positions' weights, and the squares of the gradients at each output.
        self.products, self.weight = zeros(1), zeros(1)
        self.A: Tensor | None = None
        if target.is_multiplied:
            self.A = zeros(columns) if target.is_wide else square_zeros(1, columns, device)
        self.squares = zeros(rows)

    def add(self, target: Target, call: Call, slope: Tensor | None, roots_of: RootsOf) -> bool:
        """Add a call, and the gradients at the output, (1, positions, outputs); return whether these are finite."""
        if isinstance(call.module, _TABLES):
            return self._add_lookups(call.module, call.x, slope)
        assert self.A is not None
        rows = call.x.to(torch.promote_types(call.x.dtype, torch.float32))[None]
        self.products += rows.shape[1]
        roots = roots_of(slope)
        if isinstance(roots, Tensor):
            assert slope is not None
            self.weight += roots.double().square().sum()
            self.squares += slope.square().sum((0, 1), dtype=torch.float64)
            rows = rows * roots[..., None]
        else:
            self.weight += rows.shape[1] * (1.0 if roots is None else roots**2)
            rows = rows if roots is None else rows * roots
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
        """Return the moments, as :meth:`~panther.compression.moments.Sums.moments` does."""
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


def _blocks(target: Target) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of the weight, in float64."""
    weight, count = target.kind.rows(target), max(1, BLOCK_ENTRIES // target.inner)
    for start in range(0, target.outer, count):
        rows = slice(start, start + count)
        yield rows, weight[rows].to(_PLAIN)


def _feedback(target: Target, moments: TableMoments | None) -> tuple[Tensor, Tensor | None]:
    """Return the order in which columns are rounded, and the coefficients of earlier errors; None without feedback."""
    columns = None if moments is None else moments.columns(target.inner, target.outer)
    if columns is None:
        return torch.arange(target.inner), None
    if columns.dim() == 1 or not columns.diagonal().any():  # or no gradient reaches the table
        return torch.arange(target.inner), None
    order, coefficients = feedback(add_ridge_(columns[None]), target.inner, columns[None])
    assert coefficients is not None  # because there is a moment
    return order[0], coefficients[0]


def _losses(error: Tensor, moments: TableMoments | None, rows: slice) -> Tensor:  # (2,)
    """Return what an error of these rows costs in the model's output and in the layer's own, for each position."""
    plain = error.square().sum(1)
    if moments is None:
        return plain.sum().expand(2).cpu()
    loss = torch.zeros(2, dtype=_PLAIN)
    for use in moments.uses:
        pairs = ((use.rows, use.columns), (use.own_rows, use.own_columns))
        for index, (weights, columns) in enumerate(pairs):
            if columns is None:
                squares = plain
            else:
                squares = ((error @ columns if columns.dim() > 1 else error * columns) * error).sum(1)
            total = squares.sum() if weights is None else squares @ weights[rows]
            loss[index] += use.positions / moments.positions * total.item()
    return loss


def _fit_of(losses: Tensor) -> Fit:
    """Return a fit without components, with the losses in the model's output and in the layer's own."""
    empty = torch.zeros(1, 0, 0)
    return Fit(empty, empty, losses[:1], losses[1:], losses.new_zeros(1), None)


def _round_rows(
    W: Tensor,  # (rows, columns)
    scales: Tensor,  # (rows, groups)
    zeros: Tensor,  # (rows, groups)
    group_size: int,
    bits: int,
    order: Tensor,  # (columns,)
    coefficients: Tensor,  # (columns, columns), strictly lower triangular
) -> Tensor:  # (rows, columns), uint8
    """Return the codes of a weight whose columns are rounded in their order, all rows at once.

    Column j is moved by the errors of earlier columns times ``coefficients[j]``. The codes are those of
    :func:`~panther.compression.forms.codes.round_entries`, which also takes many small matrices: with one
    matrix of 2,730 x 384, products of a matrix and a vector take 0.09 s and its sums 0.42 s.
    """
    # Transposed, so that each column is contiguous.
    sorted_weight = W.to(torch.float32).mT[order].contiguous()
    steps, offsets = (part.to(torch.float32).mT.contiguous() for part in (scales, zeros))
    E, codes = torch.empty_like(sorted_weight), torch.empty(W.mT.shape, dtype=torch.uint8, device=W.device)
    top = 2.0**bits - 1
    places = order.tolist()
    for start in range(0, len(places), _STRIP):
        strip = slice(start, start + _STRIP)
        moved = coefficients[strip, :start] @ E[:start]
        for j, place in enumerate(places[strip], start):
            move = moved[j - start].addmv_(E[start:j].mT, coefficients[j, start:j])
            step, offset = steps[place // group_size], offsets[place // group_size]
            w = sorted_weight[j]
            code = ((w - move) / step).add_(offset).round_().clamp_(0, top)
            codes[place] = code
            torch.sub((code - offset).mul_(step), w, out=E[j])
    return codes.mT.contiguous()


class TableKind(LinearKind):
    """Rows that are looked up, that a head multiplies by as well, or that are too many for moments over all of them."""

    classes = _TABLES
    takes_every_form = False
    without_codes = "takes codes alone, and forms has no width: kept as it is"
    has_metric = False

    def holds(self, module: nn.Module) -> bool:
        """Return whether a layer looks up rows."""
        return isinstance(module, _TABLES)

    def claims(self, target: Target) -> bool:
        """Return whether some layers look up rows, or the weight of nn.Linear is large."""
        return _is_looked_up(target) or (target.is_large and all(isinstance(m, nn.Linear) for m in target.modules))

    def can_share(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether all layers look up rows or are nn.Linear."""
        return all(isinstance(module, (nn.Linear, *_TABLES)) for module in modules)

    def multiplies(self, module: nn.Module) -> bool:
        """Return whether a layer is a head, or a large linear layer."""
        return not isinstance(module, _TABLES)

    def counted_input(self, module: nn.Module, x: Tensor, masks: Masks | None) -> Tensor:
        """Return the indices of the positions that count, all indices of bags, or rows."""
        if isinstance(module, nn.EmbeddingBag):
            return x
        if isinstance(module, nn.Embedding):
            return counted(x[..., None], masks, module)[:, 0]
        return super().counted_input(module, x, masks)

    def sums(self, targets: Sequence[Target], gradients: bool, device: torch.device) -> TableSums:
        """Return the sums over lookups and products."""
        return TableSums(targets[0], gradients, device)

    def moments_bytes(self, targets: Sequence[Target], gradients: bool) -> int:
        """Return the bytes of G of lookups, of A of products, and of three numbers for each row."""
        entries = 0
        for target in targets:
            inputs = target.inner if target.is_wide else target.inner**2
            entries += gradients * _is_looked_up(target) * target.inner**2 + target.is_multiplied * inputs
        return DOUBLE * (entries + 3 * sum(target.outer for target in targets))

    def needs_positions(self, target: Target) -> bool:
        """Return False: rows that no position reads are rounded as well as they can be."""
        return False

    def fit(
        self, target: Target, moments: TableMoments | None, widths: Sequence[int], settings: FormSettings, ridge: float
    ) -> TargetFit:
        """Round the weight to each of the widths, in bits; without moments, each entry to its nearest code."""
        size = min(settings.group_size or target.inner, target.inner)
        order, coefficients = _feedback(target, moments)
        parts: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {bits: [] for bits in widths}
        losses: dict[int | None, Tensor] = {bits: torch.zeros(2, dtype=_PLAIN) for bits in (None, *widths)}
        for rows, W in _blocks(target):
            losses[None] += _losses(W, moments, rows)
            for bits in widths:
                grid = quantization_grid(W, bits, size, symmetric=bits in settings.symmetric_widths)
                codes = (
                    quantize(W, *grid, size, bits)
                    if coefficients is None
                    else _round_rows(W, *grid, size, bits, order, coefficients)
                )
                parts[bits].append((codes, *grid))
                losses[bits] += _losses(QuantizedWeight(codes, *grid, size).dense().sub_(W), moments, rows)
        fits = {}
        for bits, blocks in parts.items():
            codes, scales, zeros = map(torch.cat, zip(*blocks, strict=True))
            fits[bits] = QuantizedFit(QuantizedWeight(codes, scales, zeros, size), _fit_of(losses[bits]))
        return TargetFit(_fit_of(losses[None]), fits)

    def sensitivity(self, target: Target, moments: Any, ridge: float) -> float:
        """Return the loss of codes for each position, up to a factor that depends on their width alone."""
        columns = None if moments is None else moments.columns(target.inner, target.outer)
        if moments is None or columns is None:
            width = float(target.inner)
        elif columns.dim() == 1:
            width = columns.sum().item()
        else:  # with feedback the error of a column counts with its pivot
            width = torch.linalg.cholesky(add_ridge_(columns[None])).diagonal(dim1=-2, dim2=-1).square().sum().item()
        if moments is not None and columns is None:
            width *= (
                sum(
                    use.positions * (target.outer if use.rows is None else use.rows.sum().item())
                    for use in moments.uses
                )
                / moments.positions
            )
        return sum(W.square().sum().item() for _, W in _blocks(target)) / target.dense_numbers * width

    def quantized_layer(
        self, target: Target, module: nn.Module, bits: int | None, rank: int, settings: FormSettings
    ) -> QuantizedMatrix:
        """Return a quantized embedding or bag of embeddings, or the layer of a head."""
        if self.multiplies(module):
            return super().quantized_layer(target, module, bits, rank, settings)
        new_class = QuantizedEmbedding if isinstance(module, nn.Embedding) else QuantizedEmbeddingBag
        return new_class.in_place_of(module, bits=bits, group_size=settings.group_size)


def _is_looked_up(target: Target) -> bool:
    return any(isinstance(module, _TABLES) for module in target.modules)


TABLES = TableKind()
register_kind(TABLES)

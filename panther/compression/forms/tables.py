r"""The fit of a table: codes of embeddings and large layers, whose rows are rounded independently of each other.

The rows of a table cost independent errors, so that feedback runs along rows alone, and all rows of a block are rounded
at once. A table can have a hundred million entries: only one block of it is in float64 at a time.
"""

__all__ = ["BLOCK_ENTRIES", "fit_table", "table_sensitivity"]

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import TargetFit
from panther.compression.forms.metric import Fit
from panther.compression.forms.rounding import QuantizedFit, QuantizedWeight, add_ridge_, feedback
from panther.compression.moments import TableMoments
from panther.nn.quantized.grid import quantization_grid, quantize
from panther.nn.quantized.stacked import StackedExperts

BLOCK_ENTRIES = 2**20  # entries of a block of rows
_STRIP = 64  # Columns that are rounded before their errors go to all later columns in one product.
_PLAIN = torch.float64


def fit_table(
    target: Target,
    moments: TableMoments | None,
    widths: Sequence[int],
    group_size: int | None,
    *,
    symmetric: bool = False,
) -> TargetFit:
    """Round the weight of a table to each of the widths, in bits; without moments, each entry to its nearest code.

    Cost: for each width ``rows columns^2`` flops, and the search of the grids.
    """
    size = target.inner if group_size is None else min(group_size, target.inner)
    order, coefficients = _feedback(target, moments)
    parts: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {bits: [] for bits in widths}
    losses: dict[int | None, Tensor] = {bits: torch.zeros(2, dtype=_PLAIN) for bits in (None, *widths)}
    for rows, W in _blocks(target):
        losses[None] += _losses(W, moments, rows)
        for bits in widths:
            grid = quantization_grid(W, bits, size, symmetric=symmetric)
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


def table_sensitivity(target: Target, moments: TableMoments | None) -> float:
    """Return the loss of a quantized table, up to a factor that depends on its width alone, for each position."""
    columns = None if moments is None else moments.columns(target.inner, target.outer)
    if moments is None or columns is None:
        width = float(target.inner)
    elif columns.dim() == 1:
        width = columns.sum().item()
    else:  # with feedback the error of a column counts with its pivot
        width = torch.linalg.cholesky(add_ridge_(columns[None])).diagonal(dim1=-2, dim2=-1).square().sum().item()
    if moments is not None and columns is None:
        width *= (
            sum(use.positions * (target.outer if use.rows is None else use.rows.sum().item()) for use in moments.uses)
            / moments.positions
        )
    return sum(W.square().sum().item() for _, W in _blocks(target)) / target.dense_numbers * width


def _blocks(target: Target) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of the weight, in float64."""
    weight = target.weight.detach()
    if isinstance(layer := target.modules[0], StackedExperts):  # of one expert
        weight = weight[0].mT if layer.transposed else weight[0]
    count = max(1, BLOCK_ENTRIES // target.inner)
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
    :func:`~panther.compression.forms.nearest_plane.round_entries`, which also takes many small matrices: with one
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

r"""The quantized forms: codes of 2 to 8 bits with a scale and a zero for each group of a row's columns.

A weight is rounded to a grid with error feedback in the metric of its inputs and of its output's sensitivity. The
error E of the rounded weight costs :math:`\operatorname{tr}(G E A E^T) = \lVert R_G E R_A^T \rVert^2` with
triangular roots of G and A. Entries are rounded one after the other. Before an entry is rounded, it is moved to cancel
the errors of earlier entries in its coordinate of :math:`R_G E R_A^T`, so that only its own rounding error remains
there. This is the nearest-plane algorithm (L. Babai, "On Lovasz' lattice reduction and the nearest lattice point
problem", 1986, doi:10.1007/BF02579403) in the Kronecker metric. With G the identity it is GPTQ (E. Frantar et al.,
2023, arXiv:2210.17323), whose feedback runs along the rows only.

With :math:`Y = E (I + a)^T`, entry (i, j) is moved by :math:`(Y - E)_{ij} + (g Y)_{ij}`, which needs the rows up to i
and the columns up to j. All entries of an anti-diagonal are therefore independent of each other, and without g all
entries of a column. A step takes few operations on small tensors, so their overhead decides the time: many matrices
are rounded at once, and each operation writes to views that are made once.
"""

__all__ = [
    "JOINT_ENTRIES", "LOSS_PER_BIT", "WIDTHS", "Codes", "RoundingTask", "add_ridge_", "convert_quantized", "feedback",
    "fit_quantized", "join_weights", "quantize_weights", "round_entries", "sensitivity",
]  # fmt: skip

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from panther.compression.calibration.targets import Target
from panther.compression.forms.base import Form, FormSettings, Option, Replacement, TargetFit, register, replace_layers
from panther.compression.forms.metric import Fit, Metric, QuantizedFit, QuantizedWeight, factor
from panther.compression.readers import BLOCK, block_bytes
from panther.nn import QuantizedConv2d, QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedExperts, QuantizedLinear
from panther.nn.quantized.matrix import QuantizedMatrix, quantization_grid, round_factors

WIDTHS = (8, 6, 5, 4, 3, 2)
# Rows and columns of a block. Larger blocks need more scalar products, smaller blocks more calls.
_BLOCK = 64


class Codes(Form):
    """Codes of one width, rounded with error feedback."""

    bits: int
    layers = (QuantizedLinear, QuantizedConv2d, QuantizedEmbedding, QuantizedEmbeddingBag, QuantizedExperts)
    uses_rounding = True
    is_default = True
    is_quantized = True
    fits_every_kind = True

    def __init__(self, bits: int) -> None:
        """Make the form of codes with this number of bits."""
        self.name, self.bits = f"int{bits}", bits

    def stored_bytes(self, target: Target, rank: int, settings: FormSettings) -> int:
        """Return the bytes of codes, scales and zeros, in the files of the reader if it has blocks."""
        if settings.reader is not None and settings.reader.has_blocks:
            is_symmetric = self.bits in settings.symmetric_widths
            blocks = target.groups * target.outer * -(-target.inner // BLOCK)
            return blocks * block_bytes(self.bits, is_symmetric=is_symmetric)
        return target.kind.code_bytes(target, self.bits, rank, settings.group_size)

    def loss(self, fit: TargetFit, option: Option) -> tuple[float, float] | None:
        """Return the losses of the codes, and of a correction of rank ``option.rank`` in 8 bits."""
        if self.bits not in fit.codes:
            return None
        return fit.codes[self.bits].residual.losses(option.rank or 0, rounded=True)

    def convert(self, target: Target, option: Option, fit: TargetFit, settings: FormSettings, seed: int) -> Replacement:
        """Return quantized layers."""
        codes = fit.codes[self.bits]
        return convert_quantized(target, option, codes.residual, codes.weight, settings)

    def random_layer(self, target: Target, module: nn.Module, option: Option, settings: FormSettings) -> nn.Module:
        """Return a new layer, with the random codes of its constructor."""
        layer: nn.Module = target.kind.quantized_layer(target, module, option.bits, option.rank or 0, settings)
        return layer


register(*map(Codes, WIDTHS))


def convert_quantized(
    target: Target, option: Option, fit: Fit, weight: QuantizedWeight | None, settings: FormSettings
) -> Replacement:
    """Make a quantized layer for each layer of the target, of ``weight`` if given, and the components in int8."""
    rank = option.rank or 0
    # The components are not balanced, because the fit predicted the rounding errors of these components.
    factors = round_factors(fit.left[0, :, :rank], fit.right[0, :rank]) if rank else None
    change: Tensor | float = 0.0
    if fit.means is not None:
        mean, exact = fit.means
        change = exact.flatten()
        if weight is not None:
            matrices = weight.dense().unflatten(0, exact.shape)
            change = change - (matrices @ mean[..., None]).flatten()
        if factors is not None:  # a grouped convolution has no factors
            left, right, scales = (part.double() for part in factors)
            change = change - left @ (scales * (right @ mean[0]))

    def make(module: nn.Module) -> QuantizedMatrix:
        layer: QuantizedMatrix = target.kind.quantized_layer(target, module, option.bits, rank, settings)
        if weight is not None:
            layer.set_codes_(weight.codes, weight.scales, weight.zeros)
        if factors is not None:
            layer.set_factors_(*factors)
        return layer

    return replace_layers(target, make, change, share_buffers=True)


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


# Matrices, and widths of one matrix, are rounded jointly up to this number of entries. Below it, calls take more time
# than arithmetic: three widths of a (384, 384) weight took 0.96 s one after the other, and 0.5 s jointly.
JOINT_ENTRIES = 2**20
# Ridge for rounding, relative to the mean of a moment's diagonal. It is larger than for components, because feedback
# into directions that hardly occur helps less on different batches. In 3 bits, the held-out error of a sentence encoder
# was 0.2422 with a ridge of 0.01 and 0.2397 with this ridge.
_RIDGE = 3e-2
LOSS_PER_BIT = 4.0  # each further bit halves the step, and divides the loss by this factor


@dataclass(frozen=True)
class RoundingTask:
    """A weight to round to some widths, and how many components of its rounding errors to compute."""

    metric: Metric
    widths: Sequence[int]
    most: int
    seed: int
    dtype: torch.dtype

    @property
    def kind(self) -> Hashable:
        """Return what tasks must have in common to be done jointly: the shape of the matrices, and the metrics."""
        return self.metric.source.shape[1:], self.metric.L is None, self.metric.R is None

    @property
    def num_entries(self) -> int:
        """Return the number of entries to round, over all widths."""
        return len(self.widths) * self.metric.source.numel()


def fit_quantized(
    tasks: Sequence[RoundingTask], group_size: int | None, *, symmetric_widths: Collection[int] = ()
) -> list[dict[int, QuantizedFit]]:
    """Round the weights of tasks of one kind to their widths, and split each rounding error into components.

    Cost: the cost of ``quantize_weights``, and an SVD for each width if there are components.
    """
    W = _joined([task.metric.source for task in tasks])
    lower = [task.metric.L for task in tasks if task.metric.L is not None]
    upper = [task.metric.R for task in tasks if task.metric.R is not None]
    A = _joined([add_ridge_(L @ L.mT) for L in lower]) if lower else None
    G = _joined([add_ridge_(R.mT @ R) for R in upper]) if upper else None
    group_size = W.shape[2] if group_size is None else min(group_size, W.shape[2])
    fits = []
    matrices = [len(task.metric.source) for task in tasks]
    widths = [task.widths for task, count in zip(tasks, matrices, strict=True) for _ in range(count)]
    quantized = iter(quantize_weights(W, A, G, widths, group_size, symmetric_widths=symmetric_widths))
    for task, count in zip(tasks, matrices, strict=True):
        matrix_weights = [next(quantized) for _ in range(count)]
        weights = {bits: join_weights([weight[bits] for weight in matrix_weights]) for bits in task.widths}
        fits.append({bits: QuantizedFit(weight, _residual(task, weight)) for bits, weight in weights.items()})
    return fits


def _joined(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices))  # torch.cat copies a single tensor too


def _residual(task: RoundingTask, weight: QuantizedWeight) -> Fit:
    W = task.metric.source
    error = W - weight.dense().view_as(W)
    return factor(error, task.metric, most=task.most, seed=task.seed, dtype=task.dtype)


def join_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return the weight whose rows are the rows of these weights."""
    if len(weights) == 1:
        return weights[0]
    parts = ((weight.codes, weight.scales, weight.zeros) for weight in weights)
    codes, scales, zeros = map(torch.cat, zip(*parts, strict=True))
    return QuantizedWeight(codes, scales, zeros, weights[0].group_size)


def add_ridge_(A: Tensor) -> Tensor:
    """Add the ridge for rounding to the diagonals of a moment, in place."""
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    diagonal += _RIDGE * diagonal.mean(-1, keepdim=True)
    return A


def sensitivity(metric: Metric) -> float:
    """Return the loss of a quantized weight, up to a factor that depends on its width alone.

    With feedback in both metrics, the error of each entry counts with the square of its pivots in the Cholesky factors.
    """
    _, outer, inner = metric.source.shape
    columns = inner if metric.L is None else metric.L.diagonal(dim1=-2, dim2=-1).square().sum(-1)
    rows = outer if metric.R is None else metric.R.diagonal(dim1=-2, dim2=-1).square().sum(-1)
    return (metric.source.square().mean((1, 2)) * columns * rows).sum().item()


def quantize_weights(
    W: Tensor,  # (matrices, outer, inner)
    A: Tensor | None,  # (matrices, inner, inner); None is the identity, as for G
    G: Tensor | None,  # (matrices, outer, outer)
    widths: Sequence[Sequence[int]],
    group_size: int,
    *,
    symmetric_widths: Collection[int] = (),
) -> list[dict[int, QuantizedWeight]]:
    r"""Round each matrix to each of its widths, in bits, such that :math:`\operatorname{tr}(G E A E^T)` is small.

    A and G must be positive definite. The grid of each group is found beforehand, for the weight without feedback. The
    codes of a matrix and a width do not depend on what is rounded with them.

    Cost: ``2 outer inner (outer + inner)`` flops for each matrix and width, and two Cholesky factorisations.
    """
    matrices, outer, inner = W.shape
    rows, g = feedback(G, outer, W)
    columns, a = feedback(A, inner, W)
    each, rows, columns = torch.arange(matrices, device=W.device)[:, None, None], rows[..., None], columns[:, None]
    # In float32, rounding differs from float64 only within a few units of a tie, for at most 2^-20 of the entries, and
    # near a tie both directions are equally good.
    sorted_weights = W[each, rows, columns].to(torch.float32)
    grids = _grids(W, widths, group_size, symmetric_widths)
    pairs = [(matrix, bits) for matrix in range(matrices) for bits in widths[matrix]]
    quantized: list[dict[int, QuantizedWeight]] = [{} for _ in range(matrices)]
    count = max(1, JOINT_ENTRIES // max(1, outer * inner))
    for start in range(0, len(pairs), count):
        joint_pairs = pairs[start : start + count]
        owners = torch.tensor([matrix for matrix, _ in joint_pairs], device=W.device)
        scale, zero = _sorted_grids([grids[pair] for pair in joint_pairs], rows[owners], columns[owners] // group_size)
        largest = torch.tensor([2.0**bits - 1 for _, bits in joint_pairs], device=W.device)
        sorted_codes = round_entries(sorted_weights[owners], scale, zero, largest, owners, a, g)
        for (matrix, bits), codes_in_order in zip(joint_pairs, sorted_codes, strict=True):
            codes = torch.empty(outer, inner, dtype=torch.uint8, device=W.device)
            codes[rows[matrix], columns[matrix]] = codes_in_order
            quantized[matrix][bits] = QuantizedWeight(codes, *grids[matrix, bits], group_size)
    return quantized


def _grids(
    W: Tensor, widths: Sequence[Sequence[int]], group_size: int, symmetric_widths: Collection[int]
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Return scales and zeros, (outer, groups) each, for each matrix and each of its widths."""
    grids: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for bits in sorted({bits for matrix_widths in widths for bits in matrix_widths}):
        matrices = [matrix for matrix, matrix_widths in enumerate(widths) if bits in matrix_widths]
        weights = W if len(matrices) == len(W) else W[matrices]
        grid = quantization_grid(weights.flatten(0, 1), bits, group_size, symmetric=bits in symmetric_widths)
        scales, zeros = (x.split(W.shape[1]) for x in grid)
        pairs = zip(scales, zeros, strict=True)
        grids |= {(matrix, bits): grid for matrix, grid in zip(matrices, pairs, strict=True)}
    return grids


def _sorted_grids(
    grids: Sequence[tuple[Tensor, Tensor]],
    rows: Tensor,  # (grids, outer, 1)
    groups: Tensor,  # (grids, 1, inner)
) -> Iterator[Tensor]:
    """Yield scales and zeros in the order of rounding, (grids, outer, inner) each, in float32."""
    each = torch.arange(len(grids), device=rows.device)[:, None, None]
    for parts in zip(*grids, strict=True):
        yield torch.stack(parts)[each, rows, groups].to(torch.float32)


def feedback(M: Tensor | None, size: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the order of rounding, and the coefficients with which earlier errors move later entries, if any.

    The largest diagonal entries come first: their errors weigh most, and later entries can still compensate for them.
    """
    matrices = len(like)
    if M is None:
        order = torch.arange(size, device=like.device).expand(matrices, size)
        return order, None
    order = M.diagonal(dim1=-2, dim2=-1).argsort(descending=True)
    last_first, each = order.flip(1), torch.arange(matrices, device=like.device)[:, None, None]
    # Three matrices of the moment's size are alive at a time, the moment included.
    R = M[each, last_first[..., None], last_first[:, None]]
    R = torch.linalg.cholesky(R, upper=True)
    R = R.flip(1, 2)  # lower triangular
    R /= R.diagonal(dim1=-2, dim2=-1)[..., None].clone()
    return order, R.to(torch.float32).tril_(-1)

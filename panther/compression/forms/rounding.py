r"""Rounding a weight to a grid with error feedback in the metric of its inputs and of its output's sensitivity.

The error E of the rounded weight costs :math:`\operatorname{tr}(G E A E^T) = \lVert R_G E R_A^T \rVert^2` with
triangular roots of G and A. Entries are rounded one after the other. Before an entry is rounded, it is moved to cancel
the errors of earlier entries in its coordinate of :math:`R_G E R_A^T`, so that only its own rounding error remains
there. This is the nearest-plane algorithm (L. Babai, "On Lovasz' lattice reduction and the nearest lattice point
problem", 1986, doi:10.1007/BF02579403) in the Kronecker metric. With G the identity it is GPTQ (E. Frantar et al.,
2023, arXiv:2210.17323), whose feedback runs along the rows only.
"""

__all__ = [
    "JOINT_ENTRIES", "LOSS_PER_BIT", "QuantizedFit", "QuantizedWeight", "RoundingTask", "add_ridge_", "feedback",
    "fit_quantized", "join_weights", "quantize_weights", "sensitivity",
]  # fmt: skip

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from panther.compression.forms.metric import Fit, Metric, factor
from panther.compression.forms.nearest_plane import round_entries
from panther.kernels.ops.quantized_operands import spread
from panther.nn.quantized.grid import quantization_grid

# Matrices, and widths of one matrix, are rounded jointly up to this number of entries. Below it, calls take more time
# than arithmetic: three widths of a (384, 384) weight took 0.96 s one after the other, and 0.5 s jointly.
JOINT_ENTRIES = 2**20
# Ridge for rounding, relative to the mean of a moment's diagonal. It is larger than for components, because feedback
# into directions that hardly occur helps less on different batches. In 3 bits, the held-out error of a sentence encoder
# was 0.2422 with a ridge of 0.01 and 0.2397 with this ridge.
_RIDGE = 3e-2
LOSS_PER_BIT = 4.0  # each further bit halves the step, and divides the loss by this factor


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight on a grid: ``scales * (codes - zeros)``, with a scale and a zero for each group of a row's columns.

    The rows of a grouped convolution's matrices follow each other, as in the layer.

    Attributes:
        codes: (rows, inner), uint8.
        scales: (rows, groups of columns), bfloat16.
        zeros: (rows, groups of columns), uint8.
        group_size: Columns of a group; the last one can have fewer.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int

    def dense(self) -> Tensor:  # (rows, inner), float64
        """Return the weight ``scales * (codes - zeros)``."""
        scales, zeros = (
            spread(each.double(), self.group_size, self.codes.shape[1]) for each in (self.scales, self.zeros)
        )
        return scales * (self.codes.double() - zeros)


@dataclass(frozen=True)
class QuantizedFit:
    """A weight quantized at one width.

    Attributes:
        weight: The codes, scales and zeros.
        residual: Components of the rounding error, for a correction; the first tail is the loss without a correction.
    """

    weight: QuantizedWeight
    residual: Fit


@dataclass(frozen=True)
class RoundingTask:
    """A weight to round, and the settings of the components of its rounding errors.

    Attributes:
        metric: The metric, with the weight as its source.
        widths: Widths of the codes, in bits.
        most: Number of components of each rounding error.
        seed: Seed of the randomized SVD.
        dtype: The dtype of the components.
    """

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
    tasks: Sequence[RoundingTask], group_size: int | None, *, symmetric: bool = False
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
    quantized = iter(quantize_weights(W, A, G, widths, group_size, symmetric=symmetric))
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
    symmetric: bool = False,
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
    grids = _grids(W, widths, group_size, symmetric)
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
    W: Tensor, widths: Sequence[Sequence[int]], group_size: int, symmetric: bool
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Return scales and zeros, (outer, groups) each, for each matrix and each of its widths."""
    grids: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for bits in sorted({bits for matrix_widths in widths for bits in matrix_widths}):
        matrices = [matrix for matrix, matrix_widths in enumerate(widths) if bits in matrix_widths]
        weights = W if len(matrices) == len(W) else W[matrices]
        scales, zeros = (
            x.split(W.shape[1]) for x in quantization_grid(weights.flatten(0, 1), bits, group_size, symmetric=symmetric)
        )
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

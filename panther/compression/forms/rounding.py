r"""Rounding a weight to a grid with error feedback in the metric of its inputs and of its output's sensitivity.

The error E of the rounded weight costs :math:`\operatorname{tr}(G E A E^T) = \lVert R_G E R_A^T \rVert^2` with
triangular roots of G and A. Entries are rounded one after the other. Before an entry is rounded, it is moved to cancel
the errors of earlier entries in its coordinate of :math:`R_G E R_A^T`, so that only its own rounding error remains
there. This is the nearest-plane algorithm (L. Babai, "On Lovasz' lattice reduction and the nearest lattice point
problem", 1986, doi:10.1007/BF02579403) in the Kronecker metric. With G the identity it is GPTQ (E. Frantar et al.,
2023, arXiv:2210.17323), whose feedback runs along the rows only.
"""

__all__ = ["LOSS_PER_BIT", "QuantizedFit", "QuantizedWeight", "fit_quantized", "quantize_weight", "sensitivity"]

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from panther.compression.forms.metric import Fit, Metric, factor
from panther.kernels.ops.quantized_operands import spread
from panther.nn.quantized.grid import quantization_grid

_BLOCK = 64  # rows and columns of a block; larger blocks need more scalar products, smaller blocks more calls
# Widths are rounded jointly up to this number of entries. Below it, calls take more time than arithmetic: six widths of
# a (96, 24) weight took 0.27 s one after the other and 0.09 s jointly.
_JOINT_ENTRIES = 2**18
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


def fit_quantized(
    metric: Metric, widths: Sequence[int], group_size: int | None, *, most: int, seed: int, dtype: torch.dtype
) -> dict[int, QuantizedFit]:
    """Round a weight to each of the widths, and split each rounding error into ``most`` components.

    Cost: the cost of ``quantize_weight``, and an SVD for each width if ``most`` is not 0.
    """
    W = metric.source
    A = None if metric.L is None else _add_ridge_(metric.L @ metric.L.mT)
    G = None if metric.R is None else _add_ridge_(metric.R.mT @ metric.R)
    group_size = W.shape[2] if group_size is None else min(group_size, W.shape[2])
    fits = {}
    for bits, weight in zip(widths, quantize_weight(W, A, G, widths, group_size), strict=True):
        residual = factor(W - weight.dense().view_as(W), metric, most=most, seed=seed, dtype=dtype)
        fits[bits] = QuantizedFit(weight, residual)
    return fits


def _add_ridge_(A: Tensor) -> Tensor:
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


def quantize_weight(
    W: Tensor,  # (matrices, outer, inner), one matrix except for grouped convolutions
    A: Tensor | None,  # (matrices, inner, inner); None is the identity, as for G
    G: Tensor | None,  # (matrices, outer, outer)
    widths: Sequence[int],
    group_size: int,
) -> list[QuantizedWeight]:
    r"""Round a weight to each of the widths, in bits, such that :math:`\operatorname{tr}(G E A E^T)` is small.

    A and G must be positive definite. The grid of each group is found beforehand, for the weight without feedback.

    Cost: ``2 outer inner (outer + inner)`` flops for each matrix and width, and two Cholesky factorisations.
    """
    matrices, outer, inner = W.shape
    rows, g = _feedback(G, outer, W)
    columns, a = _feedback(A, inner, W)
    each, rows, columns = torch.arange(matrices, device=W.device)[:, None, None], rows[..., None], columns[:, None]
    # In float32, rounding differs from float64 only within a few units of a tie, for at most 2^-20 of the entries, and
    # near a tie both directions are equally good.
    sorted_weight = W[each, rows, columns].to(torch.float32)
    quantized = []
    count = max(1, _JOINT_ENTRIES // max(1, W.numel()))
    for start in range(0, len(widths), count):
        joint_widths = widths[start : start + count]
        grids = [quantization_grid(W.flatten(0, 1), bits, group_size) for bits in joint_widths]
        scale, zero = (
            torch.cat([x.unflatten(0, (matrices, outer))[each, rows, columns // group_size] for x in parts])
            for parts in zip(*grids, strict=True)
        )
        largest = torch.tensor([2.0**bits - 1 for bits in joint_widths], device=W.device).repeat_interleave(matrices)
        repeated = (x.expand(len(joint_widths), *x.shape).flatten(0, 1) for x in (sorted_weight, a, g))
        sorted_codes = _nearest_plane(scale.to(torch.float32), zero.to(torch.float32), largest, *repeated)
        for (scales, zeros), width_codes in zip(grids, sorted_codes.split(matrices), strict=True):
            codes = torch.empty(W.shape, dtype=torch.uint8, device=W.device)
            codes[each, rows, columns] = width_codes
            quantized.append(QuantizedWeight(codes.flatten(0, 1), scales, zeros, group_size))
    return quantized


def _feedback(M: Tensor | None, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of rounding, and the coefficients with which earlier errors move later entries.

    The largest diagonal entries come first: their errors weigh most, and later entries can still compensate for them.
    """
    matrices = len(like)
    if M is None:
        order = torch.arange(size, device=like.device).expand(matrices, size)
        return order, like.new_zeros(matrices, size, size, dtype=torch.float32)
    order = M.diagonal(dim1=-2, dim2=-1).argsort(descending=True)
    last_first, each = order.flip(1), torch.arange(matrices, device=like.device)[:, None, None]
    sorted_ = M[each, last_first[..., None], last_first[:, None]]
    R = torch.linalg.cholesky(sorted_, upper=True).flip(1, 2)  # lower triangular
    del sorted_
    R /= R.diagonal(dim1=-2, dim2=-1)[..., None].clone()
    return order, R.to(torch.float32).tril_(-1)


def _nearest_plane(
    scale: Tensor,  # (matrices, outer, inner), as zero and W
    zero: Tensor,
    largest: Tensor,  # (matrices,), largest codes
    W: Tensor,
    a: Tensor,  # (matrices, inner, inner)
    g: Tensor,  # (matrices, outer, outer)
) -> Tensor:
    """Return the codes of W, whose entries are rounded in their order, along anti-diagonals.

    With :math:`Y = E (I + a)^T`, entry (i, j) is moved by :math:`(Y - E)_{ij} + (g Y)_{ij}`, which needs the
    rows up to i and the columns up to j: all blocks of an anti-diagonal are independent of each other, and so are the
    entries of an anti-diagonal in a block. Blocks bring most of the sums into matrix products.
    """
    matrices, outer, inner = W.shape
    B = min(_BLOCK, max(outer, inner))
    high, wide = -(-outer // B), -(-inner // B)
    margin = (0, wide * B - inner, 0, high * B - outer)
    W, zero, scale = pad(W, margin), pad(zero, margin), pad(scale, margin, value=1.0)  # padding has no error
    a, g = pad(a, margin[:2] * 2), pad(g, margin[2:] * 2)
    E, Y, codes = torch.zeros_like(W), torch.zeros_like(W), torch.zeros_like(W, dtype=torch.uint8)
    for diagonal in range(high + wide - 1):
        blocks = [
            (slice(row * B, row * B + B), slice(column * B, column * B + B))
            for row in range(high)
            if 0 <= (column := diagonal - row) < wide
        ]
        parts = []
        for i, j in blocks:
            along, across = E[:, i, : j.start] @ a[:, j, : j.start].mT, g[:, i, : i.start] @ Y[:, : i.start, j]
            parts.append((*(x[:, i, j] for x in (W, scale, zero)), a[:, j, j], g[:, i, i], along, across))
        operands = [*map(torch.cat, zip(*parts, strict=True)), largest.repeat(len(blocks))[:, None]]
        rounded = _round_blocks(*operands)
        for (i, j), code, error, moved in zip(blocks, *(x.split(matrices) for x in rounded), strict=True):
            codes[:, i, j], E[:, i, j], Y[:, i, j] = code, error, moved
    return codes[:, :outer, :inner]


def _round_blocks(
    W: Tensor, scale: Tensor, zero: Tensor, a: Tensor, g: Tensor, along: Tensor, across: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Round blocks, (blocks, B, B) each: return codes, errors and Y, given the sums over earlier blocks.

    On an anti-diagonal, rows and columns run in opposite directions. With the rows of ``a`` and ``g`` in reverse order,
    all operands are slices and strided views, which cost less than indices.
    """
    blocks, B = W.shape[:2]
    E, codes = torch.zeros_like(W), torch.zeros_like(W)
    Yt = torch.zeros_like(W)  # transposed, so that both sums run along memory
    a, g = a.flip(1), g.flip(1)
    for diagonal in range(2 * B - 1):
        first, last = max(0, diagonal - B + 1), min(B - 1, diagonal)
        size, strides = (blocks, last + 1 - first), (B * B, max(B - 1, 1))
        offset = first * (B - 1) + diagonal  # position of the entry in row `first`
        ascending, descending = slice(first, last + 1), slice(B - 1 - diagonal + first, B - diagonal + last)
        w, s, z, beside, above = (x.as_strided(size, strides, offset) for x in (W, scale, zero, along, across))
        row = beside + torch.linalg.vecdot(E[:, ascending], a[:, descending])
        moved = row + above + torch.linalg.vecdot(g[:, descending], Yt[:, ascending]).flip(1)
        code = ((w - moved) / s + z).round_().clamp_min_(0).minimum(largest)
        error = s * (code - z) - w
        codes.as_strided(size, strides, offset).copy_(code)
        E.as_strided(size, strides, offset).copy_(error)
        Yt.as_strided(size, strides, offset).copy_((row + error).flip(1))
    return codes.to(torch.uint8), E, Yt.mT

r"""Rounding a weight to a grid with error feedback in the metric of its inputs and of its output's sensitivity.

The error E of the rounded weight costs :math:`\operatorname{tr}(G E A E^T) = \lVert R_G E R_A^T \rVert^2` with
triangular roots of G and A. Entries are rounded one after the other; each is first moved by what the errors of those
before it leave in its own coordinate of :math:`R_G E R_A^T`, so that only its own rounding error remains there. This
is the nearest-plane algorithm (L. Babai, "On Lovasz' lattice reduction and the nearest lattice point problem", 1986,
doi:10.1007/BF02579403) in the Kronecker metric. With G the identity it is GPTQ (E. Frantar et al., 2023,
arXiv:2210.17323), whose feedback runs along the rows only.
"""

__all__ = ["QuantizedWeight", "quantize_weight"]

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from panther.nn.quantized.grid import quantization_grid, spread

_BLOCK = 64  # rows and columns: larger blocks add scalar products, smaller ones calls


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
        """Return the weight that the codes stand for."""
        scales, zeros = (
            spread(each.double(), self.group_size, self.codes.shape[1]) for each in (self.scales, self.zeros)
        )
        return scales * (self.codes.double() - zeros)


def quantize_weight(
    W: Tensor,  # (matrices, outer, inner), one matrix except for grouped convolutions
    A: Tensor | None,  # (matrices, inner, inner); None is the identity, as for G
    G: Tensor | None,  # (matrices, outer, outer)
    bits: int,
    group_size: int,
) -> QuantizedWeight:
    r"""Round a weight to ``bits`` a number such that :math:`\operatorname{tr}(G E A E^T)` is small.

    A and G must be positive definite. The grid of each group is found beforehand, for the weight without feedback.

    Cost: ``2 outer inner (outer + inner)`` flops a matrix, and two Cholesky factorisations.
    """
    matrices, outer, inner = W.shape
    scales, zeros = quantization_grid(W.flatten(0, 1), bits, group_size)
    rows, g = _feedback(G, outer, W)
    columns, a = _feedback(A, inner, W)
    each, rows, columns = torch.arange(matrices, device=W.device)[:, None, None], rows[..., None], columns[:, None]
    # Rounded entries are few units of float32 from a tie at most in a share of 2^-20 of the cases: either will do.
    scale, zero = (
        x.unflatten(0, (matrices, outer))[each, rows, columns // group_size].to(torch.float32) for x in (scales, zeros)
    )
    found = _nearest_plane(W[each, rows, columns].to(torch.float32), scale, zero, a, g, 2**bits - 1)
    codes = torch.empty(W.shape, dtype=torch.uint8, device=W.device)
    codes[each, rows, columns] = found
    return QuantizedWeight(codes.flatten(0, 1), scales, zeros, group_size)


def _feedback(M: Tensor | None, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the orders of rounding, and by how much each later entry is moved by the earlier ones' errors.

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


def _nearest_plane(W: Tensor, scale: Tensor, zero: Tensor, a: Tensor, g: Tensor, largest: int) -> Tensor:
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
        found = _round_blocks(*map(torch.cat, zip(*parts, strict=True)), largest=largest)
        for (i, j), code, error, moved in zip(blocks, *(x.split(matrices) for x in found), strict=True):
            codes[:, i, j], E[:, i, j], Y[:, i, j] = code, error, moved
    return codes[:, :outer, :inner]


def _round_blocks(
    W: Tensor, scale: Tensor, zero: Tensor, a: Tensor, g: Tensor, along: Tensor, across: Tensor, *, largest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Round blocks, (blocks, B, B) each: return codes, errors and Y, given the sums over earlier blocks."""
    B = W.shape[-1]
    E, codes = torch.zeros_like(W), torch.zeros_like(W)
    Yt = torch.zeros_like(W)  # transposed, so that both sums run along memory
    for diagonal in range(2 * B - 1):
        first, last = max(0, diagonal - B + 1), min(B - 1, diagonal)
        i = torch.arange(first, last + 1, device=W.device)
        j = diagonal - i
        row = along[:, i, j] + torch.linalg.vecdot(E[:, first : last + 1], a[:, j])
        moved = row + across[:, i, j] + torch.linalg.vecdot(g[:, first : last + 1], Yt[:, j])
        w, s, z = W[:, i, j], scale[:, i, j], zero[:, i, j]
        code = ((w - moved) / s + z).round_().clamp_(0, largest)
        error = s * (code - z) - w
        codes[:, i, j], E[:, i, j], Yt[:, j, i] = code, error, row + error
    return codes.to(torch.uint8), E, Yt.mT

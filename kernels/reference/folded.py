"""The sketched product with *sparse* sketches, which have one sign an input and one an output, in plain torch.

Row i of U2 (in, R) has the sign of input i in column ``i mod R``, and column j of U1 (R, out) the sign of output j in
row ``j mod R``. So x U2 *folds* a row of n numbers into R sums, h U1 *tiles* R numbers over a row, and neither matrix
exists.
"""

__all__ = ["dense_sketch", "fold", "folded_matmul", "tile"]

import torch
import torch.nn.functional as F
from torch import Tensor


def fold(x: Tensor, signs: Tensor, rank: int) -> Tensor:  # (rows, n), (n,) -> (rows, rank)
    """Return the sums of ``signs_i x_i`` over the columns i with equal ``i mod rank``."""
    n = len(signs)
    divisible = n - n % rank
    if divisible == n:
        return _sums(x, signs, rank)
    if not divisible:
        return F.pad(x * signs, (0, rank - n))
    return _sums(x[:, :divisible], signs[:divisible], rank) + F.pad(
        x[:, divisible:] * signs[divisible:], (0, rank - n + divisible)
    )


def _sums(x: Tensor, signs: Tensor, rank: int) -> Tensor:
    segments: Tensor = x.unflatten(1, (-1, rank)) * signs.view(-1, rank)
    return segments.sum(1)


def tile(
    h: Tensor, signs: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> Tensor:  # (rows, rank), (n,) -> (rows, n)
    """Return the rows whose column j is ``scale signs_j h[j mod rank] + bias_j``."""
    rank, n = h.shape[1], len(signs)
    if not n:
        return h.new_zeros(len(h), 0)
    divisible = n - n % rank
    parts = []
    for start, stop in ((0, divisible), (divisible, n)):
        if start < stop:
            columns = (-1, min(rank, stop - start))
            start_value = h.new_zeros(()) if bias is None else bias[start:stop].view(columns)
            part = torch.addcmul(start_value, h[:, None, : columns[1]], signs[start:stop].view(columns), value=scale)
            parts.append(part.flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def folded_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    out_signs: Tensor,  # (out,)
    S2: Tensor,  # (R, out)
    in_signs: Tensor,  # (in,)
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> Tensor:  # (rows, out)
    """Return ``scale (x S1 U1 + x U2 S2) + bias``."""
    right = fold(x, in_signs, S1.shape[1])
    return torch.addmm(tile(x @ S1, out_signs, bias, scale), right, S2, alpha=scale)


def dense_sketch(signs: Tensor, rank: int, first: int = 0) -> Tensor:  # (n,) -> (n, rank)
    """Return the rows of U2, or of U1 transposed, from row ``first`` on as a matrix."""
    n = signs.shape[0]  # Of a size in a trace, len would warn.
    columns = torch.arange(first, first + n, device=signs.device) % rank
    return signs.new_zeros(n, rank).scatter(1, columns[:, None], signs[:, None])

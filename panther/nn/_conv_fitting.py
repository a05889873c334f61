r"""Factors of a sketched convolution fitted to a dense kernel, group by group.

A group's kernel, unfolded, is a matrix A of shape (out / groups, in / groups * kernel), to be :math:`U^T S` with U of
shape (rows, out / groups) and S of shape (rows, in / groups * kernel). All tensors here carry the groups in front.
"""

__all__ = ["lstsq_factor", "svd_factors", "unbiased_factor"]

import torch
from torch import Tensor

from panther.nn._fitting import _compact_svd, _leading_svd
from panther.sketch import signs


def svd_factors(
    A: Tensor,  # (groups, out / groups, in / groups * kernel)
    rows: int,
    seed: int,
) -> tuple[Tensor, Tensor]:  # (groups, rows, in / groups * kernel), (groups, rows, out / groups)
    """S and U whose product is the truncated SVD of each group (Eckart and Young, 1936, doi:10.1007/BF02288367).

    Singular values are split evenly. Rows that are left over, or whose singular value is zero to rounding, get zero S,
    so they add nothing, and random signs for U, so they can still learn.
    """
    groups, out, inner = A.shape
    S = A.new_zeros(groups, rows, inner)
    U = signs(seed, 0, range(groups * rows), range(out), dtype=A.dtype, device=A.device).unflatten(0, (groups, rows))
    for group in range(groups):
        left, sigma, right = _leading_svd(A[group], rows, seed)
        root = sigma.sqrt()
        S[group, : len(root)] = root[:, None] * right
        if len(root):  # signs as large as the rest
            U[group] *= (left * root).square().mean().sqrt()
        U[group, : len(root)] = (left * root).mT
    return S, U


def lstsq_factor(
    A: Tensor,  # (groups, out / groups, in / groups * kernel)
    U: Tensor,  # (groups, rows, out / groups)
) -> Tensor:  # (groups, rows, in / groups * kernel)
    """The S of least norm that minimises ||A - U^T S||_F in each group; what is left is outside the rows of U."""
    factors = []
    for kernel, sketch in zip(A, U, strict=True):
        left, sigma, right = _compact_svd(sketch)
        factors.append((left / sigma) @ (right @ kernel))
    return torch.stack(factors)


def unbiased_factor(
    A: Tensor,  # (groups, out / groups, in / groups * kernel)
    U: Tensor,  # (groups, rows, out / groups)
) -> Tensor:  # (groups, rows, in / groups * kernel)
    """S = U A / rows for sketches of entries +-1: the mean of U^T S over sketches is A."""
    return U @ A / U.shape[1]

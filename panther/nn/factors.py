r"""Factors of sketched layers fitted to a dense weight.

There are two fits: the truncated SVD (Eckart and Young, 1936, doi:10.1007/BF02288367) for layers of low rank, and least
squares for fixed sketches. The unbiased estimator is a product that the layers compute. All fits compute in float32 or
float64.

For SKLinear, A is the weight as (in, out), approximated by :math:`S_1 U_1 + U_2 S_2`. For a convolution
(``.._by_groups``), A is the unfolded kernel of each group, (groups, out / groups, in / groups * kernel), approximated
by :math:`U^T S`.
"""

__all__ = [
    "check_init",
    "fittable",
    "interpolated_rows",
    "leading_factors",
    "learnable_factors",
    "lstsq_by_groups",
    "lstsq_factors",
]

import torch
import torch.nn.functional as F
from torch import Tensor

from panther.linalg import cqrrpt, randomized_svd
from panther.sketch import signs

# From this size on, and for ranks of at most an eighth of it, the randomized SVD is 2 to 13 times faster than LAPACK's.
# With ten iterations on a space twice as wide as the rank it is as accurate: its error exceeds the least error by 3e-4
# of it for a weight without structure, and not visibly in float32 if singular values fall as i^-0.3.
_RANDOMIZED_FROM = 256
_RANK_FRACTION = 8
_ITERATIONS = 10

_INITS = ("lstsq", "random")
# Bound of an interpolation's coefficients. With a bound near 1, exchanges of rows are frequent and gain little.
_LARGEST_COEFFICIENT = 2.0


def check_init(init: str) -> None:
    """Raise ValueError unless ``init`` names one of the two ways to fit a sketched layer."""
    if init == "svd":
        raise ValueError(
            'init="svd" makes no sketched layer: use LowRankLinear.from_linear or LowRankConv2d.from_conv, with twice '
            "the rank R of a sketch"
        )
    if init not in _INITS:
        raise ValueError(f"init={init!r} is unknown: use one of {', '.join(map(repr, _INITS))}")


def fittable(weight: Tensor) -> Tensor:
    """Return a dense weight in a dtype that can be factored, float32 at least; ValueError if it cannot be."""
    if weight.is_meta:
        raise ValueError("the weight is on the meta device and has no values to fit: load it first")
    if not weight.isfinite().all():
        raise ValueError("the weight has entries that are NaN or infinite: no layer can be fitted to it")
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def leading_factors(A: Tensor, rank: int, seed: int = 0) -> tuple[Tensor, Tensor]:  # (rows, rank), (rank, columns)
    """Return factors of the truncated SVD of A, singular values split evenly; past the rank of A they are zero."""
    P, sigma, Qt = _leading_svd(A, rank, seed)
    root, unused = sigma.sqrt(), rank - len(sigma)
    return F.pad(P * root, (0, unused)), F.pad(root[:, None] * Qt, (0, 0, 0, unused))


def learnable_factors(
    left: Tensor,  # (*groups, out, r)
    right: Tensor,  # (*groups, r, in)
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return factors of the same product without a component that is zero in both, which would get no gradient.

    The column of ``left`` of such a component gets random signs of the mean magnitude of ``left``, and its row of
    ``right`` zeros, so that it adds nothing and can still learn.
    """
    energies = left.square().sum(-2)  # (*groups, r)
    least = energies.amax(-1, keepdim=True) * max(left.shape[-2:]) * torch.finfo(left.dtype).eps
    is_used = energies > least
    if is_used.all():
        return left, right
    rows, columns = is_used.numel(), left.shape[-2]
    level = left.square().mean().sqrt()
    entries = signs(seed, 0, range(rows), range(columns), dtype=left.dtype, device=left.device)
    entries = entries.view(*is_used.shape, columns).mT * torch.where(level > 0, level, 1.0)
    return torch.where(is_used[..., None, :], left, entries), torch.where(is_used[..., None], right, 0.0)


def interpolated_rows(
    left: Tensor,  # (rows, rank)
    right: Tensor,  # (rank, columns)
) -> tuple[Tensor, Tensor, Tensor]:  # (rows,) int64, (rank, columns), (rows - rank, rank); float64
    """Return an order, P and C with ``(left right)[order] = [P; C P]``: an interpolative decomposition of the rows.

    QR with column pivoting of the transpose selects the rows P. Then rows are exchanged as long as an exchange at least
    doubles the volume that they span. Therefore no entry of C exceeds 2 in magnitude, and rounding P and C costs little
    for any singular values. The product is not formed.

    Reference: H. Cheng, Z. Gimbutas, P. G. Martinsson and V. Rokhlin, "On the compression of low rank matrices", SIAM
    J. Sci. Comput. 26, 2005, doi:10.1137/030602678; exchanges of rows as in S. A. Goreinov et al., "How to find a good
    submatrix", 2010, doi:10.1142/9789812836021_0015.
    """
    rank = right.shape[0]
    left, right = left.double(), right.double()
    # If the rows of ``right`` are orthonormal, the rows of ``left`` have the angles and norms of the product's rows.
    B = left @ torch.linalg.qr(right.mT, mode="r").R.mT
    _, R, order = cqrrpt((B / B.abs().max().clamp_min(torch.finfo(B.dtype).tiny)).mT, seed=0)
    r = R.shape[0]  # the numerical rank, which can be less than `rank`
    C = torch.linalg.solve_triangular(R[:, :r], R[:, r:], upper=True).mT.contiguous()
    places = torch.arange(R.shape[1], device=R.device)
    while C.numel() and C.abs().max() > _LARGEST_COEFFICIENT:
        i, j = divmod(int(C.abs().argmax()), r)
        step = C[i].clone()
        pivot = step[j].item()
        step[j] -= 1
        C[i] = 0
        C[i, j] = 1  # Rows i and j exchange their places, and all rows get their coordinates in the new P.
        C.addr_(C[:, j].clone(), step, alpha=-1 / pivot)
        places[[j, r + i]] = places[[r + i, j]]
    if not torch.equal(places, places.sort().values):  # Solve again, without the rounding errors of the exchanges.
        order, R = order[places], R[:, places]
        C = torch.linalg.solve(R[:, :r], R[:, r:]).mT
    coefficients = F.pad(C[rank - r :], (0, rank - r))
    return order, left[order[:rank]] @ right, coefficients


def lstsq_factors(A: Tensor, U1: Tensor, U2: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the S1 and S2 of least norm that minimise ||A - S1 U1 - U2 S2||_F.

    With P1 the projector on the rows of U1 and P2 on the columns of U2, the residual is (I - P2) A (I - P1). The part
    both halves can reach, P2 A P1, is split entry by entry in the singular bases of U1 and U2, where the problem
    separates into scalar ones of the form d1 m + d2 n = c.
    """
    V1, d1, Y1t = _compact_svd(U1)  # U1 = V1 diag(d1) Y1^T
    X2, d2, V2t = _compact_svd(U2)  # U2 = X2 diag(d2) V2^T
    AY = A @ Y1t.mT  # (in, r1)
    XA = X2.mT @ A  # (r2, out)
    shared = XA @ Y1t.mT  # (r2, r1)
    weight = d1.square() + d2[:, None].square()
    S1 = (((AY - X2 @ shared) / d1) + X2 @ (shared * d1 / weight)) @ V1.mT
    S2 = V2t.mT @ ((XA - shared @ Y1t) / d2[:, None] + (shared * d2[:, None] / weight) @ Y1t)
    return S1, S2


def lstsq_by_groups(
    A: Tensor,  # (groups, out / groups, in / groups * kernel)
    U: Tensor,  # (groups, rows, out / groups)
) -> Tensor:  # (groups, rows, in / groups * kernel)
    """Return the S of least norm that minimises ||A - U^T S||_F in each group."""
    factors = []
    for kernel, sketch in zip(A, U, strict=True):
        left, sigma, right = _compact_svd(sketch)
        factors.append((left / sigma) @ (right @ kernel))
    return torch.stack(factors)


def _leading_svd(A: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``rank`` leading singular triplets, or all of them if there are fewer."""
    least = min(A.shape)
    if least < _RANDOMIZED_FROM or rank * _RANK_FRACTION > least:
        left, sigma, right = _compact_svd(A)
        return left[:, :rank], sigma[:rank], right[:rank]
    left, sigma, right = randomized_svd(A, rank, oversample=rank, n_iter=_ITERATIONS, seed=seed)
    is_nonzero = _nonzero(sigma, A)
    return left[:, is_nonzero], sigma[is_nonzero], right.mT[is_nonzero]


def _compact_svd(U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the SVD without directions that are zero to rounding, which sketches larger than the layer have."""
    left, sigma, right = torch.linalg.svd(U, full_matrices=False)
    is_nonzero = _nonzero(sigma, U)
    return left[:, is_nonzero], sigma[is_nonzero], right[is_nonzero]


def _nonzero(sigma: Tensor, U: Tensor) -> Tensor:
    """Return which singular values of U are not zero to rounding."""
    return sigma > sigma[0] * max(U.shape) * torch.finfo(U.dtype).eps

r"""The map "hermite": the exponential as a polynomial of each query's logits, fitted to the keys that the query sees.

Let a query's logits s have the mean t and the variance :math:`\sigma^2` over the keys it sees, and let :math:`s_r` be
the part of s in r selected directions, with the mean :math:`t_r` and the variance :math:`v_r`. The weights are

.. math:: 1 + f (s - t) + \tfrac{f^2}{2} \left((s_r - t_r)^2 - v_r\right), \qquad
    f = \left(1 + \sigma^2 / \log N\right)^{-1/2},

the Hermite expansion of :math:`e^{f s}`: which is the nearest polynomial to the exponential if
logits are normal, unlike a Taylor polynomial at 0. All terms except for the first have the mean 0 over the keys, so
that the sum of the weights is exactly N, the number of keys: no denominator is near 0, and a constant added to the keys
changes nothing. The softmax of N normal logits moves their mean by :math:`\sigma^2` only while that is below about
:math:`\sigma \sqrt{2 \log N}`, because a mean is never beyond the largest. The factor f, near 1 for small logits, keeps
the polynomial from continuing, so that it falls back to the mean of the values and not below it.

Every coefficient depends on the query and on means over its keys, so the weights are inner products of features. Two
identities of the softmax are used with fixed vectors (``center``): :math:`q \cdot k = (q - \mu) \cdot k + \mu \cdot k`,
where the last term is an exponent of the key, and a vector may be subtracted from all keys.
"""

__all__ = ["balanced_directions", "hermite_features", "hermite_keys", "hermite_queries", "hermite_rank", "key_norms"]

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from panther.kernels import causal_linear_attention
from panther.kernels.reference.attention import no_autocast
from panther.nn.attention._features import products

# The exponent of a key from the queries' center is limited to this, so that sums do not overflow float32. Exponents
# relative to a running maximum would take twice the time.
_LARGEST_EXPONENT = 60.0
# This multiple of their mean is added to second moments before they are inverted, which excludes directions without
# data.
_RIDGE = 1e-3


def hermite_rank(features: int, d: int) -> int:
    """Return the number r of directions of second order, the largest with ``1 + d + r (r + 1) / 2 <= features``."""
    return min(d, int((math.sqrt(8 * max(0, features - 1 - d) + 1) - 1) / 2))


def hermite_features(
    q: Tensor,  # (N, heads, L, d)
    k: Tensor,  # (N, heads, S, d)
    directions: Tensor,  # (heads, 2 r, d): directions of queries, then of keys
    center: Tensor | None,  # (heads, 2, d): the vectors subtracted from queries and from keys
    exponent: Tensor | None,  # (N, 1, S)
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # (N, heads, L, D), (N, heads, S, D), (N, heads, S)
    """Return features of queries and keys, in float32 or float64, and the keys' exponents.

    Half precision would lose the weights in the differences of their terms.
    """
    with no_autocast(q.device):
        k, to_k, weight = _centered_keys(k, directions, center)
        if exponent is not None:
            exponent = exponent.expand(k.shape[:-1])
        if not is_causal:  # This is exact, and avoids cancellation later.
            k = k - _means(k, weight, exponent, is_causal=False)
        squares_k = products(k @ to_k.mT)
        summands = torch.cat((k, squares_k, k.square().sum(-1, keepdim=True)), -1)
        means = _means(summands, weight, exponent, is_causal=is_causal)
        phi_q = hermite_queries(q, directions, center, means, _log_num_keys(k, exponent, is_causal))
        return phi_q, _key_features(k, squares_k, weight), exponent


def hermite_queries(
    q: Tensor,  # (N, heads, L, d)
    directions: Tensor,  # (heads, 2 r, d)
    center: Tensor | None,  # (heads, 2, d)
    means: Tensor,  # (N, heads, L or 1, d + r (r + 1) / 2 + 1), of k, of its products and of its squared norm
    log_num_keys: Tensor,  # broadcast to (N, heads, L, 1)
) -> Tensor:  # (N, heads, L, D)
    """Return the features of queries, from the means over the keys that each query sees."""
    wide = means.dtype
    q, (to_q, to_k) = q.to(wide), directions.to(wide).chunk(2, 1)
    r, d = to_q.shape[1:]
    if center is not None:
        q = q - center[:, :1].to(wide)
    q_r = q @ to_q.mT
    q_projected = q_r @ to_k  # s_r = q_projected . k
    i, j = torch.triu_indices(r, r, device=q.device)
    squares_q = products(q_r) * torch.where(i == j, 1.0, 2.0).to(wide)
    mean_k, mean_squares, mean_norm = means.split((d, squares_q.shape[-1], 1), -1)

    t = (q * mean_k).sum(-1, keepdim=True)
    t_r = (q_projected * mean_k).sum(-1, keepdim=True)
    square_r = (squares_q * mean_squares).sum(-1, keepdim=True)  # mean square of s_r
    # Outside of the selected directions the keys' covariance is approximated by a multiple of the identity.
    rest = (mean_norm - mean_k.square().sum(-1, keepdim=True)).clamp_min(0) * (1 - r / d) / d
    variance = (square_r - t_r.square()).clamp_min(0) + q.square().sum(-1, keepdim=True) * rest
    f = (1 + variance / log_num_keys).rsqrt()
    constant = 1 - f * t + f.square() * (t_r.square() - square_r / 2)
    return torch.cat((constant, f * q - f.square() * t_r * q_projected, f.square() / 2 * squares_q), -1)


def hermite_keys(
    k: Tensor,  # (N, heads, S, d)
    directions: Tensor,  # (heads, 2 r, d)
    center: Tensor | None,  # (heads, 2, d)
) -> Tensor:  # (N, heads, S, D)
    """Return the features of keys in causal attention: the key's weight times 1, k and its products."""
    k, to_k, weight = _centered_keys(k, directions, center)
    return _key_features(k, products(k @ to_k.mT), weight)


def key_norms(phi_k: Tensor, d: int) -> Tensor:  # (*batch, S, D) -> (*batch, S, 1)
    """Return the key's weight times its squared norm, from the features of :func:`hermite_keys`."""
    return phi_k[..., 1 : 1 + d].square().sum(-1, keepdim=True) / phi_k[..., :1]


def _centered_keys(k: Tensor, directions: Tensor, center: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys in float32 or float64 without their center, their directions, and their weights (N, heads, S, 1)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    k, to_k = k.to(wide), directions.to(wide).chunk(2, 1)[1]
    if center is None:
        return k, to_k, None
    of_q, of_k = center.to(wide).unsqueeze(-2).unbind(1)  # (heads, 1, d)
    k = k - of_k
    return k, to_k, (k * of_q).sum(-1, keepdim=True).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp()


def _key_features(k: Tensor, squares: Tensor, weight: Tensor | None) -> Tensor:
    phi_k = torch.cat((torch.ones_like(k[..., :1]), k, squares), -1)
    return phi_k if weight is None else phi_k * weight


def _means(
    x: Tensor,  # (N, heads, S, X)
    weight: Tensor | None,  # (N, heads, S, 1)
    exponent: Tensor | None,  # (N, heads, S)
    *,
    is_causal: bool,
) -> Tensor:  # (N, heads, S or 1, X)
    """Return weighted means over all keys, or if causal over the keys up to each; 0 without keys."""
    if is_causal and exponent is None and weight is None:
        return _running_sums(x) / _count(x)[:, None]
    weight = torch.ones_like(x[..., :1]) if weight is None else weight
    if is_causal and exponent is None:
        sums = _running_sums(torch.cat((x, torch.ones_like(weight)), -1) * weight)
        return sums[..., :-1] / sums[..., -1:]
    if is_causal:
        return causal_linear_attention(torch.ones_like(weight), weight, x, exponent)
    if exponent is not None:
        largest = exponent.detach().amax(-1, keepdim=True) if x.shape[-2] else exponent.new_zeros(())
        scale = (exponent - largest.masked_fill(largest == -torch.inf, 0)).exp()
        weight = weight * scale[..., None].to(x.dtype)
    total = weight.sum(-2, keepdim=True)
    return weight.mT @ x / total.masked_fill(total == 0, 1)


def _running_sums(x: Tensor) -> Tensor:  # (*batch, n, X)
    """Return cumulative sums over the rows, by blocks of 16, in half the time of a cumsum with long strides."""
    n = x.shape[-2]
    blocks = F.pad(x, (0, 0, 0, -n % 16)).unflatten(-2, (-1, 16)).cumsum(-2)
    # Sums over previous blocks. With differences, a later NaN would reach earlier rows.
    previous_sums = F.pad(blocks[..., -1, :], (0, 0, 1, -1)).cumsum(-2)
    sums: Tensor = (blocks + previous_sums.unsqueeze(-2)).flatten(-3, -2)[..., :n, :]
    return sums


def _count(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[-2] + 1, device=x.device, dtype=x.dtype)


def _log_num_keys(k: Tensor, exponent: Tensor | None, is_causal: bool) -> Tensor:  # () or (*batch, S or 1, 1)
    """Return the logarithm of the number of keys seen, but at least log 2, because with one key the variance is 0."""
    if exponent is None:
        num_keys = _count(k) if is_causal else k.new_full((), k.shape[-2])
    else:
        num_keys = (exponent != -torch.inf).to(k.dtype)
        num_keys = num_keys.cumsum(-1) if is_causal else num_keys.sum(-1, keepdim=True)
    return num_keys[..., None].clamp_min(2).log()


def balanced_directions(of_q: Tensor, of_k: Tensor, r: int) -> Tensor:  # (heads, d, d) twice -> (heads, 2 r, d)
    """Return the r pairs of directions in which q . k varies most, for queries and keys with these second moments.

    With r = d both moments are the same diagonal matrix in these bases and q . k is unchanged. These bases have the
    least norms of all pairs that preserve q . k.
    """

    def root(moment: Tensor) -> Tensor:
        mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
        root: Tensor = torch.linalg.cholesky(moment + (_RIDGE * mean + torch.finfo(moment.dtype).tiny) * eye)
        return root

    C_q, C_k = root(of_q.double()), root(of_k.double())
    U, s, Vh = torch.linalg.svd(C_q.mT @ C_k)
    half = s.sqrt()[..., None]
    to_q = torch.linalg.solve_triangular(C_q, half * U.mT, upper=False, left=False)
    to_k = torch.linalg.solve_triangular(C_k, half * Vh, upper=False, left=False)
    return torch.cat((to_q[:, :r], to_k[:, :r]), 1)

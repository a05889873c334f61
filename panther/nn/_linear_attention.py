"""Attention by inner products of features, over all keys or over those before, in time linear in the sequence."""

__all__ = ["linear_attention"]

from contextlib import nullcontext

import torch
from torch import Tensor

from panther.errors import DTypeError, ShapeError
from panther.kernels import causal_linear_attention


def linear_attention(
    q: Tensor,  # (*batch, L, m)
    k: Tensor,  # (*batch, S, m)
    v: Tensor,  # (*batch, S, E)
    log_scale: Tensor | None = None,  # (*batch, S)
    *,
    is_causal: bool = False,
) -> Tensor:  # (*batch, L, E)
    r"""Mean of the values with weights :math:`e^{c_j} (q_i \cdot k_j)`: linear attention.

    .. math:: y_i = \frac{\sum_j e^{c_j} (q_i \cdot k_j) v_j}{\sum_j e^{c_j} (q_i \cdot k_j)}

    over all keys, or with ``is_causal`` over :math:`j \le i`; 0 where all weights are 0. Two products with a state of
    m (E + 1) numbers, or :func:`~panther.kernels.causal_linear_attention`. A key whose exponent is -inf is left out: it
    has no influence whatever it holds, NaN included (A. Katharopoulos et al., "Transformers are RNNs", ICML 2020,
    arXiv:2006.16236).

    Args:
        q: Features of the queries, as a rule not negative.
        k: Features of the keys.
        v: Values.
        log_scale: The exponents c, 0 if not given.
        is_causal: Whether a query sees only the keys up to its own position.

    Returns:
        The output, in the dtype of ``v``; half precision is summed in float32.

    Raises:
        ShapeError: If shapes do not fit together, or ``is_causal`` and there are not as many keys as queries.
        DTypeError: If q, k or v is not floating.

    Cost: ``2 m E (L + S)`` flops for each batch entry, and no memory that grows with L S.

    Example:
        >>> import torch
        >>> q = k = torch.ones(3, 2)
        >>> linear_attention(q, k, torch.tensor([[0.0], [1.0], [2.0]])).squeeze(-1)
        tensor([1., 1., 1.])
    """
    _check(q, k, v, log_scale)
    if is_causal:
        if q.shape[-2] != k.shape[-2]:
            raise ShapeError(
                f"causal attention needs as many keys as queries, and got {k.shape[-2]} and {q.shape[-2]}: leave "
                "is_causal out for attention to another sequence"
            )
        dtype = torch.promote_types(q.dtype, v.dtype)
        return causal_linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), log_scale).to(v.dtype)
    wide = torch.promote_types(v.dtype, torch.float32)
    device = q.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        q, k, values = q.to(wide), k.to(wide), v.to(wide)
        if log_scale is not None:
            left_out = (log_scale == -torch.inf)[..., None]
            k, values = k.masked_fill(left_out, 0), values.masked_fill(left_out, 0)
            # Any number may be subtracted, so no gradient goes through it; 0 where no key is left.
            largest = log_scale.detach().amax(-1, keepdim=True) if k.shape[-2] else log_scale.new_zeros(())
            weight = (log_scale - largest.masked_fill(largest == -torch.inf, 0)).to(wide).exp()
            k = k * weight[..., None]
        numerator = q @ (k.mT @ values)
        denominator = q @ k.sum(-2)[..., None]
        empty = denominator == 0
        return (numerator / denominator.masked_fill(empty, 1)).masked_fill(empty, 0).to(v.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor | None) -> None:
    scales = None if log_scale is None else tuple(log_scale.shape)
    fit = min(q.dim(), k.dim(), v.dim()) >= 2 and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if not fit or (scales is not None and scales[-1:] != k.shape[-2:-1]):
        raise ShapeError(
            "attention takes q (*batch, L, m), k (*batch, S, m), v (*batch, S, E) and log_scale (*batch, S), not "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} and {scales}: transpose or cut what does not fit"
        )
    if not all(x.is_floating_point() for x in (q, k, v)):
        raise DTypeError(f"q, k and v must be floating, and are {q.dtype}, {k.dtype} and {v.dtype}: cast them")

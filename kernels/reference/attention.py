r"""Causal linear attention in plain torch, by chunks: a few large products, linear time and memory.

Write :math:`V' = [V \mid 1]`, so that numerator and denominator are columns of one product. Within a chunk of C rows,
scores are computed and masked; earlier chunks enter through one state, :math:`K^T V'`, of D x (E + 1) entries. Backward
has the same form, run from the end, with :math:`[dY / den \mid -(dY \cdot Y) / den]` instead of :math:`V'`.

Scales :math:`e^{c_j}` are separate from the keys and are only used as :math:`e^{c_j - r_i} \le 1`, r being the
running maximum of c. A state is kept in units of the maximum at its end, as in online softmax.

:func:`attention_inference` computes the same without scales and without derivatives, for CPUs.
"""

__all__ = [
    "absorb_keys", "attention_backward", "attention_forward", "attention_inference", "causal_linear_attention",
    "continued_attention", "no_autocast",
]  # fmt: skip

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import can_autocast

# Measured on one core with 8 heads, D = 64, E = 32 and n from 4096 to 16384: chunks of 32 and 128 take 1.2 and 1.4
# times as long, and more chunks at once leave the cache, and take up to 1.7 times as long.
_CHUNK = 64
_CHUNKS = 8
# Rows of the batch per step without derivatives. Their scores take 1 MiB and stay in a core's L2 cache.
_ROWS = 4096


def causal_linear_attention(
    q: Tensor,  # (*batch, n, D)
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
    log_scale: Tensor | None = None,  # (*batch, n)
) -> Tensor:  # (*batch, n, E)
    """Compute :func:`panther.kernels.causal_linear_attention` in torch, differentiable any number of times."""
    return attention_forward(q, k, v, log_scale)[0]


def attention_forward(
    q: Tensor,  # (*batch, n, D)
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
    log_scale: Tensor | None,  # (*batch, n)
) -> tuple[Tensor, Tensor]:  # (*batch, n, E), (*batch, n)
    """Return the output, and the denominator in units of e to the running maximum (float32 or float64)."""
    n = q.shape[-2]
    if n == 0:  # An empty result must depend on all operands for autograd.
        return v * (q * k).sum(-1, keepdim=True), q.sum(-1).to(_accumulation_dtype(q))
    return _forward(q, k, v, log_scale, _no_state(q, k, v), None)[:2]


def continued_attention(
    q: Tensor,  # (*batch, n, D)
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
    log_scale: Tensor | None,  # (*batch, n)
    state: Tensor,  # (*batch, D, E + 1), float32 or float64
    units: Tensor | None,  # (*batch, 1)
) -> tuple[Tensor, Tensor, Tensor | None]:  # (*batch, n, E), (*batch, D, E + 1), (*batch, 1)
    r"""Return causal attention to earlier keys and to these, and the state after them.

    The state is :math:`\sum_j e^{c_j - R} k_j [v_j \mid 1]` over all keys so far, and ``units`` is R, the largest
    exponent so far, -inf without keys. Without exponents both R and ``log_scale`` are None. A single row takes one
    product with the state. The operands are not changed.
    """
    n = q.shape[-2]
    if n == 0:
        return (v * (q * k).sum(-1, keepdim=True)).to(v.dtype), state, units
    if n > 1:
        y, _, state, units = _forward(q, k, v, log_scale, state, units)
        return y, state, units
    with no_autocast(q.device):
        state, units = absorb_keys(k, v, log_scale, state, units)
        sums = q.to(state.dtype) @ state
        denominator = sums[..., -1:]
        empty = denominator == 0
        y = (sums[..., :-1] / denominator.masked_fill(empty, 1)).masked_fill(empty, 0)
    return y.to(v.dtype), state, units


def absorb_keys(
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
    log_scale: Tensor | None,  # (*batch, n)
    state: Tensor,  # (*batch, D, E + 1)
    units: Tensor | None,  # (*batch, 1)
) -> tuple[Tensor, Tensor | None]:
    """Return the state of :func:`continued_attention` after these keys, without attending."""
    if k.shape[-2] == 0:
        return state, units
    with no_autocast(k.device):
        keys, values = k.to(state.dtype), F.pad(v.to(state.dtype), (0, 1), value=1.0)
        if log_scale is not None:
            assert units is not None
            c = log_scale.to(state.dtype)
            left_out = (c == -torch.inf)[..., None]
            keys, values = keys.masked_fill(left_out, 0), values.masked_fill(left_out, 0)
            # The output does not depend on the subtracted number, so it needs no gradient.
            largest = torch.maximum(units, c.detach().amax(-1, keepdim=True))
            fixed = largest.masked_fill(largest == -torch.inf, 0)
            keys = keys * (c - fixed).exp()[..., None]
            state, units = state * (units - fixed).exp()[..., None], largest
        return torch.add(state, keys.mT @ values), units


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor | None, state: Tensor, units: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the output, the denominator in the units of each row, the state, and its units."""
    n = q.shape[-2]
    outputs, denominators = [], []
    with no_autocast(q.device):
        for Q, K, V, scales in _segments((q, k, v), log_scale, units):
            K, V1 = _keys(K, V, scales)
            earlier_sums, state = _scan(K.mT @ (V1 if scales is None else V1 * scales.column), state, scales)
            across = Q @ earlier_sums
            # A score of 0 times a value that is not finite would be NaN. A separate sum adds such values to later rows.
            spoil = V1 * 0
            sums = _masked(Q @ K.mT, scales) @ V1.masked_fill(spoil != 0, 0) + spoil.cumsum(-2)
            sums = sums + (across if scales is None else across * scales.row)
            numerator, denominator = sums[..., :-1], sums[..., -1:]
            empty = denominator == 0
            output = (numerator / denominator.masked_fill(empty, 1)).masked_fill(empty, 0)
            outputs.append(output.flatten(-3, -2).to(v.dtype))
            denominators.append(denominator.flatten(-3))
        if log_scale is not None:
            largest = log_scale.detach().to(state.dtype).amax(-1, keepdim=True)
            units = largest if units is None else torch.maximum(units, largest)
    return torch.cat(outputs, -2)[..., :n, :], torch.cat(denominators, -1)[..., :n], state, units


def attention_inference(
    q: Tensor,  # (*batch, n, D)
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
) -> tuple[Tensor, Tensor]:  # (*batch, n, E), (*batch, n)
    """Compute :func:`attention_forward` without exponents, without derivatives and without copies.

    It processes the entries of the batch one by one, all chunks of an entry at once. The products have the same sizes
    as in a segment of all entries, and the operands are views. Measured on one AMD core: 1.5 times as fast with 8
    heads, D = 61, n = 4096.
    """
    batch, n, dtype = q.shape[:-2], q.shape[-2], _accumulation_dtype(q)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    denominator = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    flat = [x.reshape(batch.numel(), n, x.shape[-1]) for x in (q, k, v, y, denominator[..., None])]
    entries = max(1, _ROWS // max(n, 1))
    for part in zip(*(x.split(entries) for x in flat), strict=True):
        state = part[0].new_zeros(len(part[0]), q.shape[-1], v.shape[-1] + 1, dtype=dtype)
        spoil = None
        for Q, K, V, Y, den in _without_padding(part):
            shape = V.shape[:3]
            V1 = torch.ones(*shape, V.shape[-1] + 1, dtype=dtype, device=v.device)
            V1[..., :-1] = V
            # As in attention_forward, a separate sum adds values that are not finite to later rows. The products are
            # the same with and without it, so that it changes no bit of other columns and rows. If the sum of finite
            # values overflows, this only costs time.
            if spoil is not None or not V1.sum().isfinite():
                spoil_sums = (V1 * 0).flatten(1, 2).cumsum(1)
                spoil_sums = spoil_sums if spoil is None else spoil_sums + spoil
                spoil = spoil_sums[:, -1:]
                V1.masked_fill_(V1 * 0 != 0, 0)
            Q, K, V1 = (x.to(dtype).flatten(0, 1) for x in (Q, K, V1))
            sums = torch.bmm(K.mT, V1).unflatten(0, shape[:2])
            earlier_sums = torch.empty_like(sums)
            for at, here in zip(earlier_sums.unbind(1), sums.unbind(1), strict=True):
                at.copy_(state)
                state = state + here
            total = (
                torch.bmm(Q, earlier_sums.flatten(0, 1))
                .baddbmm_(torch.bmm(Q, K.mT).tril_(), V1)
                .unflatten(0, shape[:2])
            )
            if spoil is not None:
                total += spoil_sums.view_as(total)
            den.copy_(total[..., -1:])
            empty = den == 0
            if empty.any():
                Y.copy_((total[..., :-1] / den.masked_fill(empty, 1)).masked_fill_(empty, 0))
            else:
                Y.copy_(total[..., :-1].div_(den))
    return y, denominator


def _without_padding(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors (batch, n, X) as (batch, N, C, X), of at most ``_ROWS`` rows; the last chunk may be shorter."""
    n = tensors[0].shape[1]
    full_rows = n // _CHUNK * _CHUNK
    for start in range(0, full_rows, _ROWS):
        stop = min(start + _ROWS, full_rows)
        yield [x[:, start:stop].unflatten(1, (-1, _CHUNK)) for x in tensors]
    if full_rows < n:
        yield [x[:, full_rows:].unsqueeze(1) for x in tensors]


def attention_backward(
    grad: Tensor,  # (*batch, n, E)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_scale: Tensor | None,
    y: Tensor,  # (*batch, n, E)
    denominator: Tensor,  # (*batch, n)
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients of q, k, v and ``log_scale`` from the result of :func:`attention_forward`; recompute scores."""
    n = q.shape[-2]
    if n == 0:
        return q.clone(), k.clone(), v.clone(), None if log_scale is None else log_scale.clone()
    with no_autocast(q.device):
        segments = list(_segments((q, k, v, grad, y, denominator[..., None]), log_scale))
        dq, dk, dv, dc = [], [], [], []
        state = _no_state(q, k, v)
        for _, K, V, dY, Y, den, scales in segments:
            K, V1 = _keys(K, V, scales)
            dV1 = _adjoint(dY, Y, den)
            earlier_sums, state = _scan(K.mT @ (V1 if scales is None else V1 * scales.column), state, scales)
            across = dV1 @ earlier_sums.mT
            dq.append(_masked(dV1 @ V1.mT, scales) @ K + (across if scales is None else across * scales.row))
        state = _no_state(q, k, v)
        for Q, K, V, dY, Y, den, scales in reversed(segments):
            K, V1 = _keys(K, V, scales)
            dV1 = _adjoint(dY, Y, den)
            after, state = _scan(Q.mT @ (dV1 if scales is None else dV1 * scales.row), state, scales, reverse=True)
            across_k, across_v = V1 @ after.mT, K @ after[..., :-1]
            if scales is not None:
                across_k, across_v = across_k * scales.column, across_v * scales.column
            dk.append(_masked(dV1 @ V1.mT, scales).mT @ Q + across_k)
            dv.append(_masked(Q @ K.mT, scales).mT @ dV1[..., :-1] + across_v)
            dc.append((K * dk[-1]).sum(-1, keepdim=True))

    def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
        return torch.cat([part.flatten(-3, -2) for part in parts], -2)[..., :n, :].to(like.dtype)

    gradients = joined(dq, q), joined(dk[::-1], k), joined(dv[::-1], v)
    return *gradients, None if log_scale is None else joined(dc[::-1], log_scale)[..., 0]


class _Scales(NamedTuple):
    """Scales of a segment of N chunks, all at most 1."""

    inside: Tensor  # (*batch, N, C, C), e^{c_j - r_i}, 0 above the diagonal
    row: Tensor  # (*batch, N, C, 1), e^{R - r_i}, R the maximum before the chunk
    column: Tensor  # (*batch, N, C, 1), e^{c_j - R'}, R' the maximum at the chunk's end
    decay: Tensor  # (*batch, N, 1, 1), e^{R - R'}
    left_out: Tensor  # (*batch, N, C, 1), where c_j is -inf


def _segments(
    tensors: Sequence[Tensor], log_scale: Tensor | None, earlier_maximum: Tensor | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield tensors (*batch, n, X) as (*batch, N, C, X), N at most ``_CHUNKS``, zero-padded; last, their scales.

    ``earlier_maximum`` (*batch, 1) is the largest exponent before the first row.
    """
    n, dtype = tensors[0].shape[-2], _accumulation_dtype(tensors[0])
    chunk = min(_CHUNK, n)
    # The gradient of a slice would be as large as x.
    parts = zip(*(tensor.split(chunk * _CHUNKS, -2) for tensor in tensors), strict=True)
    exponents = None if log_scale is None else log_scale.split(chunk * _CHUNKS, -1)
    for index, part in enumerate(parts):
        rows = part[0].shape[-2]
        chunks = -(-rows // chunk)
        pad = chunks * chunk - rows
        cut = [(F.pad(x, (0, 0, 0, pad)) if pad else x).to(dtype).unflatten(-2, (chunks, chunk)) for x in part]
        scales = None
        if exponents is not None:
            c = F.pad(exponents[index].to(dtype), (0, pad), value=-torch.inf)
            scales, earlier_maximum = _scales(c.unflatten(-1, (chunks, chunk)), earlier_maximum)
        yield *cut, scales


def _scales(c: Tensor, earlier_maximum: Tensor | None) -> tuple[_Scales, Tensor]:
    """Return the scales of c (*batch, N, C) after ``earlier_maximum`` (*batch, 1), and the maximum at its end.

    The output does not depend on the subtracted maximum, so it needs no gradient. The subtrahend has 0 instead of -inf,
    so that no difference is -inf - (-inf).
    """
    fixed = c.detach()
    if earlier_maximum is None:
        earlier_maximum = torch.full_like(fixed[..., 0, :1], -torch.inf)
    running = torch.maximum(fixed.flatten(-2).cummax(-1).values, earlier_maximum).unflatten(-1, c.shape[-2:])
    ends = running[..., -1]
    starts = torch.cat((earlier_maximum, ends[..., :-1]), -1)  # (*batch, N)
    finite = running.masked_fill(running == -torch.inf, 0)
    later = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool, device=c.device).triu(1)
    scales = _Scales(
        inside=(c[..., None, :] - finite[..., :, None]).masked_fill(later, -torch.inf).exp(),
        row=(starts[..., None] - finite).exp()[..., None],
        column=(c - finite[..., -1:]).exp()[..., None],
        decay=(starts - finite[..., -1]).exp()[..., None, None],
        left_out=(c == -torch.inf)[..., None],
    )
    return scales, ends[..., -1:]


def _keys(K: Tensor, V: Tensor, scales: _Scales | None) -> tuple[Tensor, Tensor]:
    """Return K and [V | 1], zero where a key is masked, even if it is NaN."""
    if scales is not None:
        K, V = K.masked_fill(scales.left_out, 0), V.masked_fill(scales.left_out, 0)
    return K, F.pad(V, (0, 1), value=1.0)


def _masked(scores: Tensor, scales: _Scales | None) -> Tensor:
    # A product with zeros would turn a later score that overflowed into NaN.
    return (scores if scales is None else scores * scales.inside).tril()


def _scan(
    sums: Tensor,  # (*batch, N, D, E + 1)
    state: Tensor,  # (*batch, D, E + 1)
    scales: _Scales | None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return for each chunk the state before it, in the order of the scan, and the state after the last."""
    order = range(sums.shape[-3])
    states = []
    for t in reversed(order) if reverse else order:
        states.append(state)
        state = sums[..., t, :, :] + (state if scales is None else state * scales.decay[..., t, :, :])
    return torch.stack(states[::-1] if reverse else states, -3), state


def _adjoint(dY: Tensor, Y: Tensor, denominator: Tensor) -> Tensor:
    """Return the gradient of [numerator | denominator], zero in rows without keys."""
    empty = denominator == 0
    dV1 = torch.cat((dY, -(dY * Y).sum(-1, keepdim=True)), -1) / denominator.masked_fill(empty, 1)
    return dV1.masked_fill(empty, 0)


def _no_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1] + 1, dtype=_accumulation_dtype(q))


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast. The meta device has no autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if can_autocast(kind) else nullcontext()


def _accumulation_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32

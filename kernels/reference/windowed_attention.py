r"""Attention that is exact in a window and linear beyond it, in plain torch, by blocks of the sequence.

Exact scores are taken between neighbouring blocks. All other keys enter through one state for each block of queries,
:math:`\Phi_k^T [V \mid 1]` summed over the blocks that are far from it: by prefix sums, and by suffix sums too if not
causal; never as a difference of sums, which would cancel.

Exponents of keys are only ever used as :math:`e^{b_j - B} \le 1`, B being the largest exponent that a state has seen.
A row's exact and far weights are brought to one maximum, for which its far keys count as a single one, with the
exponent :math:`f_i = a_i + B + \log(\phi_{q,i} \cdot z)` of their denominator.
"""

__all__ = ["windowed_backward", "windowed_forward", "windowed_linear_attention"]

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import _accumulation_dtype, _no_autocast

# Blocks of 64 positions worked on at a time, over all batch entries: their scores stay in the cache.
_POSITIONS = 64 * 64


def windowed_linear_attention(
    q: Tensor,  # (*batch, n, D)
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
    phi_q: Tensor,  # (*batch, n, m)
    phi_k: Tensor,  # (*batch, n, m)
    log_q: Tensor | None,  # (*batch, n)
    log_k: Tensor | None,  # (*batch, n)
    window: int,
    causal: bool,
) -> Tensor:  # (*batch, n, E)
    """Compute :func:`panther.kernels.windowed_linear_attention` in torch, differentiable any number of times."""
    return windowed_forward(q, k, v, phi_q, phi_k, log_q, log_k, window, causal)[0]


def windowed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_q: Tensor | None,
    log_k: Tensor | None,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # (*batch, n, E), (*batch, n)
    """Return the output, and the logarithm of the denominator (float32 or float64), -inf where nothing is attended."""
    n = q.shape[-2]
    if n == 0:  # empty, and still a function of all of them
        y = v * (q * k).sum(-1, keepdim=True) * (phi_q * phi_k).sum(-1, keepdim=True)
        return y, q.sum(-1).to(_accumulation_dtype(q))
    outputs, logs = [], []
    with _no_autocast(q):
        blocks = _blocks(q, k, v, phi_q, phi_k, log_q, log_k, window, causal)
        far = _far(blocks, causal)
        for i in range(len(blocks.q)):
            exact = _exact(blocks, i, causal)
            exponents = [scores.detach().amax(-1, keepdim=True) for scores in exact.scores]
            if far is not None:
                sums = blocks.phi_q[i].to(blocks.dtype) @ far.states[i]
                shift, some = _far_exponent(blocks.log_q[i], far.units[i], sums)
                log = sums[..., -1:].detach().masked_fill(~some, 1).log()
                exponents.append(shift.detach() + log)
            largest = torch.stack(exponents).amax(0)
            fixed = _finite(largest)
            weights = [(scores - fixed).exp() for scores in exact.scores]
            denominator = reduce(torch.add, [weight.sum(-1, keepdim=True) for weight in weights])
            numerator = reduce(torch.add, [w @ V for w, V in zip(weights, exact.values, strict=True)])
            if far is not None:
                sums = (shift - fixed).exp() * sums.masked_fill(~some, 0)
                numerator, denominator = numerator + sums[..., :-1], denominator + sums[..., -1:]
            if exact.spoil is not None:
                numerator = numerator + exact.spoil
            denominator = denominator.masked_fill(largest == -torch.inf, 1)
            outputs.append((numerator / denominator).flatten(-3, -2).to(v.dtype))
            logs.append((largest + denominator.log()).flatten(-3))
    return torch.cat(outputs, -2)[..., :n, :], torch.cat(logs, -1)[..., :n]


def windowed_backward(
    grad: Tensor,  # (*batch, n, E)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_q: Tensor | None,
    log_k: Tensor | None,
    y: Tensor,  # (*batch, n, E)
    log_den: Tensor,  # (*batch, n)
    window: int,
    causal: bool,
) -> tuple[Tensor | None, ...]:
    """Return gradients of the seven operands from the result of :func:`windowed_forward`; recompute scores."""
    operands = (q, k, v, phi_q, phi_k, log_q, log_k)
    n = q.shape[-2]
    if n == 0:
        return tuple(None if x is None else torch.zeros_like(x) for x in operands)
    with _no_autocast(q):
        blocks = _blocks(*operands, window, causal)
        far = _far(blocks, causal)
        size, T = blocks.q[0].shape[-2], sum(part.shape[-3] for part in blocks.q)
        dq, dk, dv, dphi_q, dphi_k, da, db = (
            x.new_zeros((*q.shape[:-2], T, size, x.shape[-1]), dtype=blocks.dtype)
            for x in (q, k, v, phi_q, phi_k, blocks.log_q[0], blocks.log_k[0])
        )
        rows = zip(*(_cut(x, window, 0.0) for x in (grad, y, log_den[..., None])), strict=True)
        adjoints: list[Tensor] = []
        for i, (dY, Y, log) in enumerate(rows):
            here = slice(i * blocks.q[0].shape[-3], i * blocks.q[0].shape[-3] + blocks.q[i].shape[-3])
            dY, log = dY.to(blocks.dtype), _finite(log)
            delta = (dY * Y.to(blocks.dtype)).sum(-1, keepdim=True)
            exact = _exact(blocks, i, causal)
            Q = blocks.q[i].to(blocks.dtype)
            for offset, scores, K, V in zip((-1, 0, 1), exact.scores, exact.keys, exact.values, strict=False):
                weights = (scores - log).exp()
                dscores = weights * (dY @ V.mT - delta)
                if causal and offset == 0:
                    dscores = dscores.tril()  # a later value may have overflowed
                dq[..., here, :, :] += dscores @ K
                # The blocks before the first and after the last are not there.
                first, last = max(0, -here.start - offset), min(here.stop, T - offset) - here.start
                there = slice(here.start + offset + first, here.start + offset + last)
                dk[..., there, :, :] += (dscores.mT @ Q)[..., first:last, :, :]
                dv[..., there, :, :] += (weights.mT @ dY)[..., first:last, :, :]
            if far is not None:
                phi = blocks.phi_q[i].to(blocks.dtype)
                sums = phi @ far.states[i][..., -1:]
                shift, _ = _far_exponent(blocks.log_q[i], far.units[i], sums)
                factor = (shift - log).exp()
                adjoint = torch.cat((dY, -delta), -1) * factor
                dphi_q[..., here, :, :] = adjoint @ far.states[i].mT
                da[..., here, :, :] = (phi * dphi_q[..., here, :, :]).sum(-1, keepdim=True)
                adjoints += (phi.mT @ adjoint).unbind(-3)
        if far is not None:
            units = torch.cat(tuple(far.units), -1)
            # Keys take from queries as queries do from keys, in the other direction: b - B in the place of a + B.
            states, units = _gather(adjoints, torch.where(units == -torch.inf, units, -units), causal, reverse=True)
            for t, state in enumerate(states):
                i, j = divmod(t, blocks.q[0].shape[-3])
                K, V, b = (x[i][..., j, :, :].to(blocks.dtype) for x in (blocks.phi_k, blocks.v, blocks.log_k))
                if blocks.left_out is not None:
                    out = blocks.left_out[i][..., j, :, :]
                    K, V = K.masked_fill(out, 0), V.masked_fill(out, 0)
                factor = (b + units[..., t, None, None]).exp()
                dphi_k[..., t, :, :] = factor * (V @ state[..., :-1].mT + state[..., -1:].mT)
                dv[..., t, :, :] += factor * (K @ state[..., :-1])
                db[..., t, :, :] = (K * dphi_k[..., t, :, :]).sum(-1, keepdim=True)

    def joined(x: Tensor, like: Tensor) -> Tensor:
        return x.flatten(-3, -2)[..., :n, :].to(like.dtype)

    return (
        *(joined(*pair) for pair in ((dq, q), (dk, k), (dv, v), (dphi_q, phi_q), (dphi_k, phi_k))),
        None if log_q is None else joined(da, log_q)[..., 0],
        None if log_k is None else joined(db, log_k)[..., 0],
    )


class _Blocks(NamedTuple):
    """The operands by blocks of C positions, (*batch, N, C, X), N blocks to a segment, one entry a segment."""

    q: Sequence[Tensor]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    phi_q: Sequence[Tensor]
    phi_k: Sequence[Tensor]
    log_q: Sequence[Tensor]  # (*batch, N, C, 1)
    log_k: Sequence[Tensor]  # (*batch, N, C, 1), -inf where the sequence has ended
    left_out: Sequence[Tensor] | None  # (*batch, N, C, 1), where log_k is -inf
    dtype: torch.dtype  # of sums


class _Far(NamedTuple):
    """Sums over what is far from each block, one entry a segment."""

    states: Sequence[Tensor]  # (*batch, N, m, E + 1), in units of e^B
    units: Sequence[Tensor]  # (*batch, N), B


class _Exact(NamedTuple):
    """A segment's scores with the blocks before, its own, and those after if not causal."""

    scores: list[Tensor]  # (*batch, N, C, C), -inf where not attended
    keys: list[Tensor]  # (*batch, N, C, D), zero where left out
    values: list[Tensor]  # (*batch, N, C, E), zero where left out
    spoil: Tensor | None  # (*batch, N, C, E), causal: NaN in the rows that values which are not finite reach


def _blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    log_q: Tensor | None,
    log_k: Tensor | None,
    window: int,
    causal: bool,
) -> _Blocks:
    dtype = _accumulation_dtype(q)
    zero = q.new_zeros((*q.shape[:-1], 1), dtype=dtype)
    a = zero if log_q is None else log_q.to(dtype)[..., None]
    b = zero if log_k is None else log_k.to(dtype)[..., None]
    keys = _cut(b, window, -torch.inf)
    # What follows the sequence is in nobody's past, so it needs no mask if causal.
    unmasked = log_k is None and (causal or q.shape[-2] % min(window, q.shape[-2]) == 0)
    left_out = None if unmasked else [part == -torch.inf for part in keys]
    Q, K, V, Phi_q, Phi_k, rows = (_cut(x, window, 0.0) for x in (q, k, v, phi_q, phi_k, a))
    return _Blocks(Q, K, V, Phi_q, Phi_k, rows, keys, left_out, dtype)


def _cut(x: Tensor, window: int, fill: float) -> Sequence[Tensor]:
    """Return x (*batch, n, X) in segments (*batch, N, C, X)."""
    n = x.shape[-2]
    size = min(window, n)
    pad = -n % size
    segment = max(1, _POSITIONS // (size * max(1, x.shape[:-2].numel())))
    return (F.pad(x, (0, 0, 0, pad), value=fill) if pad else x).unflatten(-2, (-1, size)).split(segment, -3)


def _exact(blocks: _Blocks, i: int, causal: bool) -> _Exact:
    N = blocks.q[i].shape[-3]
    Q = blocks.q[i].to(blocks.dtype)
    K, V = (_extended(x, i, causal, 0.0).to(blocks.dtype) for x in (blocks.k, blocks.v))
    gone = None
    if blocks.left_out is not None:
        gone = _extended(blocks.left_out, i, causal, True)
    elif i == 0 or (i == len(blocks.q) - 1 and not causal):
        gone = _extended([x.new_zeros((x.shape[-3], 1, 1), dtype=torch.bool) for x in blocks.q], i, causal, True)
    if gone is not None:
        K, V = K.masked_fill(gone, 0), V.masked_fill(gone, 0)
    scores, keys, values, spoil = [], [], [], None
    for offset in range(2 if causal else 3):
        near = slice(offset, offset + N)
        keys.append(K[..., near, :, :])
        values.append(V[..., near, :, :])
        score = Q @ keys[-1].mT
        if gone is not None:
            score = score.masked_fill(gone[..., near, :, :].mT, -torch.inf)
        if causal and offset == 1:
            later = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
            score = score.masked_fill(later, -torch.inf)
            # A weight of 0 times a value that is not finite would be NaN: such values reach later rows by this sum.
            spoil = values[-1] * 0
            values[-1] = values[-1].masked_fill(spoil != 0, 0)
            spoil = spoil.cumsum(-2)
        scores.append(score)
    return _Exact(scores, keys, values, spoil)


def _extended(parts: Sequence[Tensor], i: int, causal: bool, fill: float | bool) -> Tensor:
    """Return a segment with the block before it and, if not causal, the block after it; ``fill`` where none is."""
    part = parts[i]
    edge = torch.full_like(part[..., :1, :, :], fill)
    before = parts[i - 1][..., -1:, :, :] if i else edge
    if causal:
        return torch.cat((before, part), -3)
    return torch.cat((before, part, parts[i + 1][..., :1, :, :] if i + 1 < len(parts) else edge), -3)


def _far(blocks: _Blocks, causal: bool) -> _Far | None:
    """Return the sums that queries take; None if there are at most two blocks, which see each other."""
    largest = torch.cat([b.detach().amax((-2, -1)) for b in blocks.log_k], -1)  # (*batch, T)
    if largest.shape[-1] <= 2:
        return None
    N = blocks.q[0].shape[-3]
    units = largest.cummax(-1).values if causal else largest
    sums: list[Tensor] = []
    for i, unit in enumerate(units.split(N, -1)):
        weights = (blocks.log_k[i] - _finite(unit)[..., None, None]).exp()
        K, V = blocks.phi_k[i].to(blocks.dtype), blocks.v[i].to(blocks.dtype)
        if blocks.left_out is not None:
            K, V = K.masked_fill(blocks.left_out[i], 0), V.masked_fill(blocks.left_out[i], 0)
        sums += (K.mT @ torch.cat((V * weights, weights), -1)).unbind(-3)
    states, units = _gather(sums, units, causal)
    return _Far([torch.stack(states[t : t + N], -3) for t in range(0, len(states), N)], units.split(N, -1))


def _gather(
    sums: list[Tensor],  # (*batch, m, E + 1), T of them, in units of e^units
    units: Tensor,  # (*batch, T)
    causal: bool,
    *,
    reverse: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Return for each block the sums over all that are not next to it, and their units: before, or after if reverse."""
    if causal and reverse:
        states, units = _gather(sums[::-1], units.flip(-1), causal)
        return states[::-1], units.flip(-1)
    before = _running(units)
    # Causal sums have the units of the largest exponent so far to begin with.
    states = _scan(sums, before, None if causal else units)
    if causal:
        return states, before
    after = _running(units.flip(-1))
    others = _scan(sums[::-1], after, units.flip(-1))[::-1]
    after = after.flip(-1)
    both = torch.maximum(before, after)
    left, right = _ratio(before, both), _ratio(after, both)
    pairs = zip(states, left.unbind(-1), others, right.unbind(-1), strict=True)
    return [a * x[..., None, None] + b * y[..., None, None] for a, x, b, y in pairs], both


def _scan(sums: list[Tensor], running: Tensor, units: Tensor | None) -> list[Tensor]:
    """Return the running sums over blocks, two blocks late, in units of ``running``."""
    decay = _ratio(running[..., :-1], running[..., 1:])[..., None, None]
    states = [torch.zeros_like(sums[0])] * 2
    for t in range(2, len(sums)):
        new = sums[t - 2]
        if units is not None:
            new = new * _ratio(units[..., t - 2], running[..., t])[..., None, None]
        states.append(torch.addcmul(new, states[-1], decay[..., t - 1, :, :]))
    return states


def _running(units: Tensor) -> Tensor:
    """Return the running maximum over blocks, two blocks late, and -inf for the first two."""
    return F.pad(units.cummax(-1).values, (2, -2), value=-torch.inf)


def _far_exponent(log_q: Tensor, units: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponent of far sums, -inf where there are none, and where there are some.

    A denominator of 0 is no key, or all too small to count; too small for its inverse, it is 0 too.
    """
    some = sums[..., -1:] >= torch.finfo(sums.dtype).tiny
    return (log_q + units[..., None, None]).masked_fill(~some, -torch.inf), some


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """Return e^{x - y} for x <= y, 0 where both are -inf."""
    return (x - _finite(y)).exp()


def _finite(x: Tensor) -> Tensor:
    """Return what may be subtracted from -inf: x, with 0 in the place of -inf."""
    return x.masked_fill(x == -torch.inf, 0)

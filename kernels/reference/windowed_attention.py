r"""Attention that is exact in a window and linear beyond it, in plain torch, by blocks of the sequence.

Exact scores are taken between neighbouring blocks. All other keys enter through one state for each block of queries,
:math:`\Phi_k^T [V \mid 1]` summed over the blocks that are not neighbours: by prefix sums and, if not causal, by suffix
sums, and never by a difference of sums, in which digits would cancel.

Exponents of keys are only used as :math:`e^{b_j - B} \le 1`, where B is the largest exponent that a state has seen.
All weights of a row have a common maximum. For this maximum, all keys outside of the window count as a single key with
the exponent :math:`f_i = a_i + B + \log(\phi_{q,i} \cdot z)` of their denominator.
"""

__all__ = ["WindowedOperands", "windowed_backward", "windowed_forward", "windowed_linear_attention"]

from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import are_transforms_active
from .attention import _accumulation_dtype, no_autocast

# Positions per step: their scores, 2 x 64 or 3 x 64 floats each, stay in the cache.
_POSITIONS = 64 * 64


class WindowedOperands(NamedTuple):
    """The operands of attention that is exact in a window, see :func:`panther.kernels.windowed_linear_attention`."""

    q: Tensor  # (*batch, n, D)
    k: Tensor  # (*batch, n, D)
    v: Tensor  # (*batch, n, E)
    phi_q: Tensor  # (*batch, n, m)
    phi_k: Tensor  # (*batch, n, m)
    log_q: Tensor | None  # (*batch, n)
    log_k: Tensor | None  # (*batch, n)


def windowed_linear_attention(*args: Any) -> Tensor:  # (*batch, n, E)
    """Compute :func:`panther.kernels.windowed_linear_attention` in torch, differentiable any number of times.

    The arguments are the operands, the window and whether attention is causal, by position.
    """
    return windowed_forward(WindowedOperands(*args[:-2]), *args[-2:])[0]


def windowed_forward(
    operands: WindowedOperands, window: int, causal: bool
) -> tuple[Tensor, Tensor]:  # (*batch, n, E), (*batch, n)
    """Return the output, and the logarithm of the denominator (float32 or float64), -inf in rows without keys."""
    q, k, v, phi_q, phi_k, *_ = operands
    if q.shape[:-1].numel() == 0:  # An empty result must depend on all operands for autograd.
        y = v * (q * k).sum(-1, keepdim=True) * (phi_q * phi_k).sum(-1, keepdim=True)
        return y, q.sum(-1).to(_accumulation_dtype(q))
    outputs, logs = [], []
    with no_autocast(q.device):
        blocks = _blocks(operands, window, causal)
        far = _far(blocks)
        for here in blocks.segments():
            near = [_near(blocks, here, offset) for offset in blocks.offsets]
            exponents = [part.scores.detach().amax(-1, keepdim=True) for part in near]
            if far is not None:
                sums = blocks.phi_q[here].to(blocks.dtype) @ far.states[here]
                shift, has_keys = _far_exponent(blocks.log_q[here], far.units[here], sums)
                log = sums[..., -1:].detach().masked_fill(~has_keys, 1).log()
                exponents.append(shift.detach() + log)
            largest = reduce(torch.maximum, exponents)
            fixed = _finite(largest)
            weights = [_weights(part.scores, fixed) for part in near]
            denominator = reduce(torch.add, [weight.sum(-1, keepdim=True) for weight in weights])
            numerator = reduce(torch.add, [w @ part.values for w, part in zip(weights, near, strict=True)])
            if far is not None:
                sums = (shift - fixed).exp() * (sums if blocks.is_finite else sums.masked_fill(~has_keys, 0))
                numerator, denominator = numerator + sums[..., :-1], denominator + sums[..., -1:]
            for part in near:
                numerator = numerator if part.spoil is None else numerator + part.spoil
            denominator = denominator.masked_fill(largest == -torch.inf, 1)
            outputs.append((numerator / denominator).to(v.dtype))
            logs.append(largest + denominator.log())
    return _merge(torch.cat(outputs), v), _merge(torch.cat(logs), q[..., :1]).squeeze(-1)


def windowed_backward(
    grad: Tensor,  # (*batch, n, E)
    operands: WindowedOperands,
    y: Tensor,  # (*batch, n, E)
    log_den: Tensor,  # (*batch, n)
    window: int,
    causal: bool,
) -> tuple[Tensor | None, ...]:
    """Return gradients of the seven operands from the result of :func:`windowed_forward`; recompute scores."""
    q, *_, log_q, log_k = operands
    if q.shape[:-1].numel() == 0:
        return tuple(None if x is None else torch.zeros_like(x) for x in operands)
    with no_autocast(q.device):
        blocks = _blocks(operands, window, causal)
        far = _far(blocks)
        parts = (blocks.q, blocks.k, blocks.v, blocks.phi_q, blocks.phi_k, blocks.log_q, blocks.log_k)
        dq, dk, dv, dphi_q, dphi_k, da, db = (torch.zeros_like(x, dtype=blocks.dtype) for x in parts)
        dY, Y, logs = (_split(x, window, 0.0) for x in (grad, y, log_den[..., None]))
        adjoints = []
        for here in blocks.segments():
            dy, log = dY[here].to(blocks.dtype), _finite(logs[here])
            delta = (dy * Y[here].to(blocks.dtype)).sum(-1, keepdim=True)
            Q = blocks.q[here].to(blocks.dtype)
            for offset in blocks.offsets:
                near = _near(blocks, here, offset)
                weights = _weights(near.scores, log)
                dscores = weights * torch.sub(dy @ near.values.mT, delta)
                if causal and offset == 0:
                    dscores = dscores.tril()  # A later value may have overflowed.
                dq[here] += dscores @ near.keys
                for gradient, part in ((dk, dscores.mT @ Q), (dv, weights.mT @ dy)):
                    blocks.without_neighbour(part, here, offset).zero_()
                    _add_shifted(gradient, part, here, offset)
            if far is not None:
                phi = blocks.phi_q[here].to(blocks.dtype)
                shift, _ = _far_exponent(blocks.log_q[here], far.units[here], phi @ far.states[here][..., -1:])
                adjoint = torch.cat((dy, -delta), -1) * (shift - log).exp()
                dphi_q[here] = adjoint @ far.states[here].mT
                da[here] = (phi * dphi_q[here]).sum(-1, keepdim=True)
                adjoints.append(phi.mT @ adjoint)
        if far is not None:
            # Sums over queries have the form of sums over keys, in the opposite direction and with the units -B.
            units = torch.where(far.units == -torch.inf, far.units, -far.units)
            states, units = _gather(torch.cat(adjoints), units, blocks.per_entry, causal, reverse=True)
            for here in blocks.segments():
                K, V, b = _far_keys(blocks, here)
                factor = (b + units[here]).exp()
                dphi_k[here] = factor * (V @ states[here][..., :-1].mT + states[here][..., -1:].mT)
                dv[here] += factor * (K @ states[here][..., :-1])
                db[here] = (K * dphi_k[here]).sum(-1, keepdim=True)
    return (
        *(_merge(d, x).to(x.dtype) for d, x in zip((dq, dk, dv, dphi_q, dphi_k), operands[:5], strict=True)),
        None if log_q is None else _merge(da, q[..., :1]).squeeze(-1).to(log_q.dtype),
        None if log_k is None else _merge(db, q[..., :1]).squeeze(-1).to(log_k.dtype),
    )


class _Blocks(NamedTuple):
    """The operands in blocks of C positions, (G, C, X). Each batch entry has ``per_entry`` consecutive blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    phi_q: Tensor
    phi_k: Tensor
    log_q: Tensor  # (G, C, 1)
    log_k: Tensor  # (G, C, 1), -inf past the end of the sequence
    left_out: Tensor | None  # (G, C, 1), where log_k is -inf
    is_finite: bool  # whether a check has shown that keys, values and features of keys are finite
    per_entry: int
    causal: bool
    dtype: torch.dtype  # of the sums

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the blocks that a block attends to exactly: the previous block, itself, and the next block."""
        return (-1, 0) if self.causal else (-1, 0, 1)

    def segments(self) -> Iterator[slice]:
        G, size = self.q.shape[:2]
        step = max(1, _POSITIONS // size)
        return (slice(start, min(start + step, G)) for start in range(0, G, step))

    def without_neighbour(self, part: Tensor, here: slice, offset: int) -> Tensor:
        """Return a view of the blocks of a segment that have no neighbour at ``offset`` in their batch entry."""
        if offset == 0:
            return part[:0]
        edge = 0 if offset < 0 else self.per_entry - 1
        return part[(edge - here.start) % self.per_entry :: self.per_entry]


class _Far(NamedTuple):
    """Sums over the keys outside of the window of each block."""

    states: Tensor  # (G, m, E + 1), in units of e^B
    units: Tensor  # (G, 1, 1), B


class _Near(NamedTuple):
    """Scores of a segment's blocks with their neighbours at one offset, and the neighbours' keys and values."""

    scores: Tensor  # (N, C, C), -inf where masked
    keys: Tensor  # (N, C, D), finite where masked
    values: Tensor  # (N, C, E), finite where masked
    spoil: Tensor | None  # (N, C, E), causal: NaN in the rows that values which are not finite reach


def _blocks(operands: WindowedOperands, window: int, causal: bool) -> _Blocks:
    q, k, v, phi_q, phi_k, log_q, log_k = operands
    n, dtype = q.shape[-2], _accumulation_dtype(q)
    zero = q.new_zeros((*q.shape[:-1], 1), dtype=dtype)
    a = zero if log_q is None else log_q.to(dtype)[..., None]
    b = zero if log_k is None else log_k.to(dtype)[..., None]
    is_finite = all(_is_finite(x) for x in (k, v, phi_k))
    b = _split(b, window, -torch.inf)
    # If causal, no query attends to positions past the end, so they need no mask.
    left_out = None if log_k is None and (causal or n % min(window, n) == 0) else b == -torch.inf
    if left_out is not None and is_finite and not bool(left_out.any()):
        left_out = None
    Q, K, V, Phi_q, Phi_k, rows = (_split(x, window, 0.0) for x in (q, k, v, phi_q, phi_k, a))
    return _Blocks(Q, K, V, Phi_q, Phi_k, rows, b, left_out, is_finite, -(-n // min(window, n)), causal, dtype)


def _is_finite(x: Tensor) -> bool:
    """Return whether all entries are finite, or False where the check would synchronize a GPU or break a transform."""
    if x.device.type != "cpu" or are_transforms_active():
        return False
    return bool(x.detach().sum(dtype=_accumulation_dtype(x)).isfinite())


def _split(x: Tensor, window: int, fill: float) -> Tensor:
    """Return x (*batch, n, X) as (G, C, X)."""
    n = x.shape[-2]
    size = min(window, n)
    pad = -n % size
    x = F.pad(x, (0, 0, 0, pad), value=fill) if pad else x
    return x.reshape(x.shape[:-1].numel() // size, size, x.shape[-1])


def _merge(x: Tensor, like: Tensor) -> Tensor:
    """Return x (G, C, X) as (*batch, n, X), with the batch and n of ``like``."""
    n = like.shape[-2]
    return x.reshape(*like.shape[:-2], -(-n // x.shape[-2]) * x.shape[-2], x.shape[-1])[..., :n, :]


def _shifted(x: Tensor, here: slice, offset: int) -> Tensor:
    """Return the neighbours of a segment's blocks at an offset. A missing neighbour is replaced by any block."""
    start, stop = here.start + offset, here.stop + offset
    if start < 0:
        return torch.cat((x[:1], x[:stop]))
    return torch.cat((x[start:], x[-1:])) if stop > len(x) else x[start:stop]


def _add_shifted(x: Tensor, part: Tensor, here: slice, offset: int) -> None:
    start, stop = here.start + offset, here.stop + offset
    low, high = max(start, 0), min(stop, len(x))
    x[low:high] += part[low - start : len(part) - (stop - high)]


def _near(blocks: _Blocks, here: slice, offset: int) -> _Near:
    K, V = (_shifted(x, here, offset).to(blocks.dtype) for x in (blocks.k, blocks.v))
    out = None if blocks.left_out is None else _shifted(blocks.left_out, here, offset)
    scores = blocks.q[here].to(blocks.dtype) @ K.mT
    spoil = later = None
    if blocks.causal and offset == 0:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    if blocks.is_finite and _is_finite(scores):
        # A sum with -inf gives the same result as masked_fill in a fraction of the time.
        if out is not None:
            scores += torch.zeros_like(out, dtype=blocks.dtype).masked_fill(out, -torch.inf).mT
        if later is not None:
            scores += torch.zeros_like(scores[0]).masked_fill(later, -torch.inf)
    else:
        if out is not None:
            K, V, scores = K.masked_fill(out, 0), V.masked_fill(out, 0), scores.masked_fill(out.mT, -torch.inf)
        if later is not None:
            scores = scores.masked_fill(later, -torch.inf)
            # A weight of 0 times a value that is not finite would be NaN. This sum adds such values to later rows.
            spoil = V * 0
            V = V.masked_fill(spoil != 0, 0)
            spoil = spoil.cumsum(-2)
        if offset:
            K, V = K.clone(), V.clone()
            for x in (K, V):
                blocks.without_neighbour(x, here, offset).zero_()
    blocks.without_neighbour(scores, here, offset).fill_(-torch.inf)
    return _Near(scores, K, V, spoil)


def _weights(scores: Tensor, shift: Tensor) -> Tensor:
    """Return e^{scores - shift}, which overwrites the scores unless torch.func is active."""
    return (scores - shift).exp() if are_transforms_active() else scores.sub_(shift).exp_()


def _far_keys(blocks: _Blocks, here: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, values and exponents of a segment's keys, finite where they are masked."""
    K, V, b = blocks.phi_k[here].to(blocks.dtype), blocks.v[here].to(blocks.dtype), blocks.log_k[here]
    if blocks.left_out is not None and not blocks.is_finite:
        K, V = K.masked_fill(blocks.left_out[here], 0), V.masked_fill(blocks.left_out[here], 0)
    return K, V, b


def _far(blocks: _Blocks) -> _Far | None:
    """Return the sums over the keys outside of each window, or None for at most two blocks, which are neighbours."""
    if blocks.per_entry <= 2:
        return None
    units = blocks.log_k.detach().amax(-2, keepdim=True)  # (G, 1, 1)
    if blocks.causal:
        units = units.view(-1, blocks.per_entry).cummax(-1).values.view_as(units)
    sums = []
    for here in blocks.segments():
        K, V, b = _far_keys(blocks, here)
        weights = (b - _finite(units[here])).exp()
        sums.append(K.mT @ torch.cat((V * weights, weights), -1))
    return _Far(*_gather(torch.cat(sums), units, blocks.per_entry, blocks.causal))


def _gather(
    sums: Tensor,  # (G, m, E + 1), in units of e^units
    units: Tensor,  # (G, 1, 1)
    count: int,
    causal: bool,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return for each block the sums over the blocks not next to it, and their units: before, or after if reverse."""
    parts = list(sums.unflatten(0, (-1, count)).unbind(1))
    units = units.view(-1, count)
    if causal:
        # The units of the sums are the running maximum, because exponents only increase, or decrease in reverse.
        running = _running(units.flip(-1) if reverse else units)
        states = _scan(parts[::-1] if reverse else parts, running, None)
        states, both = (states[::-1], running.flip(-1)) if reverse else (states, running)
    else:
        earlier_units, later_units = _running(units), _running(units.flip(-1))
        both = torch.maximum(earlier_units, later_units.flip(-1))
        left, right = _ratio(earlier_units, both).unbind(-1), _ratio(later_units.flip(-1), both).unbind(-1)
        pairs = zip(
            _scan(parts, earlier_units, units),
            left,
            _scan(parts[::-1], later_units, units.flip(-1))[::-1],
            right,
            strict=True,
        )
        states = [torch.addcmul(a * x[:, None, None], b, y[:, None, None]) for a, x, b, y in pairs]
    return torch.stack(states, 1).flatten(0, 1), both.reshape(-1, 1, 1)


def _scan(sums: list[Tensor], running: Tensor, units: Tensor | None) -> list[Tensor]:
    """Return the running sums over blocks, two blocks late, in units of ``running``."""
    decay = _ratio(running[:, :-1], running[:, 1:])[..., None, None]
    states = [torch.zeros_like(sums[0])] * 2
    for t in range(2, len(sums)):
        new = sums[t - 2]
        if units is not None:
            new = new * _ratio(units[:, t - 2], running[:, t])[:, None, None]
        states.append(torch.addcmul(new, states[-1], decay[:, t - 1]))
    return states


def _running(units: Tensor) -> Tensor:
    """Return the running maximum over blocks, two blocks late, and -inf for the first two."""
    return F.pad(units.cummax(-1).values, (2, -2), value=-torch.inf)


def _far_exponent(log_q: Tensor, units: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponent of the sums outside of the window, -inf without keys there, and whether keys are there.

    A denominator of 0 means that no key is there, or that all weights underflow. A denominator whose inverse would
    overflow counts as 0.
    """
    has_keys = ~(sums[..., -1:] < torch.finfo(sums.dtype).tiny)  # NaN counts as a key.
    return (log_q + units).masked_fill(~has_keys, -torch.inf), has_keys


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """Return e^{x - y} for x <= y, 0 where both are -inf."""
    return (x - _finite(y)).exp()


def _finite(x: Tensor) -> Tensor:
    """Return x with 0 instead of -inf, so that it can be subtracted from -inf."""
    return x.masked_fill(x == -torch.inf, 0)

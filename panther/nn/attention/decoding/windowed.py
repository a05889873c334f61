r"""Attention that is exact in a window and linear beyond it, continued from a state.

A state has the keys and values of the previous and of the current block, and sums over all keys before them. New tokens
are appended to the window (:func:`extended`), so that position 0 is the first position of the previous block, and
attention among these positions is that of a whole sequence. The sums enter it as m further keys, far before all
queries: for feature f the key has the feature f alone, the exponent :math:`\log z_f` of the normaliser, and the value
:math:`s_f / z_f`. One token alone needs no blocks, and takes one product with the window and one with the sums.
"""

__all__ = [
    "Extended", "advanced", "attend_chunk", "attend_shard", "attend_token", "empty_state", "extended", "fills_of",
    "of_query_heads", "take_positions", "without_masked",
]  # fmt: skip

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from panther.errors import ShapeError
from panther.kernels.reference.attention import absorb_keys, no_autocast
from panther.nn.attention.decoding.states import WindowedAttentionState
from panther.nn.functional import windowed_linear_attention


def empty_state(
    batch_size: int,
    num_heads: int,
    num_features: int,
    window: int,
    k: Tensor,  # (*, heads of keys, *, d)
    v: Tensor,  # (*, heads of keys, *, E)
) -> WindowedAttentionState:
    """Return the state before the first key, for keys and values like these."""
    sums = k.new_zeros(
        batch_size, num_heads, num_features, v.shape[-1] + 1, dtype=torch.promote_types(k.dtype, torch.float32)
    )
    return WindowedAttentionState(
        sums,
        sums.new_full((batch_size, num_heads, 1), -torch.inf),
        k.new_zeros(batch_size, k.shape[1], 2 * window, k.shape[-1]),
        v.new_zeros(batch_size, v.shape[1], 2 * window, v.shape[-1]),
        torch.zeros(batch_size, 2 * window, dtype=torch.bool, device=k.device),
        (0,) * batch_size,
        0,
    )


class Extended(NamedTuple):
    """The window of a state and the tokens after it. Position 0 is the first position of the previous block."""

    keys: Tensor  # (N, heads of keys, n, d), finite where they are masked
    values: Tensor  # (N, heads of keys, n, E)
    is_key: Tensor  # (N, n)
    starts: tuple[int, ...]  # for each sample, the position of its first new token that is not skipped
    skipped: tuple[int, ...]  # for each sample, the new tokens before its first key, which take no position
    tokens: int


def fills_of(positions: tuple[int, ...], window: int) -> tuple[int, ...]:
    """Return how many positions of the current block are filled: 0 before the first position, later 1 to window."""
    return tuple(position - _block(position, window) * window for position in positions)


def extended(
    state: WindowedAttentionState,
    k: Tensor,  # (N, heads of keys, T, d)
    v: Tensor,  # (N, heads of keys, T, E)
    key_mask: Tensor | None,  # (N, T)
    window: int,
) -> Extended:
    """Return the window of a state with new tokens after it."""
    N, _, T, _ = k.shape
    k, v = without_masked(k, v, key_mask)
    skipped = _leading_padding(state.positions, key_mask, T)
    mask = torch.ones(N, T, dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    starts = tuple(window + fill for fill in fills_of(state.positions, window))
    if len(set(starts)) <= 1 and not any(skipped):
        stop = starts[0] if starts else window
        keys, values = torch.cat((state.keys[:, :, :stop], k), 2), torch.cat((state.values[:, :, :stop], v), 2)
        return Extended(keys, values, torch.cat((state.is_key[:, :stop], mask), 1), starts, skipped, T)
    first, skip = _column(starts, k), _column(skipped, k)
    place = torch.arange(max(starts) + T, device=k.device)
    source = torch.where(place < first, place, place - first + skip + 2 * window)  # in the window and the new tokens
    exists = source < 2 * window + T
    source = source.clamp_max(2 * window + T - 1)
    keys, values = (take_positions(torch.cat(pair, 2), source) for pair in ((state.keys, k), (state.values, v)))
    is_key = torch.cat((state.is_key, mask), 1).gather(1, source) & exists
    return Extended(keys, values, is_key, starts, skipped, T)


def advanced(attention: Any, state: WindowedAttentionState, chunk: Extended) -> WindowedAttentionState:
    """Return the state after new tokens: the last two blocks, and sums over all keys before them."""
    window = attention.window
    positions = tuple(p + chunk.tokens - skip for p, skip in zip(state.positions, chunk.skipped, strict=True))
    blocks = ((_block(new, window), _block(old, window)) for new, old in zip(positions, state.positions, strict=True))
    shifts = tuple((new - old) * window for new, old in blocks)
    sums, units, keys, values, is_key = _moved(attention, state, chunk, shifts)
    return WindowedAttentionState(
        sums, units, keys, values, is_key, positions, state.length + chunk.tokens, state.feature_map
    )


def attend_chunk(
    attention: Any,
    state: WindowedAttentionState,
    chunk: Extended,
    q: Tensor,  # (N, H, T, d), scaled
) -> Tensor:  # (N, H, T, E)
    """Return the outputs of new tokens."""
    n, m, window = chunk.keys.shape[2], attention.num_features, attention.window
    T = q.shape[2]
    equal = len(set(chunk.starts)) <= 1 and not any(chunk.skipped)
    if equal:
        start = n - T
        rows = F.pad(q, (0, 0, start, 0))
    else:
        first, skip = _column(chunk.starts, q), _column(chunk.skipped, q)
        place = torch.arange(n, device=q.device)
        rows = take_positions(q, (place - first + skip).clamp(0, T - 1))  # Rows without a token are not read.
    k, v = of_query_heads(chunk.keys, attention.num_heads), of_query_heads(chunk.values, attention.num_heads)
    phi_q, log_q = attention.query_features(rows)
    phi_k, log_k = attention.key_features(k)
    log_k = log_k.masked_fill(~chunk.is_key[:, None], -torch.inf)
    extra = -(-m // window) * window  # positions of the sums, whole blocks
    with no_autocast(q.device):
        sums, mass = state.sums[..., :-1], state.sums[..., -1]
        empty = mass == 0
        mass = mass.masked_fill(empty, 1)
        means = (sums / mass[..., None]).to(v.dtype)
        log_mass = (mass.log() + state.units).masked_fill(empty, -torch.inf)
    one_hot = torch.eye(m, dtype=q.dtype, device=q.device).expand(*q.shape[:2], m, m)
    y = windowed_linear_attention(
        F.pad(rows, (0, 0, extra, 0)),
        F.pad(k, (0, 0, extra, 0)),
        torch.cat((F.pad(means, (0, 0, 0, extra - m)), v), 2),
        F.pad(phi_q.to(q.dtype), (0, 0, extra, 0)),
        torch.cat((F.pad(one_hot, (0, 0, 0, extra - m)), phi_k.to(q.dtype)), 2),
        F.pad(log_q, (extra, 0)),
        torch.cat((F.pad(log_mass, (0, extra - m), value=-torch.inf), log_k), 2),
        window=window,
        is_causal=True,
    )[:, :, extra:]
    if equal:
        return y[:, :, start:]
    token = torch.arange(T, device=q.device)
    y = take_positions(y, (token + first - skip).clamp_min(0))
    return y.masked_fill((token < skip)[:, None, :, None], 0)  # Padding before a sequence sees no key.


def attend_token(
    attention: Any,
    state: WindowedAttentionState,
    q: Tensor,  # (N, H, 1, d), scaled
    k: Tensor,  # (N, heads of keys, 1, d)
    v: Tensor,  # (N, heads of keys, 1, E)
    key_mask: Tensor | None,  # (N, 1)
) -> tuple[Tensor, WindowedAttentionState]:
    """Return the output of one token and the state after it. All samples have a first key already."""
    window = attention.window
    fills = fills_of(state.positions, window)
    sums, units, keys, values, is_key = state[:5]
    if window in fills:  # A block is full.
        shifts = tuple(window if fill == window else 0 for fill in fills)
        chunk = Extended(keys, values, is_key, (), (), 0)
        sums, units, keys, values, is_key = _moved(attention, state, chunk, shifts)
        fills = tuple(fill % window for fill in fills)
    k, v = without_masked(k, v, key_mask)
    slots = tuple(window + fill for fill in fills)
    slot = slots[0] if len(set(slots)) == 1 else _column(slots, k)
    takes_part = torch.ones_like(is_key[:, :1]) if key_mask is None else key_mask
    keys, values = _written(keys, slot, k, 2), _written(values, slot, v, 2)
    is_key = _written(is_key, slot, takes_part, 1)
    with no_autocast(q.device):
        dtype = sums.dtype
        groups = (*keys.shape[:2], -1, q.shape[-1])  # Query heads that share a head of keys are rows of one product.
        scores = q.to(dtype).reshape(groups) @ keys.to(dtype).mT  # (N, heads of keys, group, 2 window)
        scores = scores.masked_fill(~is_key[:, None, None], -torch.inf)
        phi_q, log_q = attention.query_features(q)
        far = phi_q.to(q.dtype).to(dtype) @ sums  # (N, H, 1, E + 1)
        has_keys = ~(far[..., -1:] < torch.finfo(dtype).tiny)
        shift = (log_q[..., None] + units[..., None]).masked_fill(~has_keys, -torch.inf)
        near = scores.detach().amax(-1).reshape(shift.shape)
        largest = torch.maximum(near, shift.detach() + far[..., -1:].detach().masked_fill(~has_keys, 1).log())
        fixed = largest.masked_fill(largest == -torch.inf, 0)
        weights = (scores - fixed.reshape(*scores.shape[:-1], 1)).exp()
        far = (shift - fixed).exp() * far.masked_fill(~has_keys, 0)
        numerator = (weights @ values.to(dtype)).reshape(*far.shape[:-1], -1) + far[..., :-1]
        denominator = weights.sum(-1).reshape(shift.shape) + far[..., -1:]
        y = (numerator / denominator.masked_fill(largest == -torch.inf, 1)).to(v.dtype)
    positions = tuple(position + 1 for position in state.positions)
    return y, WindowedAttentionState(sums, units, keys, values, is_key, positions, state.length + 1, state.feature_map)


def _moved(
    attention: Any, state: WindowedAttentionState, chunk: Extended, shifts: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Move the window of each sample forward by a number of positions, and return the parts of the new state."""
    window = attention.window
    size, sums, units = 2 * window, state.sums, state.units
    if count := max(shifts, default=0):
        keys, values = (of_query_heads(x[:, :, :count], attention.num_heads) for x in (chunk.keys, chunk.values))
        is_far = chunk.is_key[:, :count]
        if min(shifts) < count:
            is_far = is_far & (torch.arange(count, device=keys.device) < _column(shifts, keys))
        sums, units = _absorbed(attention, keys, values, is_far, sums, units)
    n = chunk.is_key.shape[1]
    if len(set(shifts)) <= 1:
        stop = min(count + size, n)
        padding = size - (stop - count)
        window_keys, window_values = (
            F.pad(x[:, :, count:stop], (0, 0, 0, padding)) for x in (chunk.keys, chunk.values)
        )
        return sums, units, window_keys, window_values, F.pad(chunk.is_key[:, count:stop], (0, padding))
    source = torch.arange(size, device=state.sums.device) + _column(shifts, state.sums)
    exists, source = source < n, source.clamp_max(n - 1)
    window_keys, window_values = take_positions(chunk.keys, source), take_positions(chunk.values, source)
    return sums, units, window_keys, window_values, chunk.is_key.gather(1, source) & exists


def _absorbed(
    attention: Any, keys: Tensor, values: Tensor, is_far: Tensor, sums: Tensor, units: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sums and their units after keys and values (N, H, n, X) with the mask ``is_far`` (N, n)."""
    phi_k, log_k = attention.key_features(keys)
    log_k = log_k.masked_fill(~is_far[:, None], -torch.inf)
    sums, new_units = absorb_keys(phi_k.to(keys.dtype), values, log_k, sums, units)
    assert new_units is not None
    return sums, new_units


def attend_shard(
    attention: Any,
    shards: Any,
    q: Tensor,  # (N, H, n, d), scaled
    k: Tensor,  # (N, heads of keys, n, d)
    v: Tensor,  # (N, heads of keys, n, E)
) -> Tensor:  # (N, H, n, E)
    """Return the outputs of one of the equal shards of a sequence, which the ranks of ``shards`` hold in order.

    A rank receives the keys and values of its window that earlier ranks hold, and the sums over all keys before them.
    """
    window, n = attention.window, k.shape[2]
    shards.check(k)
    # For each rank and one more: the first position of its shard in the current block, and how many it needs from
    # before, the previous block included.
    firsts = [rank * n for rank in range(shards.size + 1)]
    needed = [min(first, window + first % window) for first in firsts]
    if max(needed[:-1]) > n:
        raise ShapeError(
            f"shards of {n} positions are too short: with window={window} a rank needs up to {max(needed[:-1])} "
            f"positions of the previous rank: use at most {shards.size * n // (2 * window) or 1} ranks, or "
            "a smaller window"
        )
    first, here, after = firsts[shards.rank], needed[shards.rank], needed[shards.rank + 1]
    rows = torch.cat((k, v), -1)[:, :, n - min(after, n) :].movedim(2, 0)
    previous_rows = shards.from_previous(rows.contiguous(), here).movedim(0, 2)
    start = window + first % window  # of the shard, counted from the previous block
    padding = start - here  # before the sequence
    keys, values = (
        F.pad(torch.cat((part, x), 2), (0, 0, padding, 0))
        for part, x in zip(previous_rows.split((k.shape[-1], v.shape[-1]), -1), (k, v), strict=True)
    )
    is_key = torch.arange(start + n, device=k.device).expand(len(k), -1) >= padding
    chunk = Extended(keys, values, is_key, (start,) * len(k), (0,) * len(k), n)
    empty = empty_state(len(k), attention.num_heads, attention.num_features, window, k, v)
    count = ((first + n) // window - first // window) * window  # positions before the window of the next rank
    sums, units = empty.sums, empty.units
    if count:
        far_keys, far_values = (of_query_heads(x[:, :, :count], attention.num_heads) for x in (keys, values))
        sums, units = _absorbed(attention, far_keys, far_values, is_key[:, :count], sums, units)
    # Every rank takes part in the exchange of gradients, also if none of its keys is far. This adds 0.
    sums, units = shards.sums_before(sums + k[..., :0].sum(), units)
    return attend_chunk(attention, empty._replace(sums=sums, units=units), chunk, q)


def _written(x: Tensor, slot: int | Tensor, token: Tensor, dim: int) -> Tensor:
    """Return a copy of ``x`` with the token at one position, or at a position of each sample."""
    if isinstance(slot, int):
        x = x.clone()
        x.narrow(dim, slot, 1).copy_(token)
        return x
    index = slot.view(-1, *[1] * (x.dim() - 1)).expand(token.shape)
    return x.scatter(dim, index, token)


def _leading_padding(positions: tuple[int, ...], key_mask: Tensor | None, tokens: int) -> tuple[int, ...]:
    """Return the number of tokens before the first key of each sample that has no position yet."""
    if key_mask is None or all(positions) or not tokens:
        return (0,) * len(positions)
    first = torch.where(key_mask.any(-1), key_mask.int().argmax(-1), tokens).tolist()
    return tuple(0 if position else count for position, count in zip(positions, first, strict=True))


def _block(position: int, window: int) -> int:
    """Return the current block of a sample that has this number of positions."""
    return max(0, position - 1) // window


def _column(numbers: tuple[int, ...], like: Tensor) -> Tensor:  # (N, 1)
    return torch.tensor(numbers, device=like.device)[:, None]


def take_positions(x: Tensor, source: Tensor) -> Tensor:  # (N, H, n, X), (N or 1, n') -> (N, H, n', X)
    """Return the positions of ``x`` that ``source`` names for each sample."""
    index = source[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3])
    return x.gather(2, index)


def of_query_heads(x: Tensor, num_heads: int) -> Tensor:  # (*, heads of keys, n, X) -> (*, num_heads, n, X)
    """Return keys or values of each query head; several heads may share a head of keys."""
    return x if x.shape[-3] == num_heads else x.repeat_interleave(num_heads // x.shape[-3], -3)


def without_masked(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values (N, heads of keys, n, X) with zeros where the mask (N, n) is False: they may be NaN."""
    if key_mask is None:
        return k, v
    left_out = ~key_mask[:, None, :, None]
    return k.masked_fill(left_out, 0), v.masked_fill(left_out, 0)

r"""Causal linear attention by chunks, parallel over them: states, their scan, outputs; and backward, the same reversed.

Forward, :math:`y_i = num_i / den_i` with :math:`num_i = \sum_{j \le i} e^{c_j - r_i} (q_i \cdot k_j) v_j` and r the
running maximum of c. Backward, with :math:`\nu_i = dy_i / den_i` and :math:`\delta_i = -(dy_i \cdot y_i) / den_i`,

.. math::
    dq_i &= \sum_{j \le i} e^{c_j - r_i} (\nu_i \cdot v_j + \delta_i) k_j \\
    dk_j &= \sum_{i \ge j} e^{c_j - r_i} (\nu_i \cdot v_j + \delta_i) q_i \\
    dv_j &= \sum_{i \ge j} e^{c_j - r_i} (q_i \cdot k_j) \nu_i

and :math:`dc_j = k_j \cdot dk_j`. All four are one kernel, ``_attend_kernel``: rows score columns, and scores take
values, within a chunk; other chunks enter through a state, D x E and D more for the denominator.
"""

__all__ = ["backward_plan", "forward_plan"]

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import INTERPRETED, cdiv, dot_operand, dot_precision, has_warpgroups, next_power_of_2
from ._launch import Launch
from ._runtime import current_target

_CHUNK = 64  # rows of the smallest chunk, a multiple of the rows of any tile
_SCAN_BLOCK = 256


@triton.jit
def _subtrahend(r):
    """Return r with 0 instead of -inf, so that it can be subtracted from -inf."""
    return tl.where(r == float("-inf"), 0.0, r)


@triton.jit
def _adjoint_kernel(
    grad, y, den, scaled_grad, delta, rows,
    E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return nu and delta, from which backward is computed: 0 in rows that attended to nothing."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    inside = start + row < rows
    d = tl.load(den + start + row, mask=inside, other=0.0)
    empty = d == 0
    d = tl.where(empty, 1.0, d)
    dot = tl.zeros((ROWS,), tl.float32)
    for e0 in range(0, E, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        offsets = row[:, None] * E + e[None, :]
        mask = inside[:, None] & (e < E)[None, :]
        g = tl.load(grad + start * E + offsets, mask=mask, other=0.0).to(tl.float32)
        dot += tl.sum(g * tl.load(y + start * E + offsets, mask=mask, other=0.0).to(tl.float32), 1)
        nu = tl.where(empty[:, None], 0.0, g / d[:, None])
        tl.store(scaled_grad + start * E + offsets, nu.to(scaled_grad.dtype.element_ty), mask=mask)
    tl.store(delta + start + row, tl.where(empty, 0.0, -dot / d), mask=inside)


@triton.jit
def _states_kernel(
    left, right, extra, c, r, states, n, chunks,
    D: tl.constexpr, E: tl.constexpr, SUFFIX: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum left_i (right_i | extra_i) over a chunk, and store the sums with the next chunk that needs them.

    The next chunk is the following one, or the preceding one if SUFFIX. An inclusive scan then completes the states. No
    chunk needs the sums over the last chunk, so the program of the last chunk writes the zeros of the first.
    """
    batch = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    start = chunk * CHUNK
    stop = tl.minimum(start + CHUNK, n)
    if SUFFIX:
        last = chunk == 0
        target = tl.where(last, chunks - 1, chunk - 1)
    else:
        last = chunk == chunks - 1
        target = tl.where(last, 0, chunk + 1)
    if SCALED:  # The sums are scaled by the maximum before the chunk (SUFFIX) or at its end.
        edge = tl.load(r + batch * n + (tl.maximum(start, 1) if SUFFIX else stop) - 1)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.arange(0, ROWS)
    outer = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    column = tl.zeros((BLOCK_D,), tl.float32)
    for i0 in range(start, tl.where(last, start, stop), ROWS):
        i = batch * n + i0
        inside = i0 + row < stop
        weight = inside.to(tl.float32)
        if SCALED:
            scale = tl.load(c + i + row, mask=inside, other=float("-inf"))
            if SUFFIX:
                weight = tl.exp(edge - _subtrahend(tl.load(r + i + row, mask=inside, other=float("inf"))))
            else:
                weight = tl.exp(scale - _subtrahend(edge))
                inside = inside & (scale > float("-inf"))  # Masked keys have no influence, even if they are NaN.
        a = tl.load(left + i * D + row[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        b = tl.load(right + i * E + row[:, None] * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
        a = dot_operand(a)
        b = dot_operand(b)
        summand = a.to(tl.float32)
        if SCALED:
            summand = summand * weight[:, None]
        if SUFFIX:
            column += tl.sum(summand * tl.load(extra + i + row, mask=inside, other=0.0)[:, None], 0)
        else:
            column += tl.sum(summand, 0)
        if SCALED:
            a = summand.to(b.dtype)
        outer = tl.dot(tl.trans(a.to(b.dtype)), b, outer, input_precision=PRECISION)
    out = states + (batch * chunks + target) * (D * E + D)
    tl.store(out + d[:, None] * E + e[None, :], outer, mask=(d < D)[:, None] & (e < E)[None, :])
    if tl.program_id(2) == 0:
        tl.store(out + D * E + d, column, mask=d < D)


@triton.jit
def _scan_kernel(
    states, r, n, chunks, width,
    SUFFIX: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the states by their running sums over chunks, from the last chunk on if SUFFIX."""
    blocks = tl.cdiv(width, BLOCK)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    entry = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < width
    total = tl.zeros((BLOCK,), tl.float32)
    scale = float("inf") if SUFFIX else float("-inf")
    for step in tl.range(0, chunks, num_stages=4):
        chunk = chunks - 1 - step if SUFFIX else step
        state = states + (batch * chunks + chunk) * width + entry
        if SCALED:  # A state has the scale of the maximum at the end of its chunk (SUFFIX) or before it.
            if SUFFIX:
                new = tl.load(r + batch * n + tl.minimum((chunk + 1) * CHUNK, n) - 1)
                total *= tl.exp(new - _subtrahend(scale))
            else:
                new = tl.load(r + batch * n + tl.maximum(chunk * CHUNK, 1) - 1, mask=chunk > 0, other=float("-inf"))
                total *= tl.exp(scale - _subtrahend(new))
            scale = new
        total += tl.load(state, mask=inside, other=0.0)
        tl.store(state, total, mask=inside)


@triton.jit
def _attend_kernel(
    left, right, value, delta, keys, c, r, states, out, side, n, chunks,
    D: tl.constexpr, E: tl.constexpr, SUFFIX: tl.constexpr, TRANSPOSED: tl.constexpr, SCALED: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Sum ``value`` weighted by products of rows of ``left`` and ``right``, up to each row, or from it on if SUFFIX.

    =========  ======  ==========  =====  =====  =====  ===  ====
    result     SUFFIX  TRANSPOSED  left   right  value  keys  side
    =========  ======  ==========  =====  =====  =====  ===  ====
    y          no      no          q      k      v            den
    dv         yes     no          k      q      nu
    dq         no      yes         nu     v      k
    dk         yes     yes         v      nu     q      k     dc, one part for each block of D
    =========  ======  ==========  =====  =====  =====  ===  ====

    TRANSPOSED transposes the states, (D, E) and D more for the denominator, and adds delta to the scores.
    """
    IN: tl.constexpr = E if TRANSPOSED else D
    OUT: tl.constexpr = D if TRANSPOSED else E
    STATE_IN: tl.constexpr = 1 if TRANSPOSED else E
    STATE_OUT: tl.constexpr = E if TRANSPOSED else 1
    tiles = tl.cdiv(n, ROWS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    x0 = (tl.program_id(0) % tiles) * ROWS
    chunk = x0 // CHUNK
    state = states + (batch * chunks + chunk) * (D * E + D)
    first = batch * n
    step = tl.arange(0, ROWS)
    x = x0 + step
    take_x = x < n
    if SCALED:
        if SUFFIX:  # The rows are keys.
            scale_x = tl.load(c + first + x, mask=take_x, other=float("-inf"))
            take_x = take_x & (scale_x > float("-inf"))
            edge = tl.load(r + first + tl.minimum((chunk + 1) * CHUNK, n) - 1)
            weight = tl.exp(scale_x - _subtrahend(edge))
        else:
            scale_x = _subtrahend(tl.load(r + first + x, mask=take_x, other=float("inf")))
            edge = tl.load(r + first + tl.maximum(chunk * CHUNK, 1) - 1)  # unused for the first chunk
            weight = tl.exp(tl.where(chunk > 0, edge - scale_x, float("-inf")))
    o = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    left_x = left + (first + x0) * IN + step[:, None] * IN

    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    den = tl.zeros((ROWS,), tl.float32)
    for i0 in range(0, IN, BLOCK_IN):
        i = i0 + tl.arange(0, BLOCK_IN)
        a = dot_operand(tl.load(left_x + i[None, :], mask=take_x[:, None] & (i < IN)[None, :], other=0.0))
        s = tl.load(
            state + i[:, None] * STATE_IN + o[None, :] * STATE_OUT,
            mask=(i < IN)[:, None] & (o < OUT)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(a.to(INNER), s.to(INNER), total, input_precision=PRECISION)
        if not SUFFIX and not TRANSPOSED:
            den += tl.sum(a.to(tl.float32) * tl.load(state + D * E + i, mask=i < IN, other=0.0)[None, :], 1)
    if TRANSPOSED:
        z = tl.load(state + D * E + o, mask=o < OUT, other=0.0)[None, :]
        if not SUFFIX:
            delta_x = tl.load(delta + first + x, mask=take_x, other=0.0)
            z = delta_x[:, None] * z
        total += z
    if SCALED:
        total *= weight[:, None]
        den *= weight

    low = x0 if SUFFIX else chunk * CHUNK
    high = tl.minimum((chunk + 1) * CHUNK, n) if SUFFIX else x0 + ROWS
    for y0 in range(low, high, ROWS):
        y = y0 + step
        take_y = y < n
        keep = take_y[None, :] & (x[:, None] <= y[None, :] if SUFFIX else x[:, None] >= y[None, :])
        if SCALED:
            if SUFFIX:
                scale_y = _subtrahend(tl.load(r + first + y, mask=take_y, other=0.0))
                exponent = scale_x[:, None] - scale_y[None, :]
            else:
                scale_y = tl.load(c + first + y, mask=take_y, other=float("-inf"))
                take_y = take_y & (scale_y > float("-inf"))
                exponent = scale_y[None, :] - scale_x[:, None]
            factor = tl.exp(tl.where(keep, exponent, float("-inf")))
        scores = tl.zeros((ROWS, ROWS), tl.float32)
        right_y = right + (first + y0) * IN + step[:, None] * IN
        for i0 in range(0, IN, BLOCK_IN):
            i = i0 + tl.arange(0, BLOCK_IN)
            a = dot_operand(tl.load(left_x + i[None, :], mask=take_x[:, None] & (i < IN)[None, :], other=0.0))
            b = dot_operand(tl.load(right_y + i[None, :], mask=take_y[:, None] & (i < IN)[None, :], other=0.0))
            if TRANSPOSED:  # Either a or b is nu.
                a = a.to(INNER)
                b = b.to(INNER)
            scores = tl.dot(a, tl.trans(b), scores, input_precision=PRECISION)
        if TRANSPOSED:
            if SUFFIX:
                scores += tl.load(delta + first + y, mask=take_y, other=0.0)[None, :]
            else:
                scores += delta_x[:, None]
        if SCALED:
            scores *= factor
        scores = tl.where(keep, scores, 0.0)  # The mask comes last: a masked score may be infinite.
        if not SUFFIX and not TRANSPOSED:
            den += tl.sum(scores, 1)
        value_y = value + (first + y0) * OUT + step[:, None] * OUT + o[None, :]
        w = dot_operand(tl.load(value_y, mask=take_y[:, None] & (o < OUT)[None, :], other=0.0))
        if not SUFFIX and not TRANSPOSED:  # noqa: SIM102  decided when it is compiled
            if y0 == x0:  # A score of 0 times a value that is not finite would be NaN.
                w = tl.where(w * 0.0 == 0.0, w, 0.0)
        total = tl.dot(scores.to(INNER), w.to(INNER), total, input_precision=PRECISION)

    mask = (x < n)[:, None] & (o < OUT)[None, :]
    here = (first + x0) * OUT + step[:, None] * OUT + o[None, :]
    if not TRANSPOSED and not SUFFIX:
        if SCALED:
            take_x = take_x & (tl.load(c + first + x, mask=take_x, other=0.0) > float("-inf"))
        w = tl.load(value + here, mask=take_x[:, None] & (o < OUT)[None, :], other=0.0).to(tl.float32)
        total += tl.cumsum(w * 0.0, 0)  # This carries values that are not finite to the later rows.
        empty = (den == 0)[:, None]
        total = tl.where(empty, 0.0, total / tl.where(empty, 1.0, den[:, None]))
        if tl.program_id(1) == 0:
            tl.store(side + first + x, den, mask=x < n)
    if TRANSPOSED and SUFFIX and SCALED:
        k = tl.load(keys + here, mask=mask & take_x[:, None], other=0.0).to(tl.float32)
        rows = (tl.num_programs(0) // tiles).to(tl.int64) * n
        tl.store(side + tl.program_id(1) * rows + first + x, tl.sum(k * total, 1), mask=x < n)
    tl.store(out + here, total.to(out.dtype.element_ty), mask=mask)


Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor | None]
]


def forward_plan(q: Tensor, k: Tensor, v: Tensor, c: Tensor | None) -> Forward:
    """Return the function that computes the output and the denominator, in units of e to the running maximum of c.

    It takes operands of these shapes, strides and dtypes. D and E are at most 256.
    """
    (*batch, n, D), E = q.shape, v.shape[-1]
    entries = math.prod(batch)
    y_shape, den_shape = v.shape, q.shape[:-1]
    if not entries or not n:
        return lambda q, k, v, c: (v.new_empty(y_shape), q.new_empty(den_shape, dtype=torch.float32))
    scaled = c is not None
    sum_states = _states_plan(q, entries, n, D, E, scaled)
    attend = _attend_plan(q, entries, n, D, E, scaled)
    ready = _are_ready(q, k, v) and (c is None or _are_ready(c, dtype=torch.float32))

    def forward(q: Tensor, k: Tensor, v: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
        if not ready:
            q, k, v, c = q.contiguous(), k.contiguous(), v.contiguous(), _exponents(c)
        y, den = v.new_empty(y_shape), q.new_empty(den_shape, dtype=torch.float32)
        r = None if c is None else c.cummax(-1).values  # the running maximum
        attend(q, k, v, None, None, c, r, sum_states(k, v, None, c, r), y, den)
        return y, den

    return forward


def backward_plan(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, y: Tensor, den: Tensor) -> Backward:
    """Return the function of operands of these shapes, strides and dtypes that computes the gradients of q, k, v and c.

    States are recomputed: saving them would take as much memory as the inputs.
    """
    (*batch, n, D), E = q.shape, v.shape[-1]
    entries = math.prod(batch)
    q_shape, v_shape, rows_shape, nu_dtype = q.shape, v.shape, q.shape[:-1], _inner(v)
    parts_shape = cdiv(D, _tiles(k, E, D).columns), *rows_shape
    if not entries or not n:

        def nothing(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, *_: Tensor) -> Any:
            return *(x.new_empty(x.shape) for x in (q, k, v)), None if c is None else c.new_empty(rows_shape)

        return nothing
    scaled, rows = c is not None, 32
    adjoint = Launch(
        _adjoint_kernel, (cdiv(entries * n, rows),), entries * n, E=E, ROWS=rows, BLOCK=min(64, _padded(E))
    )
    sum_keys, sum_queries = (_states_plan(q, entries, n, D, E, scaled, suffix=suffix) for suffix in (False, True))
    attend_dq = _attend_plan(q, entries, n, D, E, scaled, transposed=True)
    attend_dk = _attend_plan(q, entries, n, D, E, scaled, transposed=True, suffix=True)
    attend_dv = _attend_plan(q, entries, n, D, E, scaled, suffix=True)
    ready = _are_ready(q, k, v, y, den) and _are_ready(grad, dtype=v.dtype)
    ready = ready and (c is None or _are_ready(c, dtype=torch.float32))

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, c: Tensor | None, y: Tensor, den: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if not ready:
            grad, c = grad.to(v.dtype).contiguous(), _exponents(c)
            q, k, v, y, den = (x.contiguous() for x in (q, k, v, y, den))
        dq, dk, dv = q.new_empty(q_shape), q.new_empty(q_shape), q.new_empty(v_shape)
        nu, delta = q.new_empty(v_shape, dtype=nu_dtype), den.new_empty(rows_shape)
        parts = r = None
        if c is not None:
            r, parts = c.cummax(-1).values, den.new_empty(parts_shape)
        adjoint(grad, y, den, nu, delta)
        attend_dq(nu, v, k, delta, None, c, r, sum_keys(k, v, None, c, r), dq, None)
        states = sum_queries(q, nu, delta, c, r)
        attend_dk(v, nu, q, delta, k, c, r, states, dk, parts)
        attend_dv(k, q, nu, None, None, c, r, states, dv, None)
        return dq, dk, dv, None if parts is None else parts.sum(0)

    return backward


def _are_ready(*operands: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether a kernel can read the operands, which must be contiguous, in the dtype that is given."""
    return all(x.is_contiguous() and dtype in (None, x.dtype) for x in operands)


def _exponents(c: Tensor | None) -> Tensor | None:
    return None if c is None else c.to(torch.float32).contiguous()


def _states_plan(
    like: Tensor, batch: int, n: int, D: int, E: int, scaled: bool, *, suffix: bool = False
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]:
    """Return the function of left, right, extra, c and r that computes the states (batch, chunks, D E + D)."""
    chunk = _chunk(like, D, E)
    chunks, width = cdiv(n, chunk), D * E + D
    tile = _state_tiles(like, D, E)
    sum_chunks = Launch(
        _states_kernel, (batch * chunks, cdiv(D, tile.inner), cdiv(E, tile.columns)), n, chunks,
        D=D, E=E, SUFFIX=suffix, SCALED=scaled, PRECISION=dot_precision(like.dtype),
        CHUNK=chunk, ROWS=tile.rows, BLOCK_D=tile.inner, BLOCK_E=tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    scan = None
    if chunks > 2:  # With one or two chunks the states are complete.
        scan = Launch(
            _scan_kernel, (batch * cdiv(width, _SCAN_BLOCK),), n, chunks, width,
            SUFFIX=suffix, SCALED=scaled, CHUNK=chunk, BLOCK=_SCAN_BLOCK, num_warps=2,
        )  # fmt: skip

    def sum_states(left: Tensor, right: Tensor, extra: Tensor | None, c: Tensor | None, r: Tensor | None) -> Tensor:
        states = left.new_empty((batch, chunks, width), dtype=torch.float32)
        sum_chunks(left, right, extra, c, r, states)
        if scan is not None:
            scan(states, r)
        return states

    return sum_states


def _attend_plan(
    like: Tensor, batch: int, n: int, D: int, E: int, scaled: bool, *, suffix: bool = False, transposed: bool = False
) -> Launch:
    """Return the launch of ``_attend_kernel`` on left, right, value, delta, keys, c, r, states, out and side."""
    inner, outer = (E, D) if transposed else (D, E)
    tile, chunk = _tiles(like, inner, outer), _chunk(like, D, E)
    return Launch(
        _attend_kernel, (batch * cdiv(n, tile.rows), cdiv(outer, tile.columns)), n, cdiv(n, chunk),
        D=D, E=E, SUFFIX=suffix, TRANSPOSED=transposed, SCALED=scaled,
        INNER=_dtype(like), PRECISION=dot_precision(like.dtype),
        CHUNK=chunk, ROWS=tile.rows, BLOCK_IN=tile.inner, BLOCK_OUT=tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _chunk(x: Tensor, D: int, E: int) -> int:
    """Return the smallest multiple of 64, a power of two, with which states take no more memory than q, k and v."""
    chunk: int = max(_CHUNK, next_power_of_2(cdiv(4 * (D * E + D), (2 * D + E) * x.element_size())))
    return chunk


class _Tile(NamedTuple):
    rows: int
    inner: int  # entries of the summed dimension per step
    columns: int
    warps: int
    stages: int


def _tiles(x: Tensor, inner: int, outer: int) -> _Tile:
    """Return tiles that compile without spilling registers, for widths up to 256. Other tiles may be faster."""
    target = None if INTERPRETED.value else current_target()
    return _tiles_of(x.dtype, inner, outer, dot_precision(x.dtype), target)


def _state_tiles(x: Tensor, inner: int, outer: int) -> _Tile:
    """Return the tile of the sums of chunks, which have one product for each tile of rows."""
    tile = _tiles(x, inner, outer)
    # With eight warps Triton 3.9 spills two to twelve registers on sm_90.
    return tile._replace(warps=4) if dot_precision(x.dtype) == "tf32x3" and has_warpgroups() else tile


@functools.lru_cache(maxsize=1024)
def _tiles_of(dtype: torch.dtype, inner: int, outer: int, precision: str, target: Any) -> _Tile:
    ampere = target is not None and target.backend == "cuda" and target.arch < 90
    # Rows whose width is not a multiple of 16 bytes are loaded entry by entry, which takes registers for the addresses.
    aligned = inner % 16 == outer % 16 == 0
    light = aligned and max(inner, outer) <= 64 and dtype is not torch.float32
    tile = _Tile(rows=64, inner=64, columns=64 if aligned else 32, warps=4 if light else 8, stages=1)
    if precision == "tf32x3":  # Each operand takes two tiles. Taller or wider tiles spill with Triton 3.6.
        tile = _Tile(32, 32, 32, 8, 1)
    elif target is not None and target.backend == "hip":
        tile = tile._replace(rows=64 if aligned else 32)
    elif target is not None and not ampere:
        tile = tile._replace(columns=128 if aligned and precision == "ieee" else tile.columns, stages=2)
    return tile._replace(inner=min(tile.inner, _padded(inner)), columns=min(tile.columns, _padded(outer)))


def _padded(size: int) -> int:
    padded: int = max(16, next_power_of_2(size))
    return padded


def _inner(x: Tensor) -> torch.dtype:
    """Return the dtype of sums between two products: float32, or bfloat16, because float16 has too small a range."""
    return torch.float32 if x.dtype is torch.float32 or INTERPRETED.value else torch.bfloat16


def _dtype(x: Tensor) -> Any:
    """Return the dtype of sums between two products as Triton names it."""
    return tl.float32 if _inner(x) is torch.float32 else tl.bfloat16

r"""Attention exact in a window and linear beyond it, parallel over blocks: far sums, their scan, outputs; and backward.

A tile of rows lies in one block of ``WINDOW`` positions. It attends to the tiles of its block and of the neighbouring
blocks as flash attention does. Before, all keys outside of the window count as one key, their mean with the exponent
:math:`f_i = a_i + B + \log(\phi_{q,i} \cdot z)`. Backward, with p the weights, :math:`\delta_i = -dy_i \cdot y_i` and
:math:`g_i = e^{a_i + B - L_i}`, where L is the logarithm of the denominator,

.. math::
    ds_{ij} &= p_{ij} (dy_i \cdot v_j + \delta_i), \quad dq_i = \sum_j ds_{ij} k_j, \quad dk_j = \sum_i ds_{ij} q_i \\
    d\phi_{q,i} &= g_i (S dy_i + \delta_i z), \quad dv_j = \sum_i p_{ij} dy_i + e^{b_j - U} T^T \phi_{k,j} \\
    d\phi_{k,j} &= e^{b_j - U} (T v_j + t), \quad [T \mid t] = \sum_i e^{U - B_i} g_i \phi_{q,i} [dy_i \mid \delta_i].

States are (M, E) and M more for the denominator, and each block's state has an exponent.
"""

__all__ = ["backward_plan", "forward_plan"]

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import INTERPRETED, cdiv, dot_operand, dot_precision
from ._launch import Launch
from ._runtime import current_target
from .attention import _are_ready, _dtype, _exponents, _padded, _state_tiles, _subtrahend, _Tile, _tiles

_SCAN_BLOCK = 256
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _sums_kernel(
    left, right, extra, weight, exponents, sums, units, n, blocks,
    M: tl.constexpr, E: tl.constexpr, WINDOW: tl.constexpr, EXTRA: tl.constexpr,
    WEIGHTED: tl.constexpr, SCALED: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum weight_i left_i (right_i | extra_i) over a block; rows of weight 0 have no influence, NaN or not.

    The weights are e^{b_i - u} of the exponents b if SCALED, with the block's largest b as u. Without SCALED and
    WEIGHTED all weights are 1.
    """
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * WINDOW
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.arange(0, ROWS)
    outer = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    column = tl.zeros((BLOCK_M,), tl.float32)
    stop = tl.minimum(start + WINDOW, n)
    if SCALED:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        for i0 in range(start, stop, ROWS):
            i = i0 + row
            largest = tl.maximum(largest, tl.load(exponents + batch * n + i, mask=i < stop, other=float("-inf")))
        unit = tl.max(largest, 0)
        if tl.program_id(1) + tl.program_id(2) == 0:
            tl.store(units + tl.program_id(0), unit)
        unit = _subtrahend(unit)
    for i0 in range(start, stop, ROWS):
        i = batch * n + i0
        inside = i0 + row < stop
        if WEIGHTED:
            w = tl.load(weight + i + row, mask=inside, other=0.0)
        elif SCALED:
            w = tl.exp(tl.load(exponents + i + row, mask=inside, other=float("-inf")) - unit)
        if WEIGHTED or SCALED:
            inside = inside & (w != 0.0)
        a = tl.load(left + i * M + row[:, None] * M + m[None, :], mask=inside[:, None] & (m < M)[None, :], other=0.0)
        b = tl.load(right + i * E + row[:, None] * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
        a = a.to(tl.float32)
        if WEIGHTED or SCALED:
            a = a * w[:, None]
        if EXTRA:
            column += tl.sum(a * tl.load(extra + i + row, mask=inside, other=0.0)[:, None], 0)
        else:
            column += tl.sum(a, 0)
        outer = tl.dot(tl.trans(a.to(INNER)), dot_operand(b).to(INNER), outer, input_precision=PRECISION)
    out = sums + (batch * blocks + tl.program_id(0) % blocks) * (M * E + M)
    tl.store(out + m[:, None] * E + e[None, :], outer, mask=(m < M)[:, None] & (e < E)[None, :])
    if tl.program_id(2) == 0:
        tl.store(out + M * E + m, column, mask=m < M)


@triton.jit
def _scan_kernel(
    sums, states, units, before, state_units, blocks, width,
    REVERSE: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, NEGATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum for each block over the blocks at least two before it, or two after if REVERSE. ADD adds to the states.

    Sums have the exponents ``units``, or the negative exponents if NEGATE, or 0 without SCALED. States have the largest
    exponent of their summands. ADD reads the exponents of the states so far from ``before``.
    """
    tiles = tl.cdiv(width, BLOCK)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    entry = tile * BLOCK + tl.arange(0, BLOCK)
    inside = entry < width
    total = tl.zeros((BLOCK,), tl.float32)
    last = tl.zeros((BLOCK,), tl.float32)  # the sums of the previous block, and of the block before it
    second_last = tl.zeros((BLOCK,), tl.float32)
    largest = float("-inf")
    last_unit = float("-inf")
    second_last_unit = float("-inf")
    for step in range(0, blocks):
        t = batch * blocks + (blocks - 1 - step if REVERSE else step)
        new = tl.load(sums + t * width + entry, mask=inside, other=0.0)
        previous = largest
        largest = tl.maximum(previous, second_last_unit)
        unit = _subtrahend(largest)
        total = total * tl.exp(previous - unit) + second_last * tl.exp(second_last_unit - unit)
        out = total
        state_unit = largest
        if ADD:
            unit_before = tl.load(before + t)
            state_unit = tl.maximum(largest, unit_before)
            unit = _subtrahend(state_unit)
            state = tl.load(states + t * width + entry, mask=inside, other=0.0)
            out = state * tl.exp(unit_before - unit) + total * tl.exp(largest - unit)
        tl.store(states + t * width + entry, out, mask=inside)
        if tile == 0:
            tl.store(state_units + t, state_unit)
        second_last = last
        last = new
        second_last_unit = last_unit
        if SCALED:
            last_unit = tl.load(units + t)
            if NEGATE:
                last_unit = tl.where(last_unit == float("-inf"), last_unit, -last_unit)
        else:
            last_unit = 0.0


@triton.jit
def _neighbours(block, tile, blocks, KEYS: tl.constexpr, CAUSAL: tl.constexpr, TILES: tl.constexpr):
    """Return the range of tiles to attend to, counted from the first tile of the previous block."""
    start = tl.where(block == 0, TILES, 0)
    stop = tl.where(block == blocks - 1, 2 * TILES, 3 * TILES)
    if CAUSAL:
        if KEYS:
            start = TILES + tile
        else:
            stop = TILES + tile + 1
    return start, stop


@triton.jit
def _scores(
    left, right, left_row, right_row, take_left, take_right, scores,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add all products of rows of two operands."""
    for i0 in range(0, WIDTH, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        mask = (i < WIDTH)[None, :]
        a = tl.load(left + left_row[:, None] * WIDTH + i[None, :], mask=take_left[:, None] & mask, other=0.0)
        b = tl.load(right + right_row[:, None] * WIDTH + i[None, :], mask=take_right[:, None] & mask, other=0.0)
        scores = tl.dot(dot_operand(a), tl.trans(dot_operand(b)), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _forward_kernel(
    q, k, v, phi_q, a, b, states, units, y, log_den, n, blocks,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    FAR: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    tile = tl.program_id(0) % TILES
    block = (tl.program_id(0) // TILES) % blocks
    batch = (tl.program_id(0) // TILES // blocks).to(tl.int64)
    first = batch * n
    step_row = tl.arange(0, ROWS)
    x = block * WINDOW + tile * ROWS + step_row
    take_x = (tile * ROWS + step_row < WINDOW) & (x < n)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BLOCK_E), tl.float32)
    if FAR:
        state = states + (batch * blocks + block) * (M * E + M)
        for i0 in range(0, M, BLOCK_M):
            i = i0 + tl.arange(0, BLOCK_M)
            phi = tl.load(
                phi_q + first * M + x[:, None] * M + i[None, :], mask=take_x[:, None] & (i < M)[None, :], other=0.0
            )
            s = tl.load(state + i[:, None] * E + e[None, :], mask=(i < M)[:, None] & (e < E)[None, :], other=0.0)
            total = tl.dot(dot_operand(phi).to(INNER), s.to(INNER), total, input_precision=PRECISION)
            weight += tl.sum(phi.to(tl.float32) * tl.load(state + M * E + i, mask=i < M, other=0.0)[None, :], 1)
        few = weight < _TINY
        weight = tl.where(few, 1.0, weight)
        largest = tl.load(units + batch * blocks + block) + tl.log(weight)
        if SCALED:
            largest += tl.load(a + first + x, mask=take_x, other=0.0)
        few = few | (largest == float("-inf"))
        largest = tl.where(few, float("-inf"), largest)
        total = tl.where(few[:, None], 0.0, total / weight[:, None])
        weight = tl.where(few, 0.0, 1.0)

    start, stop = _neighbours(block, tile, blocks, False, CAUSAL, TILES)
    for step in range(start, stop):
        y_block = block - 1 + step // TILES
        inside = (step % TILES) * ROWS + step_row
        z = y_block * WINDOW + inside
        take_z = (inside < WINDOW) & (z < n)
        if MASKED:  # Masked keys have no influence, even if they are NaN.
            take_z = take_z & (tl.load(b + first + z, mask=take_z, other=float("-inf")) > float("-inf"))
        keep = take_x[:, None] & take_z[None, :]
        if CAUSAL:
            keep = keep & (x[:, None] >= z[None, :])
        scores = tl.zeros((ROWS, ROWS), tl.float32)
        scores = _scores(q + first * D, k + first * D, x, z, take_x, take_z, scores, D, PRECISION, BLOCK_D)
        scores = tl.where(keep, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        fixed = _subtrahend(new)
        decay = tl.exp(largest - fixed)
        p = tl.exp(scores - fixed[:, None])
        weight = weight * decay + tl.sum(p, 1)
        w = dot_operand(
            tl.load(v + first * E + z[:, None] * E + e[None, :], mask=take_z[:, None] & (e < E)[None, :], other=0.0)
        )
        if CAUSAL:  # noqa: SIM102  decided when it is compiled
            if step == TILES + tile:  # A weight of 0 times a value that is not finite would be NaN.
                w = tl.where(w * 0.0 == 0.0, w, 0.0)
        total = tl.dot(p.to(INNER), w.to(INNER), total * decay[:, None], input_precision=PRECISION)
        largest = new

    mask = take_x[:, None] & (e < E)[None, :]
    here = first * E + x[:, None] * E + e[None, :]
    if CAUSAL:
        take = take_x
        if MASKED:
            take = take & (tl.load(b + first + x, mask=take_x, other=float("-inf")) > float("-inf"))
        w = tl.load(v + here, mask=mask & take[:, None], other=0.0).to(tl.float32)
        total += tl.cumsum(w * 0.0, 0)  # This carries values that are not finite to the later rows.
    empty = largest == float("-inf")
    weight = tl.where(empty, 1.0, weight)
    total = tl.where(empty[:, None], 0.0, total / weight[:, None])
    tl.store(y + here, total.to(y.dtype.element_ty), mask=mask)
    if tl.program_id(1) == 0:
        tl.store(log_den + first + x, largest + tl.log(weight), mask=take_x)


@triton.jit
def _rows_kernel(
    grad, y, log_den, phi_q, a, states, units, delta, factor, n, blocks,
    E: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, FAR: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return delta and g, from which backward is computed: g is 0 if no key outside of the window has a weight."""
    TILES: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    tile = tl.program_id(0) % TILES
    block = (tl.program_id(0) // TILES) % blocks
    batch = (tl.program_id(0) // TILES // blocks).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    x = batch * n + block * WINDOW + row
    take = (row < WINDOW) & (block * WINDOW + row < n)
    dot = tl.zeros((ROWS,), tl.float32)
    for e0 in range(0, E, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        mask = take[:, None] & (e < E)[None, :]
        g = tl.load(grad + x[:, None] * E + e[None, :], mask=mask, other=0.0).to(tl.float32)
        dot += tl.sum(g * tl.load(y + x[:, None] * E + e[None, :], mask=mask, other=0.0).to(tl.float32), 1)
    tl.store(delta + x, -dot, mask=take)
    if FAR:
        z = states + (batch * blocks + block) * (M * E + M) + M * E
        den = tl.zeros((ROWS,), tl.float32)
        for m0 in range(0, M, BLOCK):
            m = m0 + tl.arange(0, BLOCK)
            phi = tl.load(phi_q + x[:, None] * M + m[None, :], mask=take[:, None] & (m < M)[None, :], other=0.0)
            den += tl.sum(phi.to(tl.float32) * tl.load(z + m, mask=m < M, other=0.0)[None, :], 1)
        exponent = tl.load(units + batch * blocks + block) - _subtrahend(tl.load(log_den + x, mask=take, other=0.0))
        if SCALED:
            exponent += tl.load(a + x, mask=take, other=0.0)
        tl.store(factor + x, tl.where(den < _TINY, 0.0, tl.exp(tl.where(den < _TINY, 0.0, exponent))), mask=take)


@triton.jit
def _near_gradient_kernel(
    q, k, v, grad, value, delta, log_den, b, phi, units, states, out, n, blocks,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    KEYS: tl.constexpr, WEIGHTS: tl.constexpr, FAR: tl.constexpr, MASKED: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """Sum ``value`` over near positions: weighted by p if WEIGHTS, else by ds; rows are keys if KEYS.

    ======  ====  =======  =====  =====
    result  KEYS  WEIGHTS  value  also
    ======  ====  =======  =====  =====
    dq      no    no       k
    dk      yes   no       q
    dv      yes   yes      dy     the far queries' share, e^{b - U} T^T phi
    ======  ====  =======  =====  =====
    """
    OUT: tl.constexpr = E if WEIGHTS else D
    TILES: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    tile = tl.program_id(0) % TILES
    block = (tl.program_id(0) // TILES) % blocks
    batch = (tl.program_id(0) // TILES // blocks).to(tl.int64)
    first = batch * n
    step_row = tl.arange(0, ROWS)
    x = block * WINDOW + tile * ROWS + step_row
    inside_x = (tile * ROWS + step_row < WINDOW) & (x < n)
    take_x = inside_x
    if KEYS:
        if MASKED:
            take_x = take_x & (tl.load(b + first + x, mask=take_x, other=float("-inf")) > float("-inf"))
    else:
        shift_x = _subtrahend(tl.load(log_den + first + x, mask=take_x, other=0.0))
        delta_x = tl.load(delta + first + x, mask=take_x, other=0.0)
    o = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    total = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    if FAR:
        state = states + (batch * blocks + block) * (M * E + M)
        for i0 in range(0, M, BLOCK_M):
            i = i0 + tl.arange(0, BLOCK_M)
            f = tl.load(
                phi + first * M + x[:, None] * M + i[None, :], mask=take_x[:, None] & (i < M)[None, :], other=0.0
            )
            s = tl.load(state + i[:, None] * E + o[None, :], mask=(i < M)[:, None] & (o < E)[None, :], other=0.0)
            total = tl.dot(dot_operand(f).to(INNER), s.to(INNER), total, input_precision=PRECISION)
        exponent = tl.load(units + batch * blocks + block) + tl.zeros((ROWS,), tl.float32)
        if MASKED:
            exponent += tl.load(b + first + x, mask=take_x, other=float("-inf"))
        total *= tl.exp(exponent)[:, None]

    start, stop = _neighbours(block, tile, blocks, KEYS, CAUSAL, TILES)
    for step in range(start, stop):
        y_block = block - 1 + step // TILES
        inside = (step % TILES) * ROWS + step_row
        z = y_block * WINDOW + inside
        take_z = (inside < WINDOW) & (z < n)
        scores = tl.zeros((ROWS, ROWS), tl.float32)
        if KEYS:
            scores = _scores(k + first * D, q + first * D, x, z, take_x, take_z, scores, D, PRECISION, BLOCK_D)
            scores -= _subtrahend(tl.load(log_den + first + z, mask=take_z, other=0.0))[None, :]
        else:
            if MASKED:
                take_z = take_z & (tl.load(b + first + z, mask=take_z, other=float("-inf")) > float("-inf"))
            scores = _scores(q + first * D, k + first * D, x, z, take_x, take_z, scores, D, PRECISION, BLOCK_D)
            scores -= shift_x[:, None]
        keep = take_x[:, None] & take_z[None, :]
        if CAUSAL:
            keep = keep & (x[:, None] <= z[None, :] if KEYS else x[:, None] >= z[None, :])
        p = tl.exp(tl.where(keep, scores, float("-inf")))
        if not WEIGHTS:
            ds = tl.zeros((ROWS, ROWS), tl.float32)
            if KEYS:
                ds = _scores(v + first * E, grad + first * E, x, z, take_x, take_z, ds, E, PRECISION, BLOCK_E)
                ds += tl.load(delta + first + z, mask=take_z, other=0.0)[None, :]
            else:
                ds = _scores(grad + first * E, v + first * E, x, z, take_x, take_z, ds, E, PRECISION, BLOCK_E)
                ds += delta_x[:, None]
            p = tl.where(keep, p * ds, 0.0)  # A later value may have overflowed.
        w = tl.load(
            value + first * OUT + z[:, None] * OUT + o[None, :], mask=take_z[:, None] & (o < OUT)[None, :], other=0.0
        )
        total = tl.dot(p.to(INNER), dot_operand(w).to(INNER), total, input_precision=PRECISION)
    tl.store(
        out + first * OUT + x[:, None] * OUT + o[None, :], total.to(out.dtype.element_ty),
        mask=inside_x[:, None] & (o < OUT)[None, :],
    )  # fmt: skip


@triton.jit
def _feature_gradient_kernel(
    left, extra, factor, b, units, phi, states, out, side, n, blocks,
    E: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, EXTRA: tl.constexpr, SIDE: tl.constexpr,
    SCALED: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return factor (state left + extra z), and in parts the gradient of the exponent, its product with ``phi``.

    Without EXTRA the factor is e^{b - U}, with the exponent -U of the block's state, and b only if SCALED.
    """
    TILES: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    tile = tl.program_id(0) % TILES
    block = (tl.program_id(0) // TILES) % blocks
    batch = (tl.program_id(0) // TILES // blocks).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    x = batch * n + block * WINDOW + row
    inside = (row < WINDOW) & (block * WINDOW + row < n)
    if EXTRA:
        scale = tl.load(factor + x, mask=inside, other=0.0)
    else:
        exponent = tl.load(units + batch * blocks + block) + tl.zeros((ROWS,), tl.float32)
        if SCALED:
            exponent += tl.load(b + x, mask=inside, other=float("-inf"))
        scale = tl.exp(exponent)
    take = inside & (scale != 0.0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    state = states + (batch * blocks + block) * (M * E + M)
    z = tl.load(state + M * E + m, mask=m < M, other=0.0)[None, :]
    if EXTRA:
        total = tl.load(extra + x, mask=take, other=0.0)[:, None] * z
    else:
        total = tl.zeros((ROWS, BLOCK_M), tl.float32) + z
    for e0 in range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        a = tl.load(left + x[:, None] * E + e[None, :], mask=take[:, None] & (e < E)[None, :], other=0.0)
        s = tl.load(state + m[None, :] * E + e[:, None], mask=(m < M)[None, :] & (e < E)[:, None], other=0.0)
        total = tl.dot(dot_operand(a).to(INNER), s.to(INNER), total, input_precision=PRECISION)
    total = tl.where(take[:, None], total * scale[:, None], 0.0)
    here = x[:, None] * M + m[None, :]
    mask = inside[:, None] & (m < M)[None, :]
    tl.store(out + here, total.to(out.dtype.element_ty), mask=mask)
    if SIDE:
        f = tl.load(phi + here, mask=mask & take[:, None], other=0.0).to(tl.float32)
        rows = (tl.num_programs(0) // TILES // blocks).to(tl.int64) * n
        tl.store(side + tl.program_id(1) * rows + x, tl.sum(f * total, 1), mask=inside)


Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor | None, ...]]


class _Sizes(NamedTuple):
    """The sizes of a call: entries of the batch, positions, widths, positions in a block, and blocks."""

    batch: int
    n: int
    D: int
    E: int
    M: int
    window: int
    blocks: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor, phi_q: Tensor, window: int) -> "_Sizes":
        (*batch, n, D), E, M = q.shape, v.shape[-1], phi_q.shape[-1]
        window = max(1, min(window, n))
        return cls(math.prod(batch), n, D, E, M, window, cdiv(n, window))


def forward_plan(
    q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, a: Tensor | None, b: Tensor | None,
    window: int, causal: bool,
) -> Forward:  # fmt: skip
    """Return the function that computes the output and the logarithm of the denominator. D, E and M are at most 256.

    It takes the operands, which have these shapes, strides and dtypes.
    """
    sizes, y_shape, rows_shape = _Sizes.of(q, v, phi_q, window), v.shape, q.shape[:-1]
    ready = _are_ready(q, k, v, phi_q, phi_k) and _are_ready(*_present(a, b), dtype=torch.float32)
    far = attend = None
    if sizes.batch and sizes.n:
        far = _far_plan(phi_k, sizes, causal, scaled=b is not None)
        tile = _near_shape(q, sizes.window, max(sizes.D, sizes.M), sizes.E, gradient=False)
        attend = Launch(
            _forward_kernel, _grid(sizes, tile, sizes.E), sizes.n, sizes.blocks,
            SCALED=a is not None, **_near_settings(q, sizes, causal, b, tile), FAR=far is not None,
            BLOCK_E=min(tile.columns, _padded(sizes.E)), **_options(tile),
        )  # fmt: skip

    def forward(
        q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, a: Tensor | None, b: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, log_den = v.new_empty(y_shape), q.new_empty(rows_shape, dtype=torch.float32)
        if attend is None:
            return y, log_den
        if not ready:
            q, k, v, phi_q, phi_k = (x.contiguous() for x in (q, k, v, phi_q, phi_k))
            a, b = _exponents(a), _exponents(b)
        states, units = (None, None) if far is None else far(phi_k, v, b)
        attend(q, k, v, phi_q, a, b, states, units, y, log_den)
        return y, log_den

    return forward


def backward_plan(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, a: Tensor | None, b: Tensor | None,
    y: Tensor, log_den: Tensor, window: int, causal: bool,
) -> Backward:  # fmt: skip
    """Return the function of such operands that computes their gradients; it computes states and scores again."""
    sizes = _Sizes.of(q, v, phi_q, window)
    if not sizes.batch or not sizes.n:
        return lambda grad, *operands: tuple(None if x is None else torch.empty_like(x) for x in operands[:7])
    ready = _are_ready(q, k, v, phi_q, phi_k, y, log_den) and _are_ready(grad, dtype=v.dtype)
    ready = ready and _are_ready(*_present(a, b), dtype=torch.float32)
    shapes = q.shape, k.shape, v.shape, phi_q.shape, phi_k.shape
    far = _far_plan(phi_k, sizes, causal, scaled=b is not None)
    tile = _shape(q, sizes.window, sizes.E, sizes.M)
    adjoint = Launch(
        _rows_kernel, _grid(sizes, tile), sizes.n, sizes.blocks, E=sizes.E, M=sizes.M, WINDOW=sizes.window,
        FAR=far is not None, SCALED=a is not None, ROWS=tile.rows, BLOCK=min(64, _padded(max(sizes.E, sizes.M))),
    )  # fmt: skip
    if far is not None:
        sum_queries = _sums_plan(phi_q, sizes, weighted=True)
        scan_queries = _scan_plan(sizes, causal, reverse=True, scaled=b is not None, negate=True)
        of_queries = _feature_gradient_plan(q, sizes, extra=True, side=a is not None, scaled=False)
        of_keys = _feature_gradient_plan(q, sizes, extra=False, side=b is not None, scaled=b is not None)
    near = []
    for width, keys, weights in ((sizes.D, False, False), (sizes.D, True, False), (sizes.E, True, True)):
        tile = _near_shape(q, sizes.window, max(sizes.D, sizes.E), width, gradient=True)
        near.append(
            Launch(
                _near_gradient_kernel, _grid(sizes, tile, width), sizes.n, sizes.blocks,
                KEYS=keys, WEIGHTS=weights, **_near_settings(q, sizes, causal, b, tile),
                FAR=weights and far is not None, BLOCK_E=min(tile.inner, _padded(sizes.E)), BLOCK_OUT=tile.columns,
                **_options(tile),
            )
        )  # fmt: skip

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, phi_q: Tensor, phi_k: Tensor, a: Tensor | None,
        b: Tensor | None, y: Tensor, log_den: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if not ready:
            grad = grad.to(v.dtype).contiguous()
            q, k, v, phi_q, phi_k, y, log_den = (x.contiguous() for x in (q, k, v, phi_q, phi_k, y, log_den))
            a, b = _exponents(a), _exponents(b)
        dq, dk, dv, dphi_q, dphi_k = [q.new_empty(shape) for shape in shapes]
        delta, factor = torch.empty_like(log_den), torch.empty_like(log_den)
        states, units = (None, None) if far is None else far(phi_k, v, b)
        adjoint(grad, y, log_den, phi_q, a, states, units, delta, factor)
        da = db = reached = None
        if far is None:
            dphi_q.zero_()
            dphi_k.zero_()
            da, db = (None if x is None else torch.zeros_like(x) for x in (a, b))
        else:
            da = of_queries(grad, delta, factor, None, None, phi_q, states, dphi_q)
            # The sums over queries have the form of the sums over keys, in the opposite direction and with the units
            # -B.
            sums, _ = sum_queries(phi_q, grad, delta, factor, None)
            reached, units = scan_queries(sums, units)
            db = of_keys(v, None, None, b, units, phi_k, reached, dphi_k)
        for launch, value, out in zip(near, (k, q, grad), (dq, dk, dv), strict=True):
            launch(q, k, v, grad, value, delta, log_den, b, phi_k, units, reached, out)
        return dq, dk, dv, dphi_q, dphi_k, da, db

    return backward


def _present(*operands: Tensor | None) -> list[Tensor]:
    return [x for x in operands if x is not None]


def _far_plan(
    like: Tensor, sizes: _Sizes, causal: bool, *, scaled: bool
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]] | None:
    """Return the function of phi_k, v and b that computes the states of the keys outside of each block's window.

    It returns the states (batch, blocks, M E + M) and their exponents (batch, blocks). With two blocks there are none.
    """
    if sizes.blocks <= 2:
        return None
    sum_keys = _sums_plan(like, sizes, scaled=scaled)
    scan_keys = _scan_plan(sizes, causal, scaled=scaled)

    def far(phi_k: Tensor, v: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        return scan_keys(*sum_keys(phi_k, v, None, None, b))

    return far


def _sums_plan(
    like: Tensor, sizes: _Sizes, *, weighted: bool = False, scaled: bool = False
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the function of left, right, extra, weight and b that computes the sums of blocks and their exponents."""
    batch, n, _, E, M, window, blocks = sizes
    tile = _of_window(_state_tiles(like, M, E), window)
    launch = Launch(
        _sums_kernel, (batch * blocks, cdiv(M, tile.inner), cdiv(E, tile.columns)), n, blocks,
        M=M, E=E, WINDOW=window, EXTRA=weighted, WEIGHTED=weighted, SCALED=scaled,
        INNER=_dtype(like), PRECISION=dot_precision(like.dtype), ROWS=tile.rows, BLOCK_M=tile.inner,
        BLOCK_E=tile.columns, **_options(tile),
    )  # fmt: skip

    def sums(
        left: Tensor, right: Tensor, extra: Tensor | None, weight: Tensor | None, b: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        sums = left.new_empty((batch, blocks, M * E + M), dtype=torch.float32)
        units = sums.new_empty(batch, blocks) if scaled else None
        launch(left, right, extra, weight, b, sums, units)
        return sums, units

    return sums


def _scan_plan(
    sizes: _Sizes, causal: bool, *, scaled: bool, reverse: bool = False, negate: bool = False
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """Return the function of the sums and exponents of blocks that sums over the blocks not next to each block.

    It returns these states and their exponents. In causal attention the blocks before count, or after if ``reverse``.
    """
    batch, blocks, width = sizes.batch, sizes.blocks, sizes.M * sizes.E + sizes.M
    launches = [
        Launch(
            _scan_kernel, (batch * cdiv(width, _SCAN_BLOCK),), blocks, width,
            REVERSE=backward, ADD=i > 0, SCALED=scaled, NEGATE=negate, BLOCK=_SCAN_BLOCK, num_warps=2,
        )
        for i, backward in enumerate((reverse,) if causal else (False, True))
    ]  # fmt: skip

    def scan(sums: Tensor, units: Tensor | None) -> tuple[Tensor, Tensor]:
        states = sums if causal else torch.empty_like(sums)
        before = None
        for launch in launches:
            state_units = sums.new_empty(batch, blocks)
            launch(sums, states, units, before, state_units)
            before = state_units
        return states, state_units

    return scan


def _feature_gradient_plan(
    like: Tensor, sizes: _Sizes, *, extra: bool, side: bool, scaled: bool
) -> Callable[..., Tensor | None]:
    """Return the function that writes the gradient of features, and returns that of the exponents if ``side``.

    Its arguments are left, extra, factor, b, units, phi, states and out.
    """
    batch, n, _, E, M, window, blocks = sizes
    tile = _shape(like, window, E, M)
    parts = cdiv(M, tile.columns)
    launch = Launch(
        _feature_gradient_kernel, _grid(sizes, tile, M), n, blocks, E=E, M=M, WINDOW=window,
        EXTRA=extra, SIDE=side, SCALED=scaled, INNER=_dtype(like), PRECISION=dot_precision(like.dtype),
        ROWS=tile.rows, BLOCK_E=tile.inner, BLOCK_M=tile.columns, **_options(tile),
    )  # fmt: skip

    def gradient(
        left: Tensor, extra: Tensor | None, factor: Tensor | None, b: Tensor | None, units: Tensor | None, phi: Tensor,
        states: Tensor, out: Tensor,
    ) -> Tensor | None:  # fmt: skip
        exponents = states.new_empty(parts, batch, n) if side else None
        launch(left, extra, factor, b, units, phi, states, out, exponents)
        return exponents if exponents is None or parts == 1 else exponents.sum(0)

    return gradient


def _shape(x: Tensor, window: int, inner: int, outer: int) -> _Tile:
    """Return the tile of causal linear attention, with no more rows than a window."""
    return _of_window(_tiles(x, inner, outer), window)


def _of_window(tile: _Tile, window: int) -> _Tile:
    return tile._replace(rows=min(tile.rows, _padded(window)))


def _near_shape(x: Tensor, window: int, inner: int, outer: int, *, gradient: bool) -> _Tile:
    """Return a tile for scores of near positions, or for the two products of rows that gradients of scores need.

    The tiles for one product would spill registers here. The sizes come from compiling for several GPUs.
    """
    tile = _shape(x, window, inner, outer)
    if INTERPRETED.value:
        return tile
    target = current_target()
    hopper = target.backend == "cuda" and target.arch >= 90
    if gradient and x.dtype is torch.float32 and (not hopper or inner > 128):
        tile = tile._replace(rows=min(tile.rows, 32), inner=min(tile.inner, 32))
        if target.backend == "hip":
            tile = tile._replace(columns=min(tile.columns, 32))
    if target.backend == "cuda" and not hopper:
        tile = tile._replace(warps=8, rows=tile.rows if gradient or inner <= 64 else min(tile.rows, 32))
    return tile


def _grid(sizes: _Sizes, tile: _Tile, columns: int = 1) -> tuple[int, int]:
    return sizes.batch * sizes.blocks * cdiv(sizes.window, tile.rows), cdiv(columns, tile.columns)


def _near_settings(like: Tensor, sizes: _Sizes, causal: bool, b: Tensor | None, tile: _Tile) -> dict[str, Any]:
    return {
        "D": sizes.D, "E": sizes.E, "M": sizes.M, "WINDOW": sizes.window, "CAUSAL": causal, "MASKED": b is not None,
        "INNER": _dtype(like), "PRECISION": dot_precision(like.dtype), "ROWS": tile.rows,
        "BLOCK_D": min(tile.inner, _padded(sizes.D)), "BLOCK_M": min(tile.inner, _padded(sizes.M)),
    }  # fmt: skip


def _options(tile: _Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}

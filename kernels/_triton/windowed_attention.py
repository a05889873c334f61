r"""Attention exact in a window and linear beyond it, parallel over blocks: far sums, their scan, outputs; and backward.

A tile of rows lies in one block of ``WINDOW`` positions. It attends to the tiles of its block and of the neighbouring
blocks as flash attention does. Before, all keys outside of the window count as one key, their mean with the exponent
:math:`f_i = a_i + B + \log(\phi_{q,i} \cdot z)`. Backward, with p the weights, :math:`\delta_i = -dy_i \cdot y_i` and
:math:`g_i = e^{a_i + B - L_i}`, where L is the logarithm of the denominator,

.. math::
    ds_{ij} &= p_{ij} (dy_i \cdot v_j + \delta_i), \quad dq_i = \sum_j ds_{ij} k_j, \quad dk_j = \sum_i ds_{ij} q_i \\
    d\phi_{q,i} &= g_i (S dy_i + \delta_i z), \quad dv_j = \sum_i p_{ij} dy_i + e^{b_j - U} T^T \phi_{k,j} \\
    d\phi_{k,j} &= e^{b_j - U} (T v_j + t), \quad [T \mid t] = \sum_i e^{U - B_i} g_i \phi_{q,i} [dy_i \mid \delta_i].

States are (M, E) and M more for the denominator. Their exponents are a few numbers a block, computed by torch.
"""

__all__ = ["windowed_backward", "windowed_forward"]

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.windowed_attention import _finite, _ratio, _running
from ._device import INTERPRETED, cdiv, dot_operand, dot_precision
from ._launch import launch
from ._runtime import current_target
from .attention import _inner, _padded, _subtrahend, _Tile, _tiles

_SCAN_BLOCK = 256
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _sums_kernel(
    left, right, extra, weight, sums, n, blocks,
    M: tl.constexpr, E: tl.constexpr, WINDOW: tl.constexpr, EXTRA: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum weight_i left_i (right_i | extra_i) over a block; rows of weight 0 have no influence, NaN or not."""
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * WINDOW
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.arange(0, ROWS)
    outer = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    column = tl.zeros((BLOCK_M,), tl.float32)
    stop = tl.minimum(start + WINDOW, n)
    for i0 in range(start, stop, ROWS):
        i = batch * n + i0
        inside = i0 + row < stop
        w = tl.load(weight + i + row, mask=inside, other=0.0)
        inside = inside & (w != 0.0)
        a = tl.load(left + i * M + row[:, None] * M + m[None, :], mask=inside[:, None] & (m < M)[None, :], other=0.0)
        b = tl.load(right + i * E + row[:, None] * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
        a = a.to(tl.float32) * w[:, None]
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
    sums, states, decay, gain, share, blocks, width,
    REVERSE: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum for each block over the blocks at least two before it, or two after if REVERSE. ADD adds to the states."""
    tiles = tl.cdiv(width, BLOCK)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    entry = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < width
    total = tl.zeros((BLOCK,), tl.float32)
    last = tl.zeros((BLOCK,), tl.float32)  # the sums of the previous block, and of the block before it
    second_last = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, blocks):
        t = batch * blocks + (blocks - 1 - step if REVERSE else step)
        new = tl.load(sums + t * width + entry, mask=inside, other=0.0)
        total = total * tl.load(decay + t) + second_last * tl.load(gain + t)
        out = total * tl.load(share + t)
        if ADD:
            out += tl.load(states + t * width + entry, mask=inside, other=0.0)
        tl.store(states + t * width + entry, out, mask=inside)
        second_last = last
        last = new


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
    q, k, v, grad, value, delta, log_den, b, phi, factor, states, out, n, blocks,
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
    dv      yes   yes      dy     the far queries' share, factor (T^T phi)
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
        total *= tl.load(factor + first + x, mask=take_x, other=0.0)[:, None]

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
    left, extra, factor, phi, states, out, side, n, blocks,
    E: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, EXTRA: tl.constexpr, SIDE: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return factor (state left + extra z), and in parts the gradient of the exponent, its product with ``phi``."""
    TILES: tl.constexpr = (WINDOW + ROWS - 1) // ROWS
    tile = tl.program_id(0) % TILES
    block = (tl.program_id(0) // TILES) % blocks
    batch = (tl.program_id(0) // TILES // blocks).to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)
    x = batch * n + block * WINDOW + row
    inside = (row < WINDOW) & (block * WINDOW + row < n)
    scale = tl.load(factor + x, mask=inside, other=0.0)
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


def windowed_forward(
    q: Tensor,  # (batch, n, D)
    k: Tensor,  # (batch, n, D)
    v: Tensor,  # (batch, n, E)
    phi_q: Tensor,  # (batch, n, M)
    phi_k: Tensor,  # (batch, n, M)
    a: Tensor | None,  # (batch, n), float32
    b: Tensor | None,  # (batch, n), float32
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # (batch, n, E), (batch, n)
    """Return output and logarithm of the denominator. D, E and M are at most 256."""
    y = torch.empty_like(v)
    log_den = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if log_den.numel() == 0:
        return y, log_den
    window = min(window, q.shape[1])
    states, units = _far(v, phi_k, b, window, causal)
    tile = _near_shape(q, window, max(q.shape[-1], phi_q.shape[-1]), v.shape[-1], gradient=False)
    launch(
        _forward_kernel, _grid(q, window, tile, v.shape[-1]), (q, k, v, phi_q, a, b, states, units, y, log_den),
        q.shape[1], cdiv(q.shape[1], window),
        SCALED=a is not None, **_near_settings(q, v, phi_q, window, causal, b, tile), FAR=states is not None,
        BLOCK_E=min(tile.columns, _padded(v.shape[-1])), **_options(tile),
    )  # fmt: skip
    return y, log_den


def windowed_backward(
    grad: Tensor,  # (batch, n, E)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    y: Tensor,  # (batch, n, E)
    log_den: Tensor,  # (batch, n)
    window: int,
    causal: bool,
) -> tuple[Tensor | None, ...]:
    """Return gradients of the seven operands; recompute states and scores."""
    (_, n, D), E, M = q.shape, v.shape[-1], phi_q.shape[-1]
    dq, dk, dv, dphi_q, dphi_k = (torch.empty_like(x) for x in (q, k, v, phi_q, phi_k))
    if log_den.numel() == 0:
        return dq, dk, dv, dphi_q, dphi_k, *(None if x is None else torch.empty_like(x) for x in (a, b))
    window = min(window, n)
    blocks = cdiv(n, window)
    states, units = _far(v, phi_k, b, window, causal)
    delta, g = torch.empty_like(log_den), torch.empty_like(log_den)
    tile = _shape(q, window, E, M)
    launch(
        _rows_kernel, _grid(q, window, tile), (grad, y, log_den, phi_q, a, states, units, delta, g),
        n, blocks, E=E, M=M, WINDOW=window,
        FAR=states is not None, SCALED=a is not None, ROWS=tile.rows, BLOCK=min(64, _padded(max(E, M))),
    )  # fmt: skip
    reached, factor, da, db = None, None, None, None
    if states is None or units is None:
        dphi_q.zero_()
        dphi_k.zero_()
        da, db = (None if x is None else torch.zeros_like(x) for x in (a, b))
    else:
        da = _feature_gradient(grad, delta, g, phi_q, states, dphi_q, window, side=a is not None)
        # The sums over queries have the form of the sums over keys, in the opposite direction and with the units -B.
        states = _sums(phi_q, grad, delta, g, window)
        reached, units = _scan(states, torch.where(units == -torch.inf, units, -units), causal, reverse=True)
        exponent = _by_row(units, window, n) if b is None else b + _by_row(units, window, n)
        factor = exponent.exp()
        db = _feature_gradient(v, None, factor, phi_k, reached, dphi_k, window, side=b is not None)
    for out, value, keys, weights in ((dq, k, False, False), (dk, q, True, False), (dv, grad, True, True)):
        width = value.shape[-1]
        tile = _near_shape(q, window, max(D, E), width, gradient=True)
        launch(
            _near_gradient_kernel, _grid(q, window, tile, width),
            (q, k, v, grad, value, delta, log_den, b, phi_k, factor, reached, out), n, blocks,
            KEYS=keys, WEIGHTS=weights, **_near_settings(q, v, phi_q, window, causal, b, tile),
            FAR=weights and reached is not None, BLOCK_E=min(tile.inner, _padded(E)), BLOCK_OUT=tile.columns,
            **_options(tile),
        )  # fmt: skip
    return dq, dk, dv, dphi_q, dphi_k, da, db


def _far(v: Tensor, phi_k: Tensor, b: Tensor | None, window: int, causal: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the states (batch, T, M E + M) of the keys outside of each block's window, and their units (batch, T)."""
    batch, n, _ = v.shape
    T = cdiv(n, window)
    if T <= 2:
        return None, None
    if b is None:
        units = torch.zeros(batch, T, dtype=torch.float32, device=v.device)
        weights = torch.ones(batch, n, dtype=torch.float32, device=v.device)
    else:
        padded = torch.nn.functional.pad(b, (0, -n % window), value=-torch.inf)
        units = padded.unflatten(-1, (T, window)).amax(-1)
        weights = (b - _by_row(_finite(units), window, n)).exp()
    return _scan(_sums(phi_k, v, None, weights, window), units, causal)


def _by_row(units: Tensor, window: int, n: int) -> Tensor:
    return units.repeat_interleave(window, -1)[:, :n].contiguous()


def _sums(left: Tensor, right: Tensor, extra: Tensor | None, weight: Tensor, window: int) -> Tensor:
    (batch, n, M), E = left.shape, right.shape[-1]
    T = cdiv(n, window)
    sums = torch.empty(batch, T, M * E + M, dtype=torch.float32, device=left.device)
    tile = _shape(left, window, M, E)
    launch(
        _sums_kernel, (batch * T, cdiv(M, tile.inner), cdiv(E, tile.columns)), (left, right, extra, weight, sums), n, T,
        M=M, E=E, WINDOW=window, EXTRA=extra is not None,
        INNER=_dtype(left), PRECISION=dot_precision(left.dtype), ROWS=tile.rows, BLOCK_M=tile.inner,
        BLOCK_E=tile.columns, **_options(tile),
    )  # fmt: skip
    return sums


def _scan(sums: Tensor, units: Tensor, causal: bool, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Return for each block the sums over the blocks not next to it, and their units: before, or after if reverse."""
    batch, T, width = sums.shape
    directions = (reverse,) if causal else (False, True)
    running = [_running(units.flip(-1)).flip(-1) if backward else _running(units) for backward in directions]
    both = running[0] if causal else torch.maximum(*running)
    states = sums if causal else torch.empty_like(sums)
    for i, backward in enumerate(directions):
        block_units, most = (x.flip(-1) if backward else x for x in (units, running[i]))
        decay = _ratio(torch.nn.functional.pad(most[:, :-1], (1, 0), value=-torch.inf), most)
        gain = _ratio(torch.nn.functional.pad(block_units[:, :-2], (2, 0), value=-torch.inf), most)
        decay, gain = (x.flip(-1).contiguous() if backward else x.contiguous() for x in (decay, gain))
        launch(
            _scan_kernel, (batch * cdiv(width, _SCAN_BLOCK),),
            (sums, states, decay, gain, _ratio(running[i], both).contiguous()), T, width,
            REVERSE=backward, ADD=i > 0, BLOCK=_SCAN_BLOCK, num_warps=2,
        )  # fmt: skip
    return states, both.contiguous()


def _feature_gradient(
    left: Tensor, extra: Tensor | None, factor: Tensor, phi: Tensor, states: Tensor, out: Tensor, window: int, *,
    side: bool,
) -> Tensor | None:  # fmt: skip
    """Fill ``out`` and return the gradient of the exponents, or None without ``side``."""
    (batch, n, E), M = left.shape, phi.shape[-1]
    tile = _shape(left, window, E, M)
    parts = torch.empty(cdiv(M, tile.columns), batch, n, dtype=torch.float32, device=left.device)
    launch(
        _feature_gradient_kernel, _grid(left, window, tile, M),
        (left, extra, factor, phi, states, out, parts if side else None), n, states.shape[1], E=E, M=M, WINDOW=window,
        EXTRA=extra is not None, SIDE=side, INNER=_dtype(left), PRECISION=dot_precision(left.dtype),
        ROWS=tile.rows, BLOCK_E=tile.inner, BLOCK_M=tile.columns, **_options(tile),
    )  # fmt: skip
    return parts.sum(0) if side else None


def _shape(x: Tensor, window: int, inner: int, outer: int) -> _Tile:
    """Return the tile of causal linear attention, with no more rows than a window."""
    tile = _tiles(x, inner, outer)
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


def _grid(x: Tensor, window: int, tile: _Tile, columns: int = 1) -> tuple[int, int]:
    blocks = cdiv(x.shape[1], window)
    return x.shape[0] * blocks * cdiv(window, tile.rows), cdiv(columns, tile.columns)


def _near_settings(
    q: Tensor, v: Tensor, phi: Tensor, window: int, causal: bool, b: Tensor | None, tile: _Tile
) -> dict[str, Any]:
    D, E, M = q.shape[-1], v.shape[-1], phi.shape[-1]
    return {
        "D": D, "E": E, "M": M, "WINDOW": window, "CAUSAL": causal, "MASKED": b is not None, "INNER": _dtype(q),
        "PRECISION": dot_precision(q.dtype), "ROWS": tile.rows, "BLOCK_D": min(tile.inner, _padded(D)),
        "BLOCK_M": min(tile.inner, _padded(M)),
    }  # fmt: skip


def _options(tile: _Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def _dtype(x: Tensor) -> Any:
    return tl.float32 if _inner(x) is torch.float32 else tl.bfloat16

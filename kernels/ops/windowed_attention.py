"""Attention that is exact in a window and linear beyond it, by torch on every device."""

__all__ = ["windowed_linear_attention"]

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..reference.windowed_attention import WindowedOperands, windowed_backward, windowed_forward
from .attention_operator import check_rows, define_attention
from .library import autocast, check_one_device, needs_torch

_NAME = "windowed_linear_attention"


def windowed_linear_attention(
    q: Tensor,  # (*batch, n, D)
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
    phi_q: Tensor,  # (*batch, n, m)
    phi_k: Tensor,  # (*batch, n, m)
    log_q: Tensor | None = None,  # (*batch, n)
    log_k: Tensor | None = None,  # (*batch, n)
    key_mask: Tensor | None = None,  # (*batch, n)
    *,
    window: int,
    is_causal: bool = False,
) -> Tensor:  # (*batch, n, E)
    r"""Compute attention that is exact among near positions and linear, through features, among far positions.

    .. math:: y_i = \frac{\sum_{j \in W_i} e^{q_i \cdot k_j} v_j
        + \sum_{j \notin W_i} e^{a_i + b_j} (\phi_{q,i} \cdot \phi_{k,j}) v_j}{\sum_{j \in W_i} e^{q_i \cdot k_j}
        + \sum_{j \notin W_i} e^{a_i + b_j} (\phi_{q,i} \cdot \phi_{k,j})},

    and 0 where there is no key. Positions fall into blocks of ``window``; :math:`W_i` is the block of i, the block
    before it and, if not causal, the block after it, so that a query sees from ``window`` to ``2 window`` positions
    back exactly. With ``is_causal`` both sums are over :math:`j \le i`. Features estimate
    :math:`e^{q_i \cdot k_j} \approx e^{a_i + b_j} (\phi_{q,i} \cdot \phi_{k,j})`: with equality this is softmax
    attention. Time is linear in n (the sum of an exact window and a linear remainder as in M. Zhang et al., "LoLCATs",
    ICLR 2025, arXiv:2410.10254).

    Exact and linear weights have a common maximum in each row, and exponents are used only as differences to the
    largest exponent so far, so that neither overflows. Keys outside of the window are summed by blocks from both ends,
    and never by subtraction. If causal, no bit of an output depends on later positions, even if they are NaN.

    Args:
        q: Queries, scaled so that :math:`q_i \cdot k_j` is the logit: by :math:`1 / \sqrt{D}` for usual attention.
        k: Keys.
        v: Values.
        phi_q: Features of the queries. Products of features must not be negative: a row attends to its window alone
            if the denominator over keys outside of the window is not positive.
        phi_k: Features of the keys.
        log_q: The exponents a, 0 if not given; best float32, for features of any dtype.
        log_k: The exponents b, 0 if not given. They weigh only features, but a key at -inf is masked in the window too.
        key_mask: True where a key takes part, as in torch. A masked key has no influence, neither by its logits nor
            by its features, even if they are NaN.
        window: Positions in a block, at least 1. States take little time and memory if it is at least 32.
        is_causal: Whether a query sees only the keys up to its own position.

    Returns:
        The output, contiguous, in the dtype of v. Half precision is summed in float32.

    Raises:
        ValueError: If shapes do not agree, the operands are on several devices, or the window is not positive.
        TypeError: If q, k, v and the features differ in dtype, an operand is not floating, or the mask is not boolean.

    Cost: about ``n (4 w (D + E) + 4 m E)`` flops for each batch entry with w = ``window``, ``n (6 w (D + E) + 4 m E)``
    if not causal; backward, 2.5 times that. States take ``n / w`` times m (E + 1) numbers. Under autograd the inputs,
    the output and one number per row are saved, and scores are computed again. Forward-mode, second and torch.func's
    derivatives are taken through torch's own operations.

    Example:
        >>> q = k = torch.zeros(4, 2)
        >>> v = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> phi = torch.ones(4, 1)
        >>> windowed_linear_attention(
        ...     q, k, v, phi, phi, window=1, is_causal=True
        ... ).squeeze(-1)
        tensor([0.0000, 0.5000, 1.0000, 1.5000])
        >>> # Without the first position.
        >>> log_k = torch.tensor([-torch.inf, 0.0, 0.0, 0.0])
        >>> windowed_linear_attention(
        ...     q, k, v, phi, phi, log_k=log_k, window=1, is_causal=True
        ... ).squeeze(-1)
        tensor([0.0000, 1.0000, 1.5000, 2.0000])
    """
    _check(WindowedOperands(q, k, v, phi_q, phi_k, log_q, log_k), key_mask, window)
    if key_mask is not None:
        keys = torch.zeros(key_mask.shape, device=q.device) if log_k is None else log_k
        log_k = keys.masked_fill(~key_mask, -torch.inf)
    q, k, v, phi_q, phi_k = autocast(q.device, q, k, v, phi_q, phi_k)  # The exponents stay in float32.
    if not torch.compiler.is_compiling() and needs_torch():
        return reference.windowed_linear_attention(q, k, v, phi_q, phi_k, log_q, log_k, window, is_causal)
    return _windowed_linear_attention(q, k, v, phi_q, phi_k, log_q, log_k, window, is_causal)[0]


def _check(all_operands: WindowedOperands, key_mask: Tensor | None, window: int) -> None:
    q, k, v, phi_q, phi_k, log_q, log_k = all_operands
    operands = {"q": q, "k": k, "v": v, "phi_q": phi_q, "phi_k": phi_k}
    fit = q.shape == k.shape and phi_q.shape == phi_k.shape and q.shape[:-1] == v.shape[:-1] == phi_q.shape[:-1]
    if min(x.ndim for x in operands.values()) < 2 or not fit:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())
        raise ValueError(
            f"{_NAME} takes q and k of shape (*batch, n, D), v of (*batch, n, E), and phi_q and phi_k of (*batch, n, "
            f"m), not {shapes}: expand the batch dimensions"
        )
    if len({x.dtype for x in operands.values()}) > 1 or not q.is_floating_point():
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in operands.items())
        raise TypeError(f"the operands of {_NAME} must have one floating dtype, not {dtypes}: cast them")
    optional_rows = (("log_q", log_q), ("log_k", log_k), ("key_mask", key_mask))
    rows = {name: x for name, x in optional_rows if x is not None}
    check_one_device(_NAME, operands | rows)
    check_rows(_NAME, rows, q.shape[:-1])
    if window < 1:
        raise ValueError(f"window of {_NAME} must be at least 1, not {window}: 64 is usual")


def _check_operator(*args: Any) -> None:
    _check(WindowedOperands(*args[:7]), None, args[7])


def _check_and_forward(*args: Any) -> tuple[Tensor, Tensor]:
    _check_operator(*args)
    y, log_den = windowed_forward(WindowedOperands(*args[:7]), *args[7:])
    return y.contiguous(), log_den.contiguous()


_windowed_linear_attention = define_attention(
    _NAME,
    "Tensor q, Tensor k, Tensor v, Tensor phi_q, Tensor phi_k, Tensor? log_q, Tensor? log_k",
    ", int window, bool causal",
    "log_den",
    check=_check_operator,
    forward=_check_and_forward,
    backward=lambda grad, *args: windowed_backward(grad, WindowedOperands(*args[:7]), *args[7:]),
    reference=reference.windowed_linear_attention,
)

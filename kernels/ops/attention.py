"""Causal linear attention, by Triton kernels on a GPU and by torch elsewhere."""

__all__ = ["causal_linear_attention"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._torch import is_plain_call
from ..reference.attention import attention_backward, attention_forward, attention_inference
from ..selection import runs_kernels, use_triton
from ._plans import Plans, plan_key
from .attention_operator import check_rows, define_attention
from .library import (
    KERNEL_DTYPES,
    autocast,
    check_one_device,
    is_autocasting,
    needs_torch,
    refused_dtype,
)

_NAME = "causal_linear_attention"
_WIDEST = 256
_WIDTHS = range(1, _WIDEST + 1)


def causal_linear_attention(
    q: Tensor,  # (*batch, n, D)
    k: Tensor,  # (*batch, n, D)
    v: Tensor,  # (*batch, n, E)
    log_scale: Tensor | None = None,  # (*batch, n)
) -> Tensor:  # (*batch, n, E)
    r"""Compute attention with inner products of features as weights; a position attends to itself and those before.

    .. math:: y_i = \frac{\sum_{j \le i} e^{c_j} (q_i \cdot k_j) v_j}{\sum_{j \le i} e^{c_j} (q_i \cdot k_j)},

    and 0 where the denominator is 0. The sums run over chunks of the sequence, with a state of D (E + 1) numbers
    between them, so that time and memory are linear in n (A. Katharopoulos et al., "Transformers are RNNs", ICML 2020,
    arXiv:2006.16236; the form by chunks as in S. Yang et al., "Gated linear attention transformers with
    hardware-efficient training", ICML 2024, arXiv:2312.06635).

    ``log_scale`` holds each key's own exponent c, where features are :math:`e^{c_j} k_j` and would overflow or vanish
    in one number. Only differences to the largest exponent so far are computed, so no bit of an output depends on
    later positions, not even on NaN.

    Args:
        q: Features of the queries, floating; as a rule not negative, so that no denominator is near 0 by cancellation.
        k: Features of the keys.
        v: Values.
        log_scale: The exponents c, 0 if not given; best float32, for features of any dtype. A key at -inf is masked:
            neither it nor its value has any influence, even if they are not finite.

    Returns:
        The output, contiguous, in the dtype of v. Half precision is summed in float32.

    Raises:
        ValueError: If shapes do not agree, or the operands are on several devices.
        TypeError: If q, k and v differ in dtype, or one of them is not floating.
        RuntimeError: If ``PANTHER_KERNELS=triton``, and the kernel does not take the operands: float64, or D or E not
            from 1 to 256.

    Cost: about ``n (4 D E + 128 (D + E))`` flops for each batch entry; backward, four times that. Under autograd the
    kernels keep the inputs, the output and the denominators; torch keeps scores too, ``64 n`` numbers. Forward-mode,
    second and torch.func's derivatives are taken by torch.

    Example:
        >>> q = k = torch.ones(3, 2)
        >>> v = torch.tensor([[0.0], [1.0], [2.0]])
        >>> causal_linear_attention(q, k, v).squeeze(-1)
        tensor([0.0000, 0.5000, 1.0000])
        >>> causal_linear_attention(
        ...     q, k, v, torch.tensor([-torch.inf, 0.0, 0.0])
        ... ).squeeze(-1)
        tensor([0.0000, 1.0000, 1.5000])
    """
    if _reaches_kernel(q, v):
        return _causal_linear_attention(q, k, v, log_scale)[0]
    _check(q, k, v, log_scale)
    q, k, v = autocast(q.device, q, k, v)  # The exponents stay in float32.
    # In a compiled graph the operator is one node for every length. torch's loop over chunks would be unrolled.
    # If torch differentiates the loop, it keeps the scores, which the operator would compute again.
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, log_scale))
    if not torch.compiler.is_compiling() and (
        needs_torch() or (not _uses_triton(q, k, v) and (differentiated or not q.is_cpu))
    ):
        return reference.causal_linear_attention(q, k, v, log_scale)
    return _causal_linear_attention(q, k, v, log_scale)[0]


def _reaches_kernel(q: Tensor, *operands: Tensor) -> bool:
    """Return whether a call goes to the Triton kernels without the operator, whose plans replace checks of operands.

    The width of each of these operands decides whether the kernels take it.
    """
    if torch.compiler.is_compiling() or not (runs_kernels(q) and is_plain_call()) or is_autocasting(q.device):
        return False
    for x in (q, *operands):
        if x.dim() < 2 or x.shape[-1] not in _WIDTHS:
            return False
    return q.dtype in KERNEL_DTYPES


def _check(q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor | None) -> None:
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape != k.shape or q.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{_NAME} takes q and k of shape (*batch, n, D) and v of (*batch, n, E), not {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}: expand the batch dimensions"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise TypeError(
            f"q, k and v of {_NAME} must have one floating dtype, not {q.dtype}, {k.dtype} and {v.dtype}: cast them"
        )
    rows = {} if log_scale is None else {"log_scale": log_scale}
    check_one_device(_NAME, {"q": q, "k": k, "v": v} | rows)
    check_rows(_NAME, rows, q.shape[:-1])


def _uses_triton(q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None) -> bool:
    """Return whether the Triton kernels take the operands."""
    D, E = q.shape[-1], v.shape[-1]
    refusal = refused_dtype(q.dtype)
    if refusal is None and not (1 <= D <= _WIDEST and 1 <= E <= _WIDEST):
        refusal = f"takes 1 to {_WIDEST} features and as many values, not D={D} and E={E}"
    return use_triton(_NAME, q.device, refusal)


# The plans of the Triton kernels.
_forward_plans: Plans[Callable[..., tuple[Tensor, Tensor]]] = Plans()
_backward_plans: Plans[Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]] = Plans()


def _forward(q: Tensor, k: Tensor, v: Tensor, log_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    operands = q, k, v, log_scale
    key = plan_key((), *operands) if runs_kernels(q) else None
    if key is not None and (plan := _forward_plans.get(key)) is not None:
        return plan(*operands)
    _check(*operands)
    if _uses_triton(*operands):
        from .._triton.attention import forward_plan

        plan = forward_plan(*operands)
        return (plan if key is None else _forward_plans.add(key, plan))(*operands)
    by_torch = attention_inference(q, k, v) if log_scale is None and q.is_cpu and q.numel() else None
    y, den = by_torch or attention_forward(*operands)
    return y.contiguous(), den.contiguous()


def _backward(*operands: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients from the gradient of the output, the operands and both results."""
    key = plan_key((), *operands) if runs_kernels(operands[0]) else None
    plan = None if key is None else _backward_plans.get(key)
    if plan is None and _uses_triton(*operands[1:4]):
        from .._triton.attention import backward_plan

        plan = backward_plan(*operands)
        if key is not None:
            _backward_plans.add(key, plan)
    return attention_backward(*operands) if plan is None else plan(*operands)


_causal_linear_attention = define_attention(
    _NAME,
    "Tensor q, Tensor k, Tensor v, Tensor? log_scale",
    "",
    "den",
    check=_check,
    forward=_forward,
    backward=_backward,
    reference=reference.causal_linear_attention,
)

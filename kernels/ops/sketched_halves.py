"""The sketched product in two halves, for layers that exchange its 2R inner numbers of a row between ranks."""

__all__ = ["sketched_inner", "sketched_outer"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..cpu import sketched as joined
from ..selection import runs_kernels, use_triton
from ._crossover import choose_path
from ._plans import Plans, plan_key
from .folded import folded_inner, folded_outer
from .library import KERNEL_DTYPES, check_one_device, define, needs_torch


def sketched_inner(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U2: Tensor,  # (in, R)
    scale: float = 1.0,
) -> Tensor:  # (rows, 2R)
    """Return ``scale x [S1 | U2]``, the first half of :func:`sketched_matmul`.

    Args:
        x: Input, two-dimensional.
        S1: Trained factor on the input side.
        U2: Sketch on the input side, dense, or the signs (in,) of a sparse one.
        scale: Multiplies the product; in half precision, before the product is rounded.

    Returns:
        A tensor of shape ``(rows, 2R)``.

    Raises:
        ValueError: If shapes do not fit together, or operands are on several devices; on the CPU torch's RuntimeError.
        RuntimeError: If ``PANTHER_KERNELS=triton`` and no Triton kernel takes the operands.

    Cost: ``4 R in`` flops a row, and 1.5 times that backward when U2 is fixed.

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_inner(ones, ones, ones, 0.5).shape
        torch.Size([2, 4])
    """
    if U2.dim() == 1:
        return folded_inner(x, S1, U2, scale)
    compiling = torch.compiler.is_compiling()
    if (x.is_cuda if compiling else use_triton("sketched_inner", x.device)) and (compiling or not needs_torch()):
        return _inner(x, S1, U2, scale)
    if compiling or needs_torch() or choose_path(len(x), S1.shape[1], triton=False) == "chain":
        return reference.sketched_inner(x, S1, U2, scale)
    inner: Tensor = joined.InnerProduct.apply(x, S1, U2, scale)  # type: ignore[no-untyped-call]
    return inner


def sketched_outer(
    inner: Tensor,  # (rows, 2R)
    U1: Tensor,  # (R, out)
    S2: Tensor,  # (R, out)
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (rows, out)
    """Return ``inner [U1 ; S2] + bias``, the second half of :func:`sketched_matmul`.

    Args:
        inner: Result of :func:`sketched_inner`, or its sum over ranks.
        U1: Sketch on the output side, dense, or the signs (out,) of a sparse one.
        S2: Trained factor on the output side.
        bias: Added to every row.

    Returns:
        A tensor of shape ``(rows, out)``.

    Raises:
        ValueError: If shapes do not fit together, or operands are on several devices; on the CPU torch's RuntimeError.
        RuntimeError: If ``PANTHER_KERNELS=triton`` and no Triton kernel takes the operands.

    Cost: ``4 R out`` flops a row, and 1.5 times that backward when U1 is fixed.

    Example:
        >>> sketched_outer(
        ...     torch.ones(3, 4), torch.ones(2, 5), torch.ones(2, 5)
        ... )[0]
        tensor([4., 4., 4., 4., 4.])
    """
    if U1.dim() == 1:
        return folded_outer(inner, U1, S2, bias)
    compiling = torch.compiler.is_compiling()
    if (inner.is_cuda if compiling else use_triton("sketched_outer", inner.device)) and (
        compiling or not needs_torch()
    ):
        return _outer(inner, U1, S2, bias)
    if compiling or needs_torch() or choose_path(len(inner), len(U1), triton=False) == "chain":
        return reference.sketched_outer(inner, U1, S2, bias)
    outer: Tensor = joined.OuterProduct.apply(inner, U1, S2, bias)  # type: ignore[no-untyped-call]
    return outer


def _uses_triton(name: str, x: Tensor, rank: int, *optional_operands: Tensor | None) -> bool:
    """Return whether the *pair* of Triton kernels takes the operands and would be chosen for the full product."""
    operands = [x, *(operand for operand in optional_operands if operand is not None)]
    refusal = None
    if x.dtype not in KERNEL_DTYPES or any(tensor.dtype is not x.dtype for tensor in operands):
        refusal = f"takes float32, float16 and bfloat16, all operands alike, not {[t.dtype for t in operands]}"
    if not use_triton(name, x.device, refusal) or any(0 in tensor.shape for tensor in operands):
        return False
    # The fused kernel cannot stop between the halves. From 4096 rows on, copying the factors into one matrix costs
    # little.
    return len(x) < 4096 and choose_path(len(x), rank, triton=True) == "pair"


def _check(name: str, fits: bool, **operands: Tensor) -> None:
    """Raise ValueError where the kernels would read beyond their operands."""
    if not fits:
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in operands.items())
        raise ValueError(f"{name} takes operands of the shapes that its documentation says, not {shapes}")
    check_one_device(name, operands)


def _inner_implementation(x: Tensor, S1: Tensor, U2: Tensor, scale: float) -> Tensor:
    if runs_kernels(x) and (plan := _inner_plans.get(plan_key(scale, x, S1, U2))) is not None:
        return plan(x, S1, U2)
    fits = x.dim() == S1.dim() == 2 and S1.shape == U2.shape and x.shape[1] == len(S1)
    _check("sketched_inner", fits, x=x, S1=S1, U2=U2)
    if _uses_triton("sketched_inner", x, S1.shape[1], S1, U2):
        from .._triton.sketched import is_addressable
        from .._triton.sketched_halves import pair_inner_plan

        x, S1, U2 = (A if is_addressable(A) else A.contiguous() for A in (x, S1, U2))
        return _inner_plans.add(plan_key(scale, x, S1, U2), pair_inner_plan(x, S1, U2, scale))(x, S1, U2)
    return joined.joined_inner(x, (S1, U2), scale)


def _outer_implementation(inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:
    if runs_kernels(inner) and (plan := _outer_plans.get(plan_key(1.0, inner, U1, S2, bias))) is not None:
        return plan(inner, U1, S2, bias)
    fits = inner.dim() == U1.dim() == 2 and U1.shape == S2.shape and inner.shape[1] == 2 * len(U1)
    operands = {"inner": inner, "U1": U1, "S2": S2} | ({} if bias is None else {"bias": bias})
    _check("sketched_outer", fits and (bias is None or bias.shape == U1.shape[1:]), **operands)
    if _uses_triton("sketched_outer", inner, len(U1), U1, S2, bias):
        from .._triton.sketched import is_addressable
        from .._triton.sketched_halves import pair_outer_plan

        U1, S2 = (A if is_addressable(A) else A.contiguous() for A in (U1, S2))
        inner = inner.contiguous()  # The kernel takes no strides for it.
        bias = None if bias is None else bias.contiguous()
        plan = _outer_plans.add(plan_key(1.0, inner, U1, S2, bias), pair_outer_plan(inner, U1, S2, bias))
        return plan(inner, U1, S2, bias)
    return joined.joined_outer(inner, U1, S2, bias)


_inner_plans: Plans[Callable[..., Tensor]] = Plans()
_outer_plans: Plans[Callable[..., Tensor]] = Plans()


def _inner_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _inner_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients. The gradient of x is the second half of a product with transposed factors."""
    x, S1, U2 = ctx.saved_tensors
    need_x, need_S1, need_U2, _ = ctx.needs_input_grad
    R, d = S1.shape[1], grad * ctx.scale
    return (
        _outer(d, S1.mT, U2.mT, None) if need_x else None,
        x.mT @ d[:, :R] if need_S1 else None,
        x.mT @ d[:, R:] if need_U2 else None,
        None,
    )


def _outer_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients. The gradient of ``inner`` is the first half of a product with transposed factors."""
    inner, U1, S2 = ctx.saved_tensors
    need_inner, need_U1, need_S2, need_bias = ctx.needs_input_grad
    R = len(U1)
    return (
        _inner(grad, U1.mT, S2.mT, 1.0) if need_inner else None,
        inner[:, :R].mT @ grad if need_U1 else None,
        inner[:, R:].mT @ grad if need_S2 else None,
        grad.sum(0) if need_bias else None,
    )


_inner = define(
    "sketched_inner(Tensor x, Tensor S1, Tensor U2, float scale) -> Tensor",
    _inner_implementation,
    lambda x, S1, U2, scale: x.new_empty(x.shape[0], 2 * S1.shape[1]),
    setup_context=_inner_context,
    backward=_inner_backward,
)
_outer = define(
    "sketched_outer(Tensor inner, Tensor U1, Tensor S2, Tensor? bias) -> Tensor",
    _outer_implementation,
    lambda inner, U1, S2, bias: inner.new_empty(inner.shape[0], S2.shape[1]),
    setup_context=_outer_context,
    backward=_outer_backward,
)

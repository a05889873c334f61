"""The sketched product with sparse sketches in as many passes over the input and the output as a pair of layers takes.

On a CPU the output is written with the bias, by C++ or by :func:`~..reference.folded.tile`, and the product with S2 is
added in place. On a GPU the product is an operator, which chooses two Triton kernels or torch by ``_crossover``.
"""

__all__ = ["folded_inner", "folded_matmul", "folded_outer", "planned_gradients", "save_operands"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._torch import are_transforms_active, is_differentiated_forward, is_plain_call
from ..cpu.native import folded as native
from ..cpu.sketched import add
from ..reference.folded import fold, tile
from ..reference.sketched import scaled_product
from ..selection import multiplies_by_instruction, runs_kernels, use_triton
from ._crossover import choose_path
from ._plans import Plans, plan_key
from .library import autocast, check_one_device, define, refused_dtype, runs_eagerly_on_gpu

_NAME = "folded_matmul"


def folded_matmul(
    x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None, scale: float
) -> Tensor:  # (rows, out)
    """Return ``scale (x S1 U1 + x U2 S2) + bias`` for the sketches of these signs, (out,) and (in,).

    Cost: ``2 R (in + out)`` flops a row and twice that backward, and a pass over input and output. Backward keeps x and
    R numbers a row. Half precision is computed in float32 on a CPU that has no products in it, which takes a tenth of
    the time.
    """
    compiling = torch.compiler.is_compiling()
    needs_torch = not compiling and (is_differentiated_forward() or are_transforms_active())
    if (x.is_cuda if compiling else runs_kernels(x) or use_triton(_NAME, x.device)) and not needs_torch:
        x, S1, out_signs, S2, in_signs, bias = autocast(x.device, x, S1, out_signs, S2, in_signs, bias)
        return _folded_matmul(x, S1, out_signs, S2, in_signs, bias, scale)[0]
    if compiling or needs_torch:
        return reference.folded_matmul(x, S1, out_signs, S2, in_signs, bias, scale)
    if torch.is_grad_enabled():
        product: Tensor = FoldedProduct.apply(x, S1, out_signs, S2, in_signs, bias, scale)  # type: ignore[no-untyped-call]
        return product
    return _product(x, S1, out_signs, S2, in_signs, bias, scale)[0]


def folded_inner(x: Tensor, S1: Tensor, in_signs: Tensor, scale: float) -> Tensor:  # (rows, 2R)
    """Return ``scale x [S1 | U2]``."""
    return torch.cat([scaled_product(x, S1, scale), _scaled_fold(x, in_signs, S1.shape[1], scale)], 1)


def folded_outer(inner: Tensor, out_signs: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:  # (rows, out)
    """Return ``inner [U1 ; S2] + bias``."""
    R = len(S2)
    return torch.addmm(tile(inner[:, :R], out_signs, bias), inner[:, R:], S2)


def _product(
    x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, R)
    """Return the product, and ``scale x U2``."""
    dtype = x.dtype
    x, S1, out_signs, S2, in_signs, bias = _computed(x, S1, out_signs, S2, in_signs, bias)
    out, right = _fold_and_tile(x, in_signs, torch.mm(x, S1), out_signs, bias, scale)
    out.addmm_(right, S2)
    return (out, right) if x.dtype is dtype else (out.to(dtype), right.to(dtype))


def _fold_and_tile(
    x: Tensor, in_signs: Tensor, h: Tensor, out_signs: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, R)
    """Return ``scale h U1 + bias``, and ``scale x U2``, by C++ where it is compiled and nothing is differentiated."""
    if not torch.is_grad_enabled() and native.takes(x, in_signs, h, out_signs, bias):
        # Modes that record operations or keep their results, as selective checkpoints do, see an operator.
        call = native.fold_and_tile if is_plain_call() else _fold_and_tile_operator
        return call(x, in_signs, h, out_signs, bias, scale)
    return tile(h, out_signs, bias, scale), _scaled_fold(x, in_signs, h.shape[1], scale)


def _computed(*operands: Tensor | None) -> list[Any]:
    """Return the operands in the dtype in which products are fast."""
    if operands[0].dtype.itemsize > 2 or not operands[0].is_cpu or multiplies_by_instruction(operands[0].dtype):  # type: ignore[union-attr]
        return list(operands)
    return [operand if operand is None else operand.float() for operand in operands]


def _scaled_fold(x: Tensor, signs: Tensor, rank: int, scale: float) -> Tensor:
    # In float16 sums could overflow before they are scaled.
    return fold(x, signs * scale, rank) if x.dtype is torch.float16 else fold(x, signs, rank) * scale


class FoldedProduct(torch.autograd.Function):
    """The product, whose output and whose gradient of the input are each written once and added to in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        S1: Tensor,
        out_signs: Tensor,
        S2: Tensor,
        in_signs: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Return the output."""
        out, right = _product(x, S1, out_signs, S2, in_signs, bias, scale)
        need_x, need_S1, _, need_S2, *_ = ctx.needs_input_grad
        # Tensors that were made in inference mode cannot be saved, and frozen factors need not be.
        kept_x = x if need_S1 or (need_x and need_S2) else None
        factors = (S1, S2) if need_x else (None, None)
        ctx.save_for_backward(kept_x, *factors, right if need_S2 else None, out_signs, in_signs)
        ctx.scale, ctx.rank = scale, S1.shape[1]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, by differentiable operations if they are differentiated again."""
        dtype = grad.dtype
        grad, x, S1, S2, right, out_signs, in_signs = _computed(grad, *ctx.saved_tensors)
        need_x, need_S1, _, need_S2, _, need_bias, _ = ctx.needs_input_grad
        R, scale, dx = ctx.rank, ctx.scale, None
        if need_x:
            dx, d_left = _fold_and_tile(grad, out_signs, grad @ S2.mT, in_signs, None, scale)
            dx = torch.addmm(dx, d_left, S1.mT) if torch.is_grad_enabled() else dx.addmm_(d_left, S1.mT)
        elif need_S1:
            d_left = _scaled_fold(grad, out_signs, R, scale)
        if need_S2 and torch.is_grad_enabled() and need_x:  # The saved number is a constant.
            right = _scaled_fold(x, in_signs, R, scale)
        return (
            dx if dx is None else dx.to(dtype),
            _gradient_of_S1(x, d_left).to(dtype) if need_S1 else None,
            None,
            (right.mT @ grad).to(dtype) if need_S2 else None,
            None,
            grad.sum(0).to(dtype) if need_bias else None,
            None,
        )


def _gradient_of_S1(x: Tensor, d_left: Tensor) -> Tensor:  # (in, R)
    """Return ``x^T d_left``; of many rows and few columns, the transposed product is up to 1.7 times as fast."""
    if len(x) > 8 * d_left.shape[1]:
        return (d_left.mT @ x).mT.contiguous()
    return x.mT @ d_left


def _check(x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError where the kernels would read beyond their operands."""
    tensors = {"x": x, "S1": S1, "out_signs": out_signs, "S2": S2, "in_signs": in_signs}
    tensors |= {} if bias is None else {"bias": bias}
    if (
        not x.dim() == S1.dim() == S2.dim() == 2
        or x.shape[1:] != S1.shape[:1]
        or S1.shape[1:] != S2.shape[:1]
        or in_signs.shape != S1.shape[:1]
        or any(row.shape != S2.shape[1:] for row in (out_signs, bias) if row is not None)
    ):
        raise ValueError(
            "folded_matmul takes x (rows, in), S1 (in, R), out_signs (out,), S2 (R, out), in_signs (in,) and bias "
            "(out,), not " + ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        )
    check_one_device(_NAME, tensors)


def _implementation(
    x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and ``scale x [S1 | U2]``, which backward needs."""
    operands = x, S1, out_signs, S2, in_signs, bias
    if runs_kernels(x) and (plan := _plans.get(plan_key(scale, *operands))) is not None:
        return plan(*operands)
    _check(*operands)
    refusal = refused_dtype(x.dtype)
    if refusal is None and any(operand is not None and operand.dtype is not x.dtype for operand in operands):
        refusal = f"takes operands of the input's dtype, {x.dtype}"
    triton = use_triton(_NAME, x.device, refusal) and 0 not in (*x.shape, *S2.shape)
    if choose_path(len(x), len(S2), triton=triton) in ("pair", "fused"):
        from .._triton.folded import folded_plan
        from .._triton.sketched import is_addressable

        x, S1, S2 = (A if is_addressable(A) else A.contiguous() for A in (x, S1, S2))
        out_signs, in_signs = out_signs.contiguous(), in_signs.contiguous()
        bias = None if bias is None else bias.contiguous()
        operands = x, S1, out_signs, S2, in_signs, bias
        return _plans.add(plan_key(scale, *operands), folded_plan(*operands, scale))(*operands)
    inner = folded_inner(x, S1, in_signs, scale)
    R = S1.shape[1]
    return tile(inner[:, :R], out_signs, bias).addmm_(inner[:, R:], S2), inner


# The plans of the Triton kernels. Products by torch are not planned.
_plans: Plans[Callable[..., tuple[Tensor, Tensor]]] = Plans()


def _fake(
    x: Tensor, S1: Tensor, out_signs: Tensor, S2: Tensor, in_signs: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], S2.shape[1]), x.new_empty(x.shape[0], 2 * S1.shape[1])


def save_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the operands, the scale and the inner product for the backward pass."""
    *tensors, _, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_inner: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients. The gradient of x is a product of transposed and exchanged operands."""
    x, S1, out_signs, S2, in_signs, inner = ctx.saved_tensors
    need_x, need_S1, _, need_S2, _, need_bias, _ = ctx.needs_input_grad
    R, scale = S1.shape[1], ctx.scale
    if grad is None:
        grad = x.new_zeros(x.shape[0], S2.shape[1])
    dx = d_left = d_inner = None
    if need_x:
        dx, d_inner = _folded_matmul(grad, S2.mT, in_signs, S1.mT, out_signs, None, scale)
        d_left = d_inner[:, R:]
    elif need_S1:
        d_left = d_inner = _scaled_fold(grad, out_signs, R, scale)
    if need_S1 and need_S2 and grad_inner is None:
        planned = planned_gradients(x, grad, inner, d_inner, need_x, need_bias)
        if planned is not None:
            dS1, dS2, dbias = planned
            return dx, dS1, None, dS2, None, dbias, None
    if grad_inner is not None:
        d_left = add(d_left, grad_inner[:, :R] * scale)
        if need_x:
            dx = add(dx, grad_inner[:, :R] @ S1.mT * scale + tile(grad_inner[:, R:], in_signs, None, scale))
    return (
        dx,
        x.mT @ d_left if need_S1 else None,
        None,
        inner[:, R:].mT @ grad if need_S2 else None,
        None,
        grad.sum(0) if need_bias else None,
        None,
    )


_FactorGradients = tuple[Tensor, Tensor, Tensor | None]


def _NO_PLAN(*_: Tensor) -> _FactorGradients:
    raise AssertionError("products of torch compute these gradients")


_gradient_plans: Plans[Callable[..., _FactorGradients]] = Plans()


def planned_gradients(
    x: Tensor, grad: Tensor, inner: Tensor, d_inner: Tensor | None, need_x: bool, need_bias: bool
) -> _FactorGradients | None:
    """Return the gradients of S1, S2 and the bias by a Triton kernel, or None where torch computes them.

    ``d_inner`` is the gradient of ``x [S1 | U2]`` if the gradient of x is needed, and otherwise that of ``x S1``.
    """
    # The compiler of torch must not trace what follows, and autograd cannot differentiate it again.
    if torch.is_grad_enabled() or not runs_eagerly_on_gpu(x):
        return None
    key = plan_key((need_x, need_bias), x, grad, inner)
    plan = _gradient_plans.get(key)
    if plan is None:
        from .._triton.sketched_gradients import gradients_plan

        plan = _gradient_plans.add(key, gradients_plan(x, grad, inner, need_x, need_bias) or _NO_PLAN)
    return None if plan is _NO_PLAN else plan(x, grad, inner, d_inner)


_folded_matmul = define(
    "folded_matmul(Tensor x, Tensor S1, Tensor out_signs, Tensor S2, Tensor in_signs, Tensor? bias, float scale)"
    " -> (Tensor, Tensor)",
    _implementation,
    _fake,
    setup_context=save_operands,
    backward=_backward,
)

_fold_and_tile_operator = define(
    "fold_and_tile(Tensor x, Tensor in_signs, Tensor h, Tensor out_signs, Tensor? bias, float scale)"
    " -> (Tensor, Tensor)",
    native.fold_and_tile,
    lambda x, in_signs, h, out_signs, bias, scale: (x.new_empty(len(x), len(out_signs)), x.new_empty(h.shape)),
)

"""The sketched product, by the fastest order or kernel for the operands, which ``_crossover`` chooses."""

__all__ = ["sketched_matmul"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._torch import are_transforms_active, is_differentiated_forward
from ..cpu import sketched as torch_orders
from ..selection import runs_kernels, use_triton
from ._crossover import choose_path
from ._plans import Plans, plan_key
from .folded import folded_matmul, planned_gradients, save_operands
from .library import autocast, check_one_device, define, needs_torch, refused_dtype

_NAME = "sketched_matmul"


def sketched_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out), or words
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (in, R), or words
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> Tensor:  # (rows, out)
    """Return ``scale (x S1 U1 + x U2 S2) + bias``.

    The sketches U1 and U2 are both dense, or both int32 *words* of signs, one bit an entry along the features,
    ``(R, ceil(out / 32))`` and ``(R, ceil(in / 32))``, see :func:`pack_signs` (U2 is packed transposed). Words are for
    inference: they have no gradient, and a backward pass computes as many products as for dense signs. Or they are the
    signs, ``(out,)`` and ``(in,)``, of sparse sketches: input i has sign i in column ``i mod R`` of U2, and output j
    sign j in row ``j mod R`` of U1.

    Args:
        x: Input, two-dimensional.
        S1: Trained factor on the input side.
        U1: Sketch on the output side.
        S2: Trained factor on the output side.
        U2: Sketch on the input side.
        bias: Added to every row.
        scale: Multiplies both products.

    Returns:
        The output of shape ``(rows, out)``.

    Raises:
        ValueError: If the shapes of words do not fit the factors.
        RuntimeError: If ``PANTHER_KERNELS=triton`` and no Triton kernel takes the operands.

    Cost: ``4 R (in + out)`` flops a row, and 1.5 times that backward when U1 and U2 are fixed. Bytes: the input and the
    output once, the factors once (words an eighth of a byte an entry).

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_matmul(ones, ones, ones, ones, ones, scale=0.5).shape
        torch.Size([2, 2])
    """
    if U1.dim() == 1:
        return folded_matmul(x, S1, U1, S2, U2, bias, scale)
    packed = not (U1.is_floating_point() and U2.is_floating_point())
    # A compiled graph may run for any batch size, so it must not branch on one. On a GPU the operator chooses its
    # kernel at run time. On the CPU Inductor fuses the two writes of the chain's output.
    compiling = torch.compiler.is_compiling()
    to_operator = packed or (x.is_cuda if compiling else runs_kernels(x) or use_triton(_NAME, x.device))
    if to_operator and (compiling or not needs_torch()):
        x, S1, U1, S2, U2, bias = autocast(x.device, x, S1, U1, S2, U2, bias)
        return _sketched_matmul(x, S1, U1, S2, U2, bias, scale)[0]
    if packed:
        _check(x, S1, U1, S2, U2, bias)
        U1, U2 = dense_signs(S1, U1, S2, U2)
    if compiling or is_differentiated_forward() or choose_path(x.shape[0], S1.shape[1], triton=False) == "chain":
        if x.dtype is torch.float16 and scale != 1.0:
            # Products with signs grow with the square root of the width and could exceed 65,504, the largest number of
            # float16. The signs are scaled instead of the input, because a scaled input could fall below 6e-8.
            U1, U2, scale = U1 * scale, U2 * scale, 1.0
        if not (compiling or torch.is_grad_enabled() or are_transforms_active()):
            return torch_orders.chained_in_place(x, S1, U1, S2, U2, bias, scale)
        return reference.sketched_matmul(x, S1, U1, S2, U2, bias, scale)
    product = torch_orders.JoinedProduct.apply if torch.is_grad_enabled() else torch_orders.JoinedProduct.forward
    return product(x, S1, U1, S2, U2, bias, scale)[0]


def dense_signs(S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor) -> tuple[Tensor, Tensor]:
    """Return U1 (R, out) and U2 (in, R) as numbers, unpacked if they are words."""
    if U1.is_floating_point():
        return U1, U2
    return reference.unpack_signs(U1, S2.shape[1], S2.dtype), reference.unpack_signs(U2, S1.shape[0], S1.dtype).mT


def _refusal(x: Tensor, *factors: Tensor) -> str | None:
    """Return the rule of the Triton kernels that the operands break, or None."""
    refusal = refused_dtype(x.dtype)
    if refusal is None and any(factor.is_floating_point() and factor.dtype is not x.dtype for factor in factors):
        refusal = f"takes factors of the input's dtype, {x.dtype}, not {[factor.dtype for factor in factors]}"
    return refusal


def _check(x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError where the kernels would read beyond their operands."""
    tensors = {"x": x, "S1": S1, "U1": U1, "S2": S2, "U2": U2} | ({} if bias is None else {"bias": bias})
    dense = U1.is_floating_point() and U2.is_floating_point()
    matrices = (x, S1, S2, U1, U2) if dense else (x, S1, S2)
    if (
        any(matrix.dim() != 2 for matrix in matrices)
        or not x.shape[1] == S1.shape[0]
        or S1.shape[1] != S2.shape[0]
        or (dense and (U1.shape != S2.shape or U2.shape != S1.shape))
        or (bias is not None and bias.shape != S2.shape[1:])
    ):
        raise ValueError(
            "sketched_matmul takes x (rows, in), S1 and U2 (in, R), U1 and S2 (R, out) and bias (out,), not "
            + ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        )
    if not dense and not U1.dtype is U2.dtype is torch.int32:
        raise ValueError(
            f"U1 and U2 must both be dense or both int32 words, not {U1.dtype} and {U2.dtype}: use pack_signs for "
            "both, or for neither"
        )
    (n_in, R), n_out = S1.shape, S2.shape[1]
    words = (R, -(-n_out // 32)), (R, -(-n_in // 32))
    if not dense and (U1.shape, U2.shape) != words:
        raise ValueError(
            f"U1 and U2 as words must have the shapes {words[0]} and {words[1]} for in = {n_in}, out = {n_out} and "
            f"R = {R}, not {tuple(U1.shape)} and {tuple(U2.shape)}: pack U1 and U2.mT"
        )
    check_one_device(_NAME, tensors)


def _implementation(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and ``scale x [S1 | U2]``, which backward needs."""
    if runs_kernels(x) and (plan := _plans.get(plan_key(scale, x, S1, U1, S2, U2, bias))) is not None:
        return plan(x, S1, U1, S2, U2, bias)
    _check(x, S1, U1, S2, U2, bias)
    path = _path(x, S1, U1, S2, U2)
    if path in ("pair", "fused"):
        from .._triton import sketched

        x, S1, U1, S2, U2 = (A if sketched.is_addressable(A) else A.contiguous() for A in (x, S1, U1, S2, U2))
        bias = None if bias is None else bias.contiguous()
        make_plan = sketched.pair_plan if path == "pair" else sketched.fused_plan
        plan = make_plan(x, S1, U1, S2, U2, bias, scale)
        _plans.add(plan_key(scale, x, S1, U1, S2, U2, bias), plan)
        return plan(x, S1, U1, S2, U2, bias)
    if not U1.is_floating_point() and not x.is_cuda:
        return torch_orders.packed_matmul(x, S1, U1, S2, U2, bias, scale)
    U1, U2 = dense_signs(S1, U1, S2, U2)
    product = torch_orders.chained_matmul if path == "chain" else torch_orders.joined_matmul
    return product(x, S1, U1, S2, U2, bias, scale)


# The plans of the Triton kernels. Products by torch are not planned.
_plans: Plans[Callable[..., tuple[Tensor, Tensor]]] = Plans()


def _path(x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor) -> str:
    """Return the path of a product, or raise RuntimeError if Triton is required and does not take the operands."""
    triton = use_triton(_NAME, x.device, _refusal(x, S1, U1, S2, U2)) and 0 not in (*x.shape, *S2.shape)
    aligned = triton and _aligned(x, S1, U1, S2, U2)
    return choose_path(x.shape[0], S1.shape[1], triton=triton, aligned=aligned)


def _aligned(x: Tensor, S1: Tensor, *factors: Tensor) -> bool:
    """Return whether sizes and strides are multiples of 16, so that Triton may load several entries at once."""
    dense = [operand for operand in (x, S1, *factors) if operand.is_floating_point()]
    steps = [stride for operand in dense for stride in operand.stride() if stride != 1]
    sizes = (*S1.shape, *(operand.shape[1] for operand in factors if operand.is_floating_point()))
    return all(n % 16 == 0 for n in (*steps, *sizes)) and all(operand.data_ptr() % 16 == 0 for operand in dense)


def _fake(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], S2.shape[1]), x.new_empty(x.shape[0], 2 * S1.shape[1])


def _backward(ctx: Any, grad: Tensor | None, grad_inner: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients. The gradient of x is a sketched product of transposed, exchanged factors."""
    x, S1, U1, S2, U2, inner = ctx.saved_tensors
    need_x, need_S1, need_U1, need_S2, need_U2, need_bias, _ = ctx.needs_input_grad
    R, scale = S1.shape[1], ctx.scale
    if grad is None:
        grad = x.new_zeros(x.shape[0], S2.shape[1])
    dx = d_left = d_right = d_inner = None
    if need_x:
        V1, V2 = (U2.mT, U1.mT) if U1.is_floating_point() else (U2, U1)  # words of both are packed along the features
        dx, d_inner = _sketched_matmul(grad, S2.mT, V1, S1.mT, V2, None, scale)
        d_right = d_inner[:, :R] if need_U2 or grad_inner is not None else None
        d_left = d_inner[:, R:]
    elif need_S1 or need_U2:
        d_left = d_inner = (grad @ dense_signs(S1, U1, S2, U2)[0].mT) * scale if need_S1 else None
        d_right = (grad @ S2.mT) * scale if need_U2 else None
    if need_S1 and need_S2 and not (need_U1 or need_U2) and grad_inner is None:
        planned = planned_gradients(x, grad, inner, d_inner, need_x, need_bias)
        if planned is not None:
            dS1, dS2, dbias = planned
            return dx, dS1, None, dS2, None, dbias, None
    if grad_inner is not None:
        d_left = torch_orders.add(d_left, grad_inner[:, :R] * scale)
        d_right = torch_orders.add(d_right, grad_inner[:, R:] * scale)
        if need_x:
            dense_U2 = dense_signs(S1, U1, S2, U2)[1]
            dx = torch_orders.add(dx, (grad_inner[:, :R] @ S1.mT + grad_inner[:, R:] @ dense_U2.mT) * scale)
    return (
        dx,
        x.mT @ d_left if need_S1 else None,
        inner[:, :R].mT @ grad if need_U1 else None,
        inner[:, R:].mT @ grad if need_S2 else None,
        x.mT @ d_right if need_U2 else None,
        grad.sum(0) if need_bias else None,
        None,
    )


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int, int]]:
    """Turn a batch of inputs into more rows; run batches of factors, an ensemble, one by one."""
    x, *rest = args
    if in_dims[0] is not None and all(dim is None for dim in in_dims[1:]):
        x = x.movedim(in_dims[0], 0)
        outputs = _sketched_matmul(x.flatten(0, 1), *rest)
        return tuple(out.unflatten(0, x.shape[:2]) for out in outputs), (0, 0)
    one_by_one = [
        _sketched_matmul(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(outputs) for outputs in zip(*one_by_one, strict=True)), (0, 0)


_sketched_matmul = define(
    "sketched_matmul(Tensor x, Tensor S1, Tensor U1, Tensor S2, Tensor U2, Tensor? bias, float scale)"
    " -> (Tensor, Tensor)",
    _implementation,
    _fake,
    setup_context=save_operands,
    backward=_backward,
    vmap=_vmap,
)

"""The one dispatch between the torch reference and what is faster for a shape.

A sketched product can be taken in two orders. The *chain* is the reference: four products, each writing its result. The
*joined* one concatenates factors, reads the input once and writes the output once; it pays when the batch outweighs
copying the factors.
"""

__all__ = ["sketched_matmul"]

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._backend import backend

# Measured on two cores (widths 1024 to 8192, R 16 and 128, batch 1 to 512, float32 and bfloat16): joining wins from
# about 4 R rows on. Below, bfloat16 would gain from it on one thread and lose on two: its products are slow to call.
_JOIN_ROWS_PER_RANK = 4


def sketched_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out)
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (in, R)
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> Tensor:  # (rows, out)
    """``scale (x S1 U1 + x U2 S2) + bias`` by the faster of two orders; see the module's text.

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

    Cost: ``4 R (in + out)`` flops a row, and 1.5 times that backward when U1 and U2 are fixed.

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_matmul(ones, ones, ones, ones, ones, scale=0.5).shape
        torch.Size([2, 2])
    """
    # A compiled graph may serve any batch, so it must not branch on one; Inductor fuses what the chain writes twice.
    if torch.compiler.is_compiling():
        return reference.sketched_matmul(x, S1, U1, S2, U2, bias, scale)
    backend()  # raises if PANTHER_KERNELS insists on what cannot run
    if x.shape[0] < _JOIN_ROWS_PER_RANK * S1.shape[1]:
        return reference.sketched_matmul(x, S1, U1, S2, U2, bias, scale)
    product = _Joined.apply if torch.is_grad_enabled() else _Joined.forward
    return product(x, S1, U1, S2, U2, bias, scale)[0]


class _Joined(torch.autograd.Function):
    """The joined product. Autograd on the concatenations would spend products on fixed sketches; this does not.

    The second output, x [S1 | U2], is there for backward to read. It is an output like the first, with gradients and
    tangents of its own, so that double backward and torch.func work.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        inner = x @ torch.cat((S1, U2), 1)  # (rows, 2R)
        outer = torch.cat((U1, S2), 0)
        if bias is None:
            return (inner * scale) @ outer, inner
        return torch.addmm(bias, inner, outer, alpha=scale), inner

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        *tensors, _, ctx.scale = inputs
        ctx.save_for_backward(*tensors, outputs[1])
        ctx.save_for_forward(*tensors, outputs[1])  # torch's vmap rule wants both lists to be one

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inner: Tensor) -> tuple[Tensor | None, ...]:
        x, S1, U1, S2, U2, inner = ctx.saved_tensors
        need_x, need_S1, need_U1, need_S2, need_U2, need_bias, _ = ctx.needs_input_grad
        R = S1.shape[1]
        left, right = inner[:, :R], inner[:, R:]
        dinner = (grad @ torch.cat((U1, S2), 0).mT) * ctx.scale + grad_inner  # (rows, 2R)
        return (
            dinner @ torch.cat((S1, U2), 1).mT if need_x else None,
            x.mT @ dinner[:, :R] if need_S1 else None,
            (left * ctx.scale).mT @ grad if need_U1 else None,
            (right * ctx.scale).mT @ grad if need_S2 else None,
            x.mT @ dinner[:, R:] if need_U2 else None,
            grad.sum(0) if need_bias else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Any, dS1: Any, dU1: Any, dS2: Any, dU2: Any, dbias: Any, _: Any) -> tuple[Tensor, Tensor]:
        x, S1, U1, S2, U2, inner = ctx.saved_tensors
        d_in = _concatenate_tangents(1, (dS1, S1), (dU2, U2))
        d_out = _concatenate_tangents(0, (dU1, U1), (dS2, S2))
        A, B = torch.cat((S1, U2), 1), torch.cat((U1, S2), 0)
        dinner = _add(_product(dx, A), _product(x, d_in))
        if dinner is None:
            dinner = x.new_zeros(x.shape[0], A.shape[1])
        dout = _add(ctx.scale * (dinner @ B), _product(ctx.scale * inner, d_out))
        return _add(dout, dbias), dinner  # type: ignore[return-value]


def _concatenate_tangents(dim: int, *pairs: tuple[Tensor | None, Tensor]) -> Tensor | None:
    if all(tangent is None for tangent, _ in pairs):
        return None
    return torch.cat([torch.zeros_like(primal) if tangent is None else tangent for tangent, primal in pairs], dim)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a @ b


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b

"""Orders of the sketched product that torch runs faster than the reference: joined factors, and packed signs.

The gradients of joined factors, of the product and of its two halves, need fewer products than those of autograd.
"""

__all__ = [
    "InnerProduct", "JoinedProduct", "OuterProduct", "add", "chained_in_place", "chained_matmul", "joined_inner",
    "joined_matmul", "joined_outer", "packed_matmul",
]  # fmt: skip

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..reference.packing import unpack_signs
from ..reference.sketched import scaled_product

# Entries of a sketch that are unpacked at once. They stay in a core's cache for the product that uses them.
_UNPACKED = 1 << 17


def chained_matmul(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, 2R)
    """Return the reference's four products, and ``scale x [S1 | U2]``, scaled before it is rounded."""
    left, right = scaled_product(x, S1, scale), scaled_product(x, U2, scale)
    out = left @ U1 if bias is None else torch.addmm(bias, left, U1)
    return torch.addmm(out, right, S2), torch.cat((left, right), 1)


def chained_in_place(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> Tensor:  # (rows, out)
    """Return the reference's four products without a second array of the output's size, which autograd would need."""
    left, right = torch.mm(x, S1), torch.mm(x, U2)
    out = torch.mm(left * scale, U1) if bias is None else torch.addmm(bias, left, U1, alpha=scale)
    return out.addmm_(right, S2, alpha=scale)


def joined_matmul(
    x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, 2R)
    """Return the product, as two on concatenated factors, and ``scale x [S1 | U2]``, scaled before it is rounded."""
    inner = joined_inner(x, (S1, U2), scale)
    return joined_outer(inner, U1, S2, bias), inner


def joined_inner(x: Tensor, factors: Sequence[Tensor], scale: float) -> Tensor:  # (rows, columns of all)
    """Return ``scale x [factors]`` as one product."""
    return scaled_product(x, torch.cat(tuple(factors), 1), scale)


def joined_outer(inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:  # (rows, out)
    """Return ``inner [U1 ; S2] + bias`` as one product."""
    outer = torch.cat((U1, S2), 0)
    return inner @ outer if bias is None else torch.addmm(bias, inner, outer)


def packed_matmul(
    x: Tensor,  # (rows, in)
    S1: Tensor,  # (in, R)
    U1: Tensor,  # (R, out / 32), int32
    S2: Tensor,  # (R, out)
    U2: Tensor,  # (R, in / 32), int32
    bias: Tensor | None = None,  # (out,)
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, 2R)
    """Return the product and ``scale x [S1 | U2]`` for signs as :func:`~panther.kernels.pack_signs` packs them.

    They are unpacked block by block.
    """
    (rows, n_in), (R, n_out) = x.shape, S2.shape
    right = x.new_zeros(rows, R, dtype=torch.promote_types(x.dtype, torch.float32))
    for block, words in _blocks(n_in, R):
        right += scaled_product(x[:, block], unpack_signs(U2[:, words], _length(block), x.dtype).mT, scale)
    inner = torch.cat((scaled_product(x, S1, scale), right.to(x.dtype)), 1)
    left, right = inner[:, :R], inner[:, R:]
    out = x.new_empty(rows, n_out)
    for block, words in _blocks(n_out, R):
        part = left @ unpack_signs(U1[:, words], _length(block), x.dtype)
        torch.addmm(part if bias is None else part.add_(bias[block]), right, S2[:, block], out=out[:, block])
    return out, inner


def _blocks(n: int, R: int) -> list[tuple[slice, slice]]:
    """Return the ranges of features to unpack at once, each with the range of its words."""
    step = max(1, _UNPACKED // (32 * max(R, 1)))
    words = [slice(start, min(start + step, -(-n // 32))) for start in range(0, -(-n // 32), step)]
    return [(slice(32 * part.start, min(32 * part.stop, n)), part) for part in words]


def _length(block: slice) -> int:
    length: int = block.stop - block.start
    return length


class JoinedProduct(torch.autograd.Function):
    """The joined product, on the CPU. Autograd on the concatenations would spend products on fixed sketches.

    The second output, ``scale x [S1 | U2]``, is there for backward to read. It is an output like the first, with
    gradients, so that double backward and torch.func work. It has no forward mode, which the reference has.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output and ``scale x [S1 | U2]``."""
        return joined_matmul(x, S1, U1, S2, U2, bias, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        """Save the operands and the inner product."""
        *tensors, _, ctx.scale = inputs
        ctx.save_for_backward(*tensors, outputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inner: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands that need one."""
        x, S1, U1, S2, U2, inner = ctx.saved_tensors
        need_x, need_S1, need_U1, need_S2, need_U2, need_bias, _ = ctx.needs_input_grad
        R = S1.shape[1]
        left, right = inner[:, :R], inner[:, R:]
        outer = torch.cat((U1, S2), 0).mT
        d_inner = torch.addmm(grad_inner, grad, outer, beta=ctx.scale, alpha=ctx.scale)  # gradient of x [S1 | U2]
        return (
            d_inner @ torch.cat((S1, U2), 1).mT if need_x else None,
            x.mT @ d_inner[:, :R] if need_S1 else None,
            left.mT @ grad if need_U1 else None,
            right.mT @ grad if need_S2 else None,
            x.mT @ d_inner[:, R:] if need_U2 else None,
            grad.sum(0) if need_bias else None,
            None,
        )


class InnerProduct(torch.autograd.Function):
    """The first half of the sketched product.

    Its gradients use differentiable operations, so that they can be differentiated again.
    """

    @staticmethod
    def forward(x: Tensor, S1: Tensor, U2: Tensor, scale: float) -> Tensor:
        """Return ``scale x [S1 | U2]``."""
        return joined_inner(x, (S1, U2), scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the operands."""
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands that need one."""
        x, S1, U2 = ctx.saved_tensors
        need_x, need_S1, need_U2, _ = ctx.needs_input_grad
        d, R = grad if ctx.scale == 1.0 else grad * ctx.scale, S1.shape[1]
        return (
            d @ torch.cat((S1, U2), 1).mT if need_x else None,
            x.mT @ d[:, :R] if need_S1 else None,
            x.mT @ d[:, R:] if need_U2 else None,
            None,
        )


class OuterProduct(torch.autograd.Function):
    """The second half of the sketched product."""

    @staticmethod
    def forward(inner: Tensor, U1: Tensor, S2: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``inner [U1 ; S2] + bias``."""
        return joined_outer(inner, U1, S2, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the operands without the bias."""
        ctx.save_for_backward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands that need one."""
        inner, U1, S2 = ctx.saved_tensors
        need_inner, need_U1, need_S2, need_bias = ctx.needs_input_grad
        R = len(U1)
        return (
            grad @ torch.cat((U1, S2), 0).mT if need_inner else None,
            inner[:, :R].mT @ grad if need_U1 else None,
            inner[:, R:].mT @ grad if need_S2 else None,
            grad.sum(0) if need_bias else None,
        )


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of two terms; None stands for zero."""
    return b if a is None else a if b is None else a + b

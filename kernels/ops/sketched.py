"""The sketched product, by the fastest order or kernel for the operands; see ``_crossover`` for which and why."""

__all__ = ["sketched_matmul"]

import torch
from torch import Tensor

from .. import reference
from .._backend import use_triton
from .._cpu.sketched import JoinedProduct
from ._crossover import choose_path
from ._library import needs_torch
from ._sketched_operator import check_signs, dense_signs, sketched_matmul_operator


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
    inference: they have no gradient, and a backward pass spends products as for dense signs.

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
        ValueError: If words do not have the shapes that the factors call for.
        RuntimeError: If ``PANTHER_KERNELS=triton`` and no Triton kernel takes the operands.

    Cost: ``4 R (in + out)`` flops a row, and 1.5 times that backward when U1 and U2 are fixed. Bytes: the input and the
    output once, the factors once (words an eighth of a byte an entry).

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_matmul(ones, ones, ones, ones, ones, scale=0.5).shape
        torch.Size([2, 2])
    """
    packed = not (U1.is_floating_point() and U2.is_floating_point())
    # A compiled graph may serve any batch, so it must not branch on one: on a GPU the operator chooses its kernel when
    # it runs. On the CPU Inductor fuses what the chain writes twice.
    compiling = torch.compiler.is_compiling()
    if compiling:
        to_operator = packed or x.is_cuda
    else:
        to_operator = (packed or use_triton("sketched_matmul", x.device)) and not needs_torch()
    if to_operator:
        return sketched_matmul_operator(x, S1, U1, S2, U2, bias, scale)[0]
    if packed:
        check_signs(S1, U1, S2, U2)
        U1, U2 = dense_signs(S1, U1, S2, U2)
    if compiling or choose_path(x.shape[0], S1.shape[1], triton=False) == "chain":
        if x.dtype is torch.float16 and scale != 1.0:
            # Products with signs grow with the square root of the width, and float16 ends at 65,504. It ends at 6e-8
            # too, so the signs are scaled and not the input.
            U1, U2, scale = U1 * scale, U2 * scale, 1.0
        return reference.sketched_matmul(x, S1, U1, S2, U2, bias, scale)
    product = JoinedProduct.apply if torch.is_grad_enabled() else JoinedProduct.forward
    return product(x, S1, U1, S2, U2, bias, scale)[0]

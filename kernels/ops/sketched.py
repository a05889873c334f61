"""The sketched product by torch, in the order that ``_crossover`` chooses; with sparse sketches see ``folded``."""

__all__ = ["sketched_matmul"]

import torch
from torch import Tensor

from .. import reference
from .._torch import are_transforms_active, is_differentiated_forward
from ..cpu import sketched as torch_orders
from ._crossover import choose_path
from .folded import folded_matmul
from .library import autocast, check_one_device


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
    inference on a CPU, which unpacks them block by block; elsewhere all of them are unpacked. Or they are the
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
        RuntimeError: If ``PANTHER_KERNELS=triton``, and the kernels of sparse sketches do not take the operands.

    Cost: ``4 R (in + out)`` flops a row, and 1.5 times that backward when U1 and U2 are fixed. Bytes: the input and the
    output once, the factors once (words an eighth of a byte an entry).

    Example:
        >>> ones = torch.ones(2, 2)
        >>> sketched_matmul(ones, ones, ones, ones, ones, scale=0.5).shape
        torch.Size([2, 2])
    """
    if U1.dim() == 1:
        return folded_matmul(x, S1, U1, S2, U2, bias, scale)
    # A compiled graph may run for any batch size, so it must not branch on one.
    compiling = torch.compiler.is_compiling()
    x, S1, U1, S2, U2, bias = autocast(x.device, x, S1, U1, S2, U2, bias)
    is_inference = not (compiling or torch.is_grad_enabled() or are_transforms_active())
    if not (U1.is_floating_point() and U2.is_floating_point()):
        _check_words(x, S1, U1, S2, U2, bias)
        if is_inference and x.is_cpu and not is_differentiated_forward():
            return torch_orders.packed_matmul(x, S1, U1, S2, U2, bias, scale)
        U1 = reference.unpack_signs(U1, S2.shape[1], S2.dtype)
        U2 = reference.unpack_signs(U2, S1.shape[0], S1.dtype).mT
    if compiling or is_differentiated_forward() or choose_path(x.shape[0], S1.shape[1], triton=False) == "chain":
        if x.dtype is torch.float16 and scale != 1.0:
            # Products with signs grow with the square root of the width and could exceed 65,504, the largest number of
            # float16. The signs are scaled instead of the input, because a scaled input could fall below 6e-8.
            U1, U2, scale = U1 * scale, U2 * scale, 1.0
        if is_inference:
            return torch_orders.chained_in_place(x, S1, U1, S2, U2, bias, scale)
        return reference.sketched_matmul(x, S1, U1, S2, U2, bias, scale)
    product = torch_orders.JoinedProduct.apply if torch.is_grad_enabled() else torch_orders.JoinedProduct.forward
    return product(x, S1, U1, S2, U2, bias, scale)[0]


def _check_words(x: Tensor, S1: Tensor, U1: Tensor, S2: Tensor, U2: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless sketches packed into words fit the other operands."""
    tensors = {"x": x, "S1": S1, "U1": U1, "S2": S2, "U2": U2} | ({} if bias is None else {"bias": bias})
    if (
        not x.dim() == S1.dim() == S2.dim() == 2
        or x.shape[1] != S1.shape[0]
        or S1.shape[1] != S2.shape[0]
        or (bias is not None and bias.shape != S2.shape[1:])
    ):
        raise ValueError(
            "sketched_matmul takes x (rows, in), S1 (in, R), S2 (R, out) and bias (out,), not "
            + ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        )
    if not U1.dtype is U2.dtype is torch.int32:
        raise ValueError(
            f"U1 and U2 must both be dense or both int32 words, not {U1.dtype} and {U2.dtype}: use pack_signs for "
            "both, or for neither"
        )
    (n_in, R), n_out = S1.shape, S2.shape[1]
    words = (R, -(-n_out // 32)), (R, -(-n_in // 32))
    if (U1.shape, U2.shape) != words:
        raise ValueError(
            f"U1 and U2 as words must have the shapes {words[0]} and {words[1]} for in = {n_in}, out = {n_out} and "
            f"R = {R}, not {tuple(U1.shape)} and {tuple(U2.shape)}: pack U1 and U2.mT"
        )
    check_one_device("sketched_matmul", tensors)

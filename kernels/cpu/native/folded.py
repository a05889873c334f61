"""The fold and the tiling of sparse sketches in one pass over the input and one over the output, in C++."""

__all__ = ["fold_and_tile", "takes"]

import torch
from torch import Tensor

from ..._torch import are_transforms_active, is_differentiated_forward, is_tracing
from . import library

_DTYPES = (torch.float32, torch.bfloat16)
_LEAST_OF_THREADS = 1 << 15  # numbers of the input, below which one thread is faster


def takes(*operands: Tensor | None) -> bool:
    """Return whether the compiled function is there and takes operands: plain tensors of one dtype, on the CPU."""
    present = [operand for operand in operands if operand is not None]
    dtype = present[0].dtype
    return (
        dtype in _DTYPES
        and all(operand.is_cpu and operand.dtype is dtype and type(operand) in _PLAIN for operand in present)
        and not (are_transforms_active() or is_differentiated_forward() or is_tracing())
        and library() is not None
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def fold_and_tile(
    x: Tensor,  # (rows, in)
    in_signs: Tensor,  # (in,)
    h: Tensor,  # (rows, rank)
    out_signs: Tensor,  # (out,)
    bias: Tensor | None,  # (out,)
    scale: float,
) -> tuple[Tensor, Tensor]:  # (rows, out), (rows, rank)
    """Return ``scale h U1 + bias``, and ``scale x U2``, without derivatives; sums are in float32."""
    rows, columns = x.shape
    rank, outputs = h.shape[1], len(out_signs)
    operands = {
        "x": x,
        "in_signs": in_signs,
        "h": h,
        "out_signs": out_signs,
        "bias": out_signs if bias is None else bias,
    }
    sizes = (rows, columns), (columns,), (rows, max(rank, 1)), (outputs,), (outputs,)
    if [operand.shape for operand in operands.values()] != [*sizes]:  # C++ would read beyond them.
        raise ValueError(
            "fold_and_tile takes x (rows, in), in_signs (in,), h (rows, R), out_signs (out,) and bias (out,), not "
            + ", ".join(f"{name} {tuple(operand.shape)}" for name, operand in operands.items())
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    h, in_signs, out_signs = h.contiguous(), in_signs.contiguous(), out_signs.contiguous()
    bias = None if bias is None else bias.contiguous()
    out, folded = x.new_empty(rows, outputs), x.new_empty(rows, rank)
    compiled = library()
    assert compiled is not None  # callers ask for `takes` first
    half = x.dtype is torch.bfloat16
    function = compiled.panther_half_fold_and_tile if half else compiled.panther_fold_and_tile
    threads = torch.get_num_threads() if rows * columns > _LEAST_OF_THREADS else 1
    function(
        x.data_ptr(), x.stride(0), columns, in_signs.data_ptr(), folded.data_ptr(),
        h.data_ptr(), outputs, out_signs.data_ptr(), None if bias is None else bias.data_ptr(), scale, out.data_ptr(),
        rows, rank, threads,
    )  # fmt: skip
    return out, folded

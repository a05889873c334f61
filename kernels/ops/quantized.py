"""The product with a quantized weight: by a Triton kernel on a GPU, and by expanding the weight elsewhere."""

__all__ = ["quantized_matmul"]

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..selection import use_triton
from .library import define

_NAME = "quantized_matmul"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantized_matmul(
    x: Tensor,  # (rows, in)
    codes: Tensor,  # (out, bytes), see pack_codes
    bits: int,
    scales: Tensor,  # (out, groups)
    zeros: Tensor,  # (out, groups) uint8
    group_size: int,
    inner: Tensor | None = None,  # (rows, r)
    left: Tensor | None = None,  # (out, r) int8
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (rows, out)
    r"""Return ``x Q^T + inner left^T + bias`` with ``Q[i, j] = scales[i, g] (code[i, j] - zeros[i, g])``.

    For inference: it has no derivatives. On a GPU the weight is expanded in registers, tile by tile, and read in its
    few bits from memory (weights of few bits and activations of 16, as E. Frantar et al., "MARLIN", 2024,
    arXiv:2408.11743, have them; the correction is of the form of Z. Yao et al., 2023, arXiv:2303.08302). **No GPU has
    run it yet**: it was checked by Triton's interpreter and by compilation ahead of time.

    Args:
        x: Input, in float16, bfloat16 or float32; of any strides.
        codes: Packed codes of ``bits`` bits, contiguous.
        bits: 2 to 8.
        scales: One for each group of ``group_size`` neighbouring columns of a row, contiguous.
        zeros: The code of the number 0, for each group, contiguous.
        group_size: Columns in a group; the last group may be smaller.
        inner: x times the right factor of the correction and its scales, contiguous, in the dtype of x.
        left: The left factor.
        bias: Added to every row.

    Raises:
        RuntimeError: If ``PANTHER_KERNELS=triton`` and the kernel does not take the operands.

    Cost: ``2 rows in out`` flops; bytes: the codes once for each 64 rows of x.

    Example:
        >>> codes = torch.tensor([[0x31]], dtype=torch.uint8)  # the codes 1 and 3
        >>> one, zero = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8)
        >>> quantized_matmul(torch.tensor([[10.0, 1.0]]), codes, 4, one, zero, 2)
        tensor([[13.]])
    """
    return _quantized_matmul(x, codes, bits, scales, zeros, group_size, inner, left, bias)


def _forward(x: Tensor, *args: Any) -> Tensor:
    refusal = None if x.dtype in _DTYPES else f"takes float32, float16 and bfloat16, not {x.dtype}"
    if not use_triton(_NAME, x.device, refusal):
        return reference.quantized_matmul(x, *args)
    from .._triton import quantized

    return quantized.quantized_matmul(x, *args)


def _fake(x: Tensor, codes: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[0])


_quantized_matmul = define(
    f"{_NAME}(Tensor x, Tensor codes, int bits, Tensor scales, Tensor zeros, int group_size, Tensor? inner, "
    "Tensor? left, Tensor? bias) -> Tensor",
    _forward,
    _fake,
)

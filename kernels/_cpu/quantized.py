"""The product with a quantized weight, expanded block by block into memory that is kept, each multiplied at once.

Memory that is new for each call costs more in page faults than the expansion itself. Smaller blocks lose more to the
calls of operators than they gain by the cache.
"""

__all__ = ["quantized_matmul"]

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from ..reference.codes import MIDDLE, unpack_codes

_BLOCK = 1 << 19  # weights a block: 2 MiB in float32, and half a MiB for their codes, are kept by each thread
_kept = threading.local()
_INT8_KERNEL_ROWS = 32  # from there on, an expanded weight and the dense product are as fast


def quantized_matmul(
    x: Tensor,  # (n, in)
    codes: Tensor,  # (out, bytes), see pack_codes
    bits: int,
    scales: Tensor,  # (out, groups)
    zeros: Tensor,  # (out, groups) uint8
    group_size: int,
) -> Tensor:  # (n, out)
    """Return ``x Q^T`` with ``Q = scales * (codes - zeros)`` by groups, in the dtype of x and without derivatives.

    In float32 and float64 the zero points are not taken off the codes, but their product with the sums of x off the
    output, and the scales of one group a row multiply the output. In half precision the difference of two large sums
    would lose digits and float16 overflow, so both are applied to the codes; except codes of 8 bits with one group a
    row in bfloat16, whose zero points are near the middle.
    """
    n, columns = x.shape
    rows, groups = scales.shape
    dtype, middle = x.dtype, MIDDLE if bits == 8 else 0
    exact = dtype in (torch.float32, torch.float64)
    late = groups == 1 and (exact or (bits == 8 and dtype is torch.bfloat16))
    scales = scales.to(dtype if exact or late else torch.float32)
    # torch's kernel reads beyond its operands for sizes that do not fill its vectors, such as one column.
    if late and not exact and 0 < n < _INT8_KERNEL_ROWS and columns % 32 == 0 and rows % 32 == 0:
        y = torch._weight_int8pack_mm(x, codes.view(torch.int8), scales[:, 0])
        return y.addmm_(_group_sums(x, columns), (scales * (zeros.to(dtype) - middle)).mT, alpha=-1)
    y = x.new_empty(n, rows)
    step = max(1, _BLOCK // columns)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        here = codes[block]
        entries = here.shape[0] * columns
        if bits == 8:
            integers = here.view(torch.int8)
        else:
            integers = unpack_codes(here, bits, columns, _memory("codes", torch.uint8, here.shape[0] * (columns + 7)))
        weight = _memory("weight", scales.dtype, entries).view(-1, columns).copy_(integers)
        if not (exact or late):
            _by_groups(Tensor.sub_, weight, zeros[block].to(scales.dtype) - middle, group_size)
        if not late:
            _by_groups(Tensor.mul_, weight, scales[block], group_size)
        if weight.dtype is not dtype:
            weight = _memory("rounded", dtype, entries).view(-1, columns).copy_(weight)
        torch.mm(x, weight.mT, out=y[:, block])
    if late:
        y.mul_(scales[:, 0])
    if exact or late:
        y.addmm_(_group_sums(x, group_size), (scales * (zeros.to(dtype) - middle)).mT, alpha=-1)
    return y


def _memory(name: str, dtype: torch.dtype, entries: int) -> Tensor:
    """Return memory of this thread, with whatever it was last used for."""
    kept = getattr(_kept, name, None)
    size = entries * dtype.itemsize
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # memory of inference mode could not be written to outside of it
            kept = torch.empty(size, dtype=torch.uint8, device="cpu")
        if entries <= 2 * _BLOCK:  # a row of more columns than that is not kept
            setattr(_kept, name, kept)
    return kept[:size].view(dtype)


def _by_groups(operation: Callable[[Tensor, Tensor], Tensor], weight: Tensor, values: Tensor, group_size: int) -> None:
    """Apply an operation in place to a matrix and the number of each group of its columns."""
    whole = weight.shape[1] // group_size
    if whole:
        operation(weight[:, : whole * group_size].unflatten(1, (whole, group_size)), values[:, :whole, None])
    if whole < values.shape[1]:  # the last group is smaller
        operation(weight[:, whole * group_size :], values[:, whole:])


def _group_sums(x: Tensor, group_size: int) -> Tensor:  # (n, in) -> (n, groups)
    whole = x.shape[1] // group_size * group_size
    sums = x[:, :whole].unflatten(1, (whole // group_size, group_size)).sum(-1)
    return sums if whole == x.shape[1] else torch.cat((sums, x[:, whole:].sum(1, keepdim=True)), 1)

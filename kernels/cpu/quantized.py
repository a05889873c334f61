"""The product with a quantized weight. Blocks of the weight are expanded into reused memory and multiplied.

New memory for each call would cost more in page faults than the expansion itself. Blocks are larger than the caches,
because at 32 rows of x more operator calls and narrower products cost more than the cache gains.
"""

__all__ = ["blocks_of", "blockwise_matmul", "expanded", "integers_of", "memory", "scaled_rows"]

import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from .._torch import int8_weight_mm
from ..ops.quantized_operands import QuantizedCodes
from ..reference.codes import MIDDLE, unpack_codes
from . import native

# Weights per block. Each thread keeps 4 MiB for a block in float32 and 2 MiB for its codes.
_BLOCK = 1 << 20
_buffers = threading.local()
_INT8_KERNEL_ROWS = 16  # Below this number of rows, torch's 8-bit kernel is the fastest in bfloat16.


def blockwise_matmul(
    x: Tensor,  # (n, in)
    codes: QuantizedCodes,
    bias: Tensor | None = None,  # (out,)
) -> Tensor:  # (n, out)
    """Return ``x Q^T + bias`` with ``Q = scales * (codes - zeros)`` by groups, in the dtype of x, without derivatives.

    If a row of the weight has one group and x has few rows, the scales multiply the output. Otherwise they multiply the
    weight, as they do in float16, where the unscaled product would overflow.
    """
    if native.takes(codes, x.dtype):
        return _by_expanded_blocks(x, codes, bias)
    packed, bits, scales, zeros, _ = codes
    columns, rows = x.shape[1], scales.shape[0]
    if scales.shape[1] > 1 or 2 * len(x) > columns or x.dtype is torch.float16:
        return _scaled_first(x, codes, bias)
    # torch's kernel reads beyond its operands for sizes that do not fill its vectors, such as one column.
    fills_vectors = bits == 8 and columns % 32 == 0 and rows % 32 == 0
    if x.dtype is torch.bfloat16 and fills_vectors and 0 < len(x) < _INT8_KERNEL_ROWS:
        operands = _aligned(x, 32), _aligned(packed, 16).view(torch.int8)
        y = int8_weight_mm(*operands, torch.ones_like(scales[:, 0], dtype=x.dtype))
    else:
        y = x.new_empty(len(x), rows)
        for block in blocks_of(rows, columns):
            integers = integers_of(codes, block, columns)
            weight = memory("weight", x.dtype, *integers.shape).copy_(integers)
            torch.mm(x, weight.mT, out=y[:, block])
    work = y if y.dtype is torch.float64 else y.float()
    if bits == 8:
        # float32 represents this difference well: zero points of 8 bits are near MIDDLE, which is subtracted already.
        middle = zeros.mT.to(work.dtype).sub_(MIDDLE)
        work.addcmul_(x.sum(1, keepdim=True, dtype=work.dtype), middle, value=-1)
    scales = scales.mT.to(work.dtype)
    if bias is None:
        work *= scales
    else:
        torch.addcmul(bias.to(work.dtype), work, scales, out=work)
    return work.to(x.dtype)


def _by_expanded_blocks(x: Tensor, codes: QuantizedCodes, bias: Tensor | None) -> Tensor:
    y = x.new_empty(len(x), len(codes.scales))
    for block in blocks_of(len(codes.scales), x.shape[1]):
        weight = native.expand(codes, block, memory("weight", x.dtype, len(codes.scales[block]), x.shape[1]))
        if bias is None:
            torch.mm(x, weight.mT, out=y[:, block])
        else:
            torch.addmm(bias[block], x, weight.mT, out=y[:, block])
    return y


def _scaled_first(x: Tensor, codes: QuantizedCodes, bias: Tensor | None) -> Tensor:
    _, bits, scales, zeros, group_size = codes
    n, columns = x.shape
    rows, dtype = len(scales), x.dtype
    # In half precision a product with a rounded scale would lose a digit, and float16 would overflow.
    exact = dtype in (torch.float32, torch.float64)
    scales = scales.to(dtype if exact else torch.float32)
    y = x.new_empty(n, rows)
    for block in blocks_of(rows, columns):
        weight = scaled_rows(codes, block, columns, scales, scales.dtype, subtracts_zeros=not exact)
        if weight.dtype is not dtype:
            weight = memory("rounded", dtype, *weight.shape).copy_(weight)
        if bias is None:
            torch.mm(x, weight.mT, out=y[:, block])
        else:
            torch.addmm(bias[block], x, weight.mT, out=y[:, block])
    if exact:
        # Subtract the zero points from the output through the sums of x, because there are few sums. In half precision
        # the difference would lose digits.
        offsets = scales * (zeros.to(dtype).sub_(MIDDLE) if bits == 8 else zeros)
        y.addmm_(_group_sums(x, group_size), offsets.mT, alpha=-1)
    return y


def expanded(codes: QuantizedCodes, columns: int, dtype: torch.dtype) -> Tensor:  # (out, in)
    """Return ``scales * (codes - zeros)`` by groups in new memory, without derivatives."""
    work = dtype if dtype is torch.float64 else torch.float32
    scales = codes.scales.detach().to(work)
    result = torch.empty(len(scales), columns, dtype=dtype, device=codes.packed.device)
    if native.takes(codes, dtype):
        return native.expand(codes, slice(0, len(result)), result)
    for block in blocks_of(*result.shape):
        weight = scaled_rows(codes, block, columns, scales, work, out=result[block] if dtype is work else None)
        if dtype is not work:
            result[block].copy_(weight)
    return result


def scaled_rows(
    codes: QuantizedCodes,
    rows: slice,
    columns: int,
    scales: Tensor,  # (out, groups)
    dtype: torch.dtype,
    *,
    subtracts_zeros: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # (rows, in)
    """Return ``scales * (codes - zeros)``, or ``scales * codes``, of some rows, in ``out`` or in reused memory."""
    integers = integers_of(codes, rows, columns, subtracts_zeros=subtracts_zeros)
    weight = (memory("weight", dtype, *integers.shape) if out is None else out).copy_(integers)
    if codes.bits == 8 and subtracts_zeros:
        _by_groups(Tensor.sub_, weight, codes.zeros[rows].to(dtype).sub_(MIDDLE), codes.group_size)
    _by_groups(Tensor.mul_, weight, scales[rows], codes.group_size)
    return weight


def blocks_of(rows: int, columns: int) -> list[slice]:
    """Return blocks of about the same size, because a product with few rows takes as long as a product with many."""
    count = max(1, -(-rows * columns // _BLOCK))
    step = -(-rows // count)
    return [slice(start, start + step) for start in range(0, rows, step)]


def integers_of(
    codes: QuantizedCodes, rows: slice, columns: int, *, subtracts_zeros: bool = True
) -> Tensor:  # (rows, in) int8
    """Return some rows of the codes minus their zero points, or minus MIDDLE for 8 bits, which could overflow."""
    packed = codes.packed[rows]
    if codes.bits == 8:
        return packed.view(torch.int8)
    work = memory("codes", torch.uint8, 2 * len(packed) * (columns + 71))
    integers = unpack_codes(packed, codes.bits, columns, work)
    integers = integers.view(torch.int8)
    if subtracts_zeros:
        _by_groups(Tensor.sub_, integers, codes.zeros[rows].view(torch.int8), codes.group_size)
    return integers


def _aligned(tensor: Tensor, multiple: int) -> Tensor:
    """Return the tensor, or a copy, contiguous and at an address that is a multiple of ``multiple`` bytes.

    torch's 8-bit kernel assumes aligned addresses and ends the process where they are not (torch 2.13, AVX-512).
    Tensors that are mapped from a file, for example by transformers, can have any address.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % multiple == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def memory(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a buffer of this thread, which is reused by name and not cleared."""
    buffer = getattr(_buffers, name, None)
    entries = math.prod(shape)
    size = entries * dtype.itemsize
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # An inference tensor could not be written outside of inference mode.
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        if entries <= 4 * _BLOCK:  # A buffer for longer rows is not kept.
            setattr(_buffers, name, buffer)
    return buffer[:size].view(dtype).view(shape)


def _by_groups(operation: Callable[[Tensor, Tensor], Tensor], weight: Tensor, values: Tensor, group_size: int) -> None:
    """Apply an operation in place to each group of columns and the value of that group."""
    if values.shape[1] == 1:
        operation(weight, values)
        return
    full = weight.shape[1] // group_size
    operation(weight[:, : full * group_size].unflatten(1, (full, group_size)), values[:, :full, None])
    if full < values.shape[1]:  # The last group is smaller.
        operation(weight[:, full * group_size :], values[:, full:])


def _group_sums(x: Tensor, group_size: int) -> Tensor:  # (n, in) -> (n, groups)
    full_columns = x.shape[1] // group_size * group_size
    sums = x[:, :full_columns].unflatten(1, (full_columns // group_size, group_size)).sum(-1)
    return sums if full_columns == x.shape[1] else torch.cat((sums, x[:, full_columns:].sum(1, keepdim=True)), 1)

"""A second copy of codes of 4 bits, in the order of torch's kernel, for products with few rows in bfloat16."""

__all__ = ["PackedCodes", "why_not_packed"]

import torch
from torch import Tensor

from .._torch import convert_to_int4, int4_weight_mm, version_of
from ..ops.quantized_operands import QuantizedCodes
from ..reference.codes import unpack_codes

_GROUP_SIZES = (32, 64, 128, 256)  # the group sizes that the kernel takes
_MOST_ROWS = 32  # With more rows, an expanded weight is faster.
_MIDDLE = 8  # is subtracted from the codes by the kernel


def why_not_packed(codes: QuantizedCodes | None, columns: int) -> str | None:
    """Return why torch's kernel does not take a weight, or None if it does.

    Args:
        codes: The codes of the weight, or None if it has none.
        columns: Number of inputs.
    """
    if codes is None or codes.bits != 4:
        return f"it has codes of 4 bits and this layer bits={codes and codes.bits}"
    if codes.group_size not in _GROUP_SIZES or columns % codes.group_size:
        return (
            f"its groups are whole, of {_GROUP_SIZES} columns, and here group_size={codes.group_size} of {columns} "
            "columns"
        )
    if len(codes.packed) % 16:
        return f"the outputs must be a multiple of 16, and here are {len(codes.packed)}"
    return None


class PackedCodes:
    """Codes as torch's kernel for 4 bits reads them, with scales and zero points, all of one version of the tensors.

    Args:
        codes: Codes that the kernel takes, see :func:`why_not_packed`.
    """

    def __init__(self, codes: QuantizedCodes) -> None:
        packed, bits, scales, zeros, group_size = codes
        self._versions = _versions(codes)
        self._group_size = group_size
        integers = unpack_codes(packed, bits, scales.shape[1] * group_size).to(torch.int32)
        self._codes = convert_to_int4(integers)
        steps = scales.detach().mT.float()
        # The kernel would round scale * zero point to bfloat16, an error that all columns of a group share.
        self._scales = torch.stack((steps, torch.zeros_like(steps)), -1).to(torch.bfloat16)
        self._offsets = steps * (zeros.mT.float() - _MIDDLE)

    def is_copy_of(self, codes: QuantizedCodes) -> bool:
        """Return whether this is a copy of these tensors in their current versions."""
        return self._versions == _versions(codes)

    @staticmethod
    def is_best_for(x: Tensor, codes: QuantizedCodes) -> bool:
        """Return whether the kernel is fastest for this input, takes these scales, and the tensors count writes."""
        if x.dtype is not torch.bfloat16 or codes.scales.dtype is not torch.bfloat16 or not 0 < len(x) <= _MOST_ROWS:
            return False
        if any(tensor.is_inference() for tensor in (codes.packed, codes.zeros, codes.scales)):
            return False
        return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # The kernel is slow on other processors.

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:  # (n, in) -> (n, out)
        """Return ``x Q^T + bias``, without gradients."""
        x = x.contiguous()  # required by the kernel
        y: Tensor = int4_weight_mm(x, self._codes, self._group_size, self._scales).float()
        sums = x.unflatten(1, (-1, self._group_size)).sum(-1, dtype=torch.float32)
        y.addmm_(sums, self._offsets, alpha=-1)
        if bias is not None:
            y += bias
        return y.to(x.dtype)


def _versions(codes: QuantizedCodes) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), version_of(tensor)) for tensor in (codes.packed, codes.zeros, codes.scales)]

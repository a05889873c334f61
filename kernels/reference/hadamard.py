"""The Walsh-Hadamard transform as products with small Hadamard matrices, in plain torch."""

__all__ = ["hadamard_transform"]

import torch
from torch import Tensor

# Bits of an index that one product transforms.
_RADIX_BITS = 4


def hadamard_transform(x: Tensor, *, differentiable: bool = False) -> Tensor:  # (*batch, N, n) -> the same
    r"""Compute :func:`panther.kernels.hadamard_transform` in torch.

    :math:`H_{ab} = H_a \otimes H_b`, so it is a few products with a Hadamard matrix of at most 16 rows, each one pass
    over the data. The products alternate between two buffers, unless autograd or torch.func has to differentiate them
    (``differentiable``).
    """
    N, n = x.shape[-2:]
    bits = N.bit_length() - 1
    stages = -(-bits // _RADIX_BITS)
    if not stages or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    source = x.contiguous()
    buffers = [None if differentiable else torch.empty_like(source) for _ in range(min(stages, 2))]
    width = N * n
    for stage in range(stages):
        radix = 1 << (bits * (stage + 1) // stages - bits * stage // stages)
        width //= radix
        H = _hadamard_matrix(radix, x.dtype, x.device)
        shape = (-1, radix) if width == 1 else (-1, radix, width)
        operands = (source.view(shape), H) if width == 1 else (H, source.view(shape))
        buffer = buffers[stage % 2]
        source = torch.matmul(*operands, out=None if buffer is None else buffer.view(shape)).view(x.shape)
    return source


def _hadamard_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    H = torch.ones(1, 1, dtype=dtype, device=device)
    while len(H) < n:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    return H

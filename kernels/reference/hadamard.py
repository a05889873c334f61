"""The Walsh-Hadamard transform as products with small Hadamard matrices, in plain torch."""

__all__ = ["hadamard_transform"]

import torch
from torch import Tensor

# Bits of an index that one product deals with.
_RADIX_BITS = 4


def hadamard_transform(x: Tensor) -> Tensor:  # (*batch, N, n) -> the same
    r"""The Walsh-Hadamard transform over dimension -2, unnormalised, in natural order: :math:`y_i = \sum_j \pm x_j`.

    The sign is that of :math:`(-1)^{\mathrm{popcount}(i \,\&\, j)}`. :math:`H_{ab} = H_a \otimes H_b`, so it is a few
    products with a Hadamard matrix of at most 16 rows, each one pass over the data.

    Args:
        x: Shape ``(*batch, N, n)``, N a power of two.

    Raises:
        ValueError: If N is no power of two.

    Cost: ``2 r log(N) / log(r)`` flops an entry with r = 16, ``log(N) / log(r)`` passes, two buffers of the size of x.

    Example:
        >>> hadamard_transform(torch.tensor([[1.0], [2.0]]))
        tensor([[ 3.],
                [-1.]])
    """
    N, n = x.shape[-2:]
    if N < 1 or N & (N - 1):
        raise ValueError(f"the length {N} of a Hadamard transform must be a power of two: pad with zeros")
    bits = N.bit_length() - 1
    stages = -(-bits // _RADIX_BITS)
    if not stages or not x.numel():
        return x.clone()
    source = x.contiguous()
    buffers = [torch.empty_like(source) for _ in range(min(stages, 2))]
    width = N * n
    for stage in range(stages):
        radix = 1 << (bits * (stage + 1) // stages - bits * stage // stages)
        width //= radix
        H = _hadamard_matrix(radix, x.dtype, x.device)
        target = buffers[stage % 2]
        if width == 1:
            torch.matmul(source.view(-1, radix), H, out=target.view(-1, radix))
        else:
            torch.matmul(H, source.view(-1, radix, width), out=target.view(-1, radix, width))
        source = target
    return source


def _hadamard_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    H = torch.ones(1, 1, dtype=dtype, device=device)
    while len(H) < n:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)))
    return H

"""The Walsh-Hadamard transform as products with small Hadamard matrices, in plain torch."""

__all__ = ["hadamard_transform"]

import torch
from torch import Tensor

from .._torch import are_transforms_active, is_differentiated_forward
from .attention import no_autocast

# Bits of an index that one product transforms.
_RADIX_BITS = 4


def hadamard_transform(x: Tensor) -> Tensor:  # (*batch, N, n) -> the same
    r"""Return the Walsh-Hadamard transform over dimension -2, unnormalised and in natural order.

    The result is :math:`y = H x` with :math:`H_{ij} = (-1)^{\mathrm{popcount}(i \,\&\, j)}`. H is symmetric and
    :math:`H^2 = N I`, so that its derivatives are transforms again. B. J. Fino and V. R. Algazi, "Unified matrix
    treatment of the fast Walsh-Hadamard transform", IEEE Trans. Comput. C-25 (1976), doi:10.1109/TC.1976.1674569.

    As :math:`H_{ab} = H_a \otimes H_b`, it is a few products with a Hadamard matrix of at most 16 rows.

    Args:
        x: Shape ``(*batch, N, n)``, N a power of two, with any strides.

    Returns:
        A contiguous tensor of the shape and dtype of x. In half precision sums are rounded once for every four bits of
        the index.

    Raises:
        ValueError: If N is not a power of two, or x has fewer than two dimensions.

    Cost: ``log(N) / log(16)`` products, a read and a write of x each, and two buffers of the size of x.

    Example:
        >>> hadamard_transform(torch.tensor([[1.0], [2.0]]))
        tensor([[ 3.],
                [-1.]])
    """
    if x.ndim < 2:
        raise ValueError(f"a Hadamard transform takes (*batch, N, n), and x has shape {tuple(x.shape)}: use x[:, None]")
    N, n = x.shape[-2:]
    if N < 1 or N & (N - 1):
        raise ValueError(f"the length {N} of a Hadamard transform must be a power of two: pad with zeros")
    bits = N.bit_length() - 1
    stages = -(-bits // _RADIX_BITS)
    if not stages or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    source = x.contiguous()
    # The products alternate between two buffers, unless they are traced or differentiated.
    is_recorded = torch.compiler.is_compiling() or are_transforms_active() or is_differentiated_forward()
    is_recorded = is_recorded or (torch.is_grad_enabled() and x.requires_grad)
    buffers = [None if is_recorded else torch.empty_like(source) for _ in range(min(stages, 2))]
    width = N * n
    with no_autocast(x.device):
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

"""The Walsh-Hadamard transform, by a Triton kernel on a GPU and by torch elsewhere."""

__all__ = ["hadamard_transform"]

from collections.abc import Callable

import torch
from torch import Tensor

from .. import reference
from ..selection import use_triton
from .library import define, needs_torch, refused_dtype


def hadamard_transform(x: Tensor) -> Tensor:  # (*batch, N, n) -> the same
    r"""Return the Walsh-Hadamard transform over dimension -2, unnormalised and in natural order.

    The result is :math:`y = H x` with :math:`H_{ij} = (-1)^{\mathrm{popcount}(i \,\&\, j)}`. H is symmetric and
    :math:`H^2 = N I`, so that its derivatives are transforms again. B. J. Fino and V. R. Algazi, "Unified matrix
    treatment of the fast Walsh-Hadamard transform", IEEE Trans. Comput. C-25 (1976), doi:10.1109/TC.1976.1674569.

    Args:
        x: Shape ``(*batch, N, n)``, N a power of two, with any strides.

    Returns:
        A contiguous tensor of the shape and dtype of x. In half precision sums are taken in float32, and rounded at
        most once for every four bits of the index.

    Raises:
        ValueError: If N is not a power of two, or x has fewer than two dimensions.
        RuntimeError: If ``PANTHER_KERNELS=triton``, and x is neither float32, float16 nor bfloat16.

    Cost: on a GPU one read and one write of x for N up to 1024 (with n = 1 up to 8192, in half precision 16384), two
    reads and writes up to 2^20, and no memory except for the result. In torch, ``log(N) / log(16)`` products with
    matrices of 16 rows, a read and a write each, and two buffers of the size of x.

    Example:
        >>> hadamard_transform(torch.tensor([[1.0], [2.0]]))
        tensor([[ 3.],
                [-1.]])
    """
    if x.ndim < 2:
        raise ValueError(f"a Hadamard transform takes (*batch, N, n), and x has shape {tuple(x.shape)}: use x[:, None]")
    N = x.shape[-2]
    if N < 1 or N & (N - 1):
        raise ValueError(f"the length {N} of a Hadamard transform must be a power of two: pad with zeros")
    if not torch.compiler.is_compiling() and needs_torch():
        return reference.hadamard_transform(x, differentiable=True)
    return _hadamard_transform(x)


def _transform(x: Tensor) -> Tensor:
    if not use_triton("hadamard_transform", x.device, refused_dtype(x.dtype)):
        return reference.hadamard_transform(x)
    from .._triton import hadamard

    return hadamard.hadamard_transform(x)


_hadamard_transform: Callable[[Tensor], Tensor] = define(
    "hadamard_transform(Tensor x) -> Tensor",
    _transform,
    lambda x: x.new_empty(x.shape),
    backward=lambda ctx, grad: _hadamard_transform(grad),
    vmap=lambda info, in_dims, x: (_hadamard_transform(x.movedim(in_dims[0], 0)), 0),
)

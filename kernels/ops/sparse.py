"""Sparse times dense, by a Triton kernel that gathers on a GPU and by torch's CSR product elsewhere."""

__all__ = ["csr_matmul"]

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import reference
from .._torch import is_differentiated_forward
from ..selection import use_triton
from .library import define

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INDEX, _VALUE = (torch.int64, torch.int32), (torch.float32, torch.float64)


def csr_matmul(
    starts: Tensor,  # (d + 1,)
    index: Tensor,  # (nnz,)
    value: Tensor,  # (nnz,)
    A: Tensor,  # (*batch, m, n)
) -> Tensor:  # (*batch, d, n)
    r"""Return ``S @ A`` for a sparse S of shape (d, m) in compressed sparse row format, deterministically.

    Row i of the result is :math:`\sum_k \mathrm{value}_k A_{\mathrm{index}_k}` over k from ``starts[i]`` up to
    ``starts[i + 1]``, a gather without atomics. With a few random signs in every column of S this applies a sparse
    Johnson-Lindenstrauss transform (D. M. Kane and J. Nelson, J. ACM 61, 2014, doi:10.1145/2559902).

    Args:
        starts: Index of the first entry of each row, followed by the number of entries; ascending, int64 or int32.
        index: Column of each entry, in ``[0, m)``, int64 or int32.
        value: The entries, float32 or float64.
        A: Floating, with any strides; the kernel does not copy ``x.mT``.

    The values of ``starts`` and ``index`` are not checked, because the check would take a pass over them. Values out of
    range read memory outside of the operands.

    Returns:
        A contiguous tensor of shape ``(*batch, d, n)`` in the dtype of A, summed in float32, or in float64 if A or
        the entries are float64.

    Raises:
        ValueError: If A has fewer than two dimensions, another operand does not have one, ``starts`` is empty, or the
            numbers of indices and entries differ.
        TypeError: If ``starts`` or ``index`` is not int64 or int32, ``value`` not float32 or float64, or A not real and
            floating.
        NotImplementedError: If it is differentiated. The gradient, :math:`S^T` times the gradient of the
            result, needs the transpose in this format. :class:`panther.sketch.SparseSketch` stores it and is
            differentiable.

    Cost: ``2 nnz n`` flops. On a GPU each entry gathers one row of A, from the second-level cache if a slab of A, of m
    rows of 128 bytes, stays there; from memory A is then read once.

    Example:
        >>> starts, index = torch.tensor([0, 2, 2]), torch.tensor([0, 2])
        >>> csr_matmul(
        ...     starts,
        ...     index,
        ...     torch.tensor([1.0, -1.0]),
        ...     torch.tensor([[5.0], [6.0], [7.0]]),
        ... )
        tensor([[-2.],
                [ 0.]])
    """
    if A.ndim < 2:
        raise ValueError(f"csr_matmul takes A of shape (*batch, m, n), not {tuple(A.shape)}: use A[:, None]")
    if not starts.ndim == index.ndim == value.ndim == 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in (starts, index, value))
        raise ValueError(
            f"starts, index and value of csr_matmul must have one dimension, and have shapes {shapes}: flatten them"
        )
    if not starts.numel() or index.numel() != value.numel():
        raise ValueError(
            f"csr_matmul takes starts of d + 1 numbers and as many values as indices, not {starts.numel()}, "
            f"{value.numel()} and {index.numel()}: give all three of one matrix"
        )
    if starts.dtype not in _INDEX or index.dtype not in _INDEX or value.dtype not in _VALUE or A.dtype not in _DTYPES:
        raise TypeError(
            "csr_matmul takes int64 or int32 starts and index, float32 or float64 values and a floating A, not "
            f"{starts.dtype}, {index.dtype}, {value.dtype} and {A.dtype}: cast them"
        )
    if is_differentiated_forward() and forward_ad.unpack_dual(A).tangent is not None:
        raise NotImplementedError("csr_matmul has no forward-mode derivative: use panther.sketch.SparseSketch")
    return _csr_matmul(starts, index, value, A)


def _multiply(starts: Tensor, index: Tensor, value: Tensor, A: Tensor) -> Tensor:
    if not use_triton("csr_matmul", A.device):  # The reference takes every dtype that csr_matmul does.
        return reference.csr_matmul(starts, index, value, A)
    from .._triton import sparse

    return sparse.csr_matmul(starts.contiguous(), index.contiguous(), value.contiguous(), A)


def _backward(ctx: Any, grad: Tensor) -> Any:
    raise NotImplementedError(
        "csr_matmul has no backward, for which it would need the transpose of S in CSR: use panther.sketch.SparseSketch"
    )


def _vmap(info: Any, in_dims: tuple[Any, ...], starts: Tensor, index: Tensor, value: Tensor, A: Tensor) -> Any:
    if any(dim is not None for dim in in_dims[:3]):
        raise NotImplementedError("csr_matmul is batched over A alone, not over sparse matrices: map A, or loop")
    return _csr_matmul(starts, index, value, A.movedim(in_dims[3], 0)), 0


_csr_matmul = define(
    "csr_matmul(Tensor starts, Tensor index, Tensor value, Tensor A) -> Tensor",
    _multiply,
    lambda starts, index, value, A: A.new_empty(*A.shape[:-2], starts.shape[0] - 1, A.shape[-1]),
    backward=_backward,
    vmap=_vmap,
)

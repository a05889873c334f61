"""A sparse matrix in CSR times a dense one, in plain torch."""

__all__ = ["csr_matmul", "csr_tensor"]

import warnings

import torch
from torch import Tensor

_csr_allowed = False


def csr_matmul(
    starts: Tensor,  # (d + 1,)
    index: Tensor,  # (nnz,)
    value: Tensor,  # (nnz,)
    A: Tensor,  # (*batch, m, n)
) -> Tensor:  # (*batch, d, n)
    """Compute :func:`panther.kernels.csr_matmul` in torch, as one product of two matrices."""
    *batch, m, n = A.shape
    d = starts.numel() - 1
    if not (A.numel() and index.numel()):
        return A.new_zeros(*batch, d, n)
    dtype = torch.promote_types(torch.promote_types(A.dtype, value.dtype), torch.float32)
    matrix = csr_tensor(starts, index.to(starts.dtype), value.to(dtype), (d, m))
    with torch.autocast(A.device.type, enabled=False):
        product = matrix @ A.movedim(-2, 0).reshape(m, -1).to(dtype)
    return product.reshape(d, *batch, n).movedim(0, -2).to(A.dtype).contiguous()


def csr_tensor(starts: Tensor, index: Tensor, value: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return torch's CSR tensor, unchecked and without torch's warning that the layout is in beta."""
    global _csr_allowed
    if not _csr_allowed:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support", category=UserWarning)
            none = torch.zeros(1, dtype=torch.int64, device="cpu")
            torch.sparse_csr_tensor(none, none[:0], none[:0], (0, 1), check_invariants=False)
        _csr_allowed = True
    return torch.sparse_csr_tensor(starts, index, value, shape, device=value.device, check_invariants=False)

"""A sparse matrix in CSR times a dense one, in plain torch."""

__all__ = ["coo_tensor", "csr_matmul", "csr_tensor"]

import warnings

import torch
from torch import Tensor

_has_warned = False


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
    """Return torch's CSR tensor, unchecked and without torch's warnings."""
    _let_torch_warn()
    return torch.sparse_csr_tensor(starts, index, value, shape, device=value.device, check_invariants=False)


def coo_tensor(index: Tensor, value: Tensor, shape: tuple[int, int], *, is_coalesced: bool = False) -> Tensor:
    """Return torch's COO tensor, unchecked and without torch's warnings."""
    _let_torch_warn()
    return torch.sparse_coo_tensor(index, value, shape, check_invariants=False, is_coalesced=is_coalesced or None)


def _let_torch_warn() -> None:
    """Let torch give two warnings unseen, which it gives once: CSR is in beta, and in 2.11 nothing is checked."""
    global _has_warned
    if not _has_warned:
        with warnings.catch_warnings():
            for message in ("Sparse CSR tensor support", "Sparse invariant checks"):
                warnings.filterwarnings("ignore", message=message, category=UserWarning)
            none = torch.zeros(1, dtype=torch.int64, device="cpu")
            torch.sparse_csr_tensor(none, none[:0], none[:0], (0, 1), check_invariants=False)
        _has_warned = True

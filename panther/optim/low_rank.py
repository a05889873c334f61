r"""Orthogonalised updates of low rank, from one step of power iteration, after Dion.

With the momentum :math:`B = M + G` (m, n) and the basis Q (n, r) of the step before,

.. math:: P = \mathrm{orth}(B Q), \quad R = B^T P, \quad M \leftarrow B - (1 - \mu) P R^T, \quad
          Q \leftarrow R \text{ with columns of norm 1},

and :math:`P Q^T` is the update. What it leaves out stays in the momentum. The momentum is sharded as its parameter, and
only products with r columns are sent: r (m + n) numbers of a matrix, or r (n + 2 r) if each rank has complete rows. The
products and the messages are in float64. In float32, columns of P would be wrong by the rounding error of the largest
column, and steps would depend on the layout.

K. Ahn, B. Xu, N. Abreu and J. Langford, "Dion: Distributed Orthonormalized Updates" (2025), arXiv:2504.05295.
"""

__all__ = ["LowRankUpdate", "mean_bytes", "update_low_rank"]

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panther.linalg.orthogonal import orthonormalize
from panther.optim.matrix_updates import MatrixUpdate, local_part, placed_like
from panther.sketch import GaussianSketch

if TYPE_CHECKING:
    from panther.optim.shards import ShardLayout

_SEED = 0  # of the basis of the first step, which is the same for all matrices of n columns
_SHIFT = 1e-14  # times the trace of a Gram matrix: Cholesky's method then exists for deficient matrices
_NOISE = 1e-7  # Columns of R below this share of the largest one are rounding error of a momentum in float32.
_ROUNDS = 2  # of CholeskyQR: the second round repairs what the shift did to columns of more than 1e-7 of the norm

_Sum = Callable[[Tensor], Generator[None, None, Tensor]]


class LowRankUpdate(MatrixUpdate):
    """The next update of low rank of a parameter; see :class:`panther.optim.matrix_updates.MatrixUpdate`.

    Attributes:
        basis: Q of this rank's matrices, ``(count, n, r)``, complete on every rank that has a shard of a matrix.
    """

    def __init__(
        self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any], layout: "ShardLayout | None" = None
    ) -> None:
        # The basis belongs to the shorter side in every layout, so that every layout has the same state.
        m, n = parameter.shape[-2:]
        super().__init__(parameter, group, state, None if layout is None else layout.oriented(m < n))
        self.rank: int = group["rank"]
        self.batch_key = (*self.batch_key, self.rank)
        if "basis" not in state:
            state["basis"] = self._first_basis(parameter)
        # It is sharded over experts as the parameter is, and otherwise complete on every rank.
        state["basis"] = placed_like(parameter, state["basis"], 0 if parameter.dim() == 3 else -1)
        basis: Tensor = local_part(state["basis"])
        self.basis = basis if basis.dim() == 3 else basis[None]

    def accumulate(self) -> Tensor:  # (count, rows, columns) of this rank
        """Add the gradient to the momentum, and return the sum, tall after a transposition."""
        self._momentum.add_(self._gradient)
        return self._as_tall(self._momentum)

    def finish(
        self,
        P: Tensor,  # (count, rows, r)
        R: Tensor,  # (count, n, r)
        columns: range,
    ) -> None:
        """Take the step: change the momentum, the basis and the parameter.

        Args:
            P: The rows of the orthonormal columns that this rank has.
            R: The complete products of the momentum and P.
            columns: The columns that this rank has.
        """
        decay = self._group["momentum"]
        norms = torch.linalg.vector_norm(R, dim=-2, keepdim=True)
        # A column of a deficient matrix is rounding error. It adds nothing, and its direction stays in the basis.
        exists = norms > _NOISE * norms.amax(-1, keepdim=True)
        basis = torch.where(exists, R / torch.where(exists, norms, 1), self.basis)
        here = slice(columns.start, columns.stop)
        feedback = P @ R[:, here].mT
        update = (P * exists) @ basis[:, here].mT
        dtype = self._momentum.dtype
        self._as_tall(self._momentum).sub_(((1 - decay) * feedback).to(dtype))
        self.basis.copy_(basis)
        self.apply(update.to(dtype))

    def _first_basis(self, parameter: Tensor) -> Tensor:
        n = self.shape[1]
        gaussian = GaussianSketch(self.rank, n, seed=_SEED, dtype=torch.float64, device="cpu").dense().T
        basis = orthonormalize(gaussian.contiguous()).to(local_part(parameter).device, parameter.dtype)
        complete = basis.expand(*parameter.shape[:-2], n, self.rank).clone()
        if not hasattr(parameter, "to_local"):
            return complete
        from torch.distributed.tensor import DTensor, Replicate

        mesh = parameter.device_mesh  # type: ignore[attr-defined]
        return DTensor.from_local(complete, mesh, [Replicate()] * mesh.ndim, run_check=False)


def update_low_rank(batch: Sequence[Any], sums: _Sum | None = None) -> Generator[None, None, None]:
    """Update matrices of one shape, layout and rank; yield while messages travel.

    Args:
        batch: The updates, of class :class:`LowRankUpdate`.
        sums: A function that adds a tensor over the ranks that share the matrices; None if they are complete.
    """
    layout, (m, n) = batch[0].layout, batch[0].shape
    rows, columns = (range(m), range(n)) if layout is None else (layout.rectangle.rows, layout.rectangle.columns)
    has_full_rows = layout is None or layout.has_full_rows
    B = torch.cat([update.accumulate() for update in batch]).double()
    Q = torch.cat([update.basis for update in batch]).double()
    Y = B @ Q[:, columns.start : columns.stop]
    if not has_full_rows:
        assert sums is not None
        Y = yield from sums(_padded(Y, rows, m))
    # Complete Y on every rank need no further sums.
    P = yield from _orthonormal(Y, sums if has_full_rows else None)
    if not has_full_rows:
        P = P[:, rows.start : rows.stop]
    R = B.mT @ P
    if sums is not None:
        R = yield from sums(_padded(R, columns, n))
    counts = [update.count for update in batch]
    for update, P_of_update, R_of_update in zip(batch, P.split(counts), R.split(counts), strict=True):
        update.finish(P_of_update, R_of_update, columns)


def mean_bytes(layout: "ShardLayout", rank: int) -> float:
    """Return the bytes that one of the ranks that share a matrix sends for an update of a rank, by rings."""
    m, n = layout.shape
    numbers = n * rank + (_ROUNDS * rank**2 if layout.has_full_rows else m * rank)
    return 2 * (layout.ranks - 1) / layout.ranks * numbers * torch.float64.itemsize


def _orthonormal(
    Y: Tensor,  # (batch, rows, r) of this rank
    sums: _Sum | None,
) -> Generator[None, None, Tensor]:
    """Return the rows of an orthonormal basis of Y by CholeskyQR; columns of less than 1e-9 of the norm stay small.

    The Gram matrices are sums over the ranks. T. Fukaya and others, "Shifted Cholesky QR for computing the QR
    factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42 (2020).
    """
    eye = torch.eye(Y.shape[-1], dtype=Y.dtype, device=Y.device)
    for _ in range(_ROUNDS):
        gram = Y.mT @ Y
        if sums is not None:
            gram = yield from sums(gram)
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        shift = torch.where(trace > 0, _SHIFT * trace, 1)
        R, _ = torch.linalg.cholesky_ex(gram + shift * eye, upper=True)
        Y = torch.linalg.solve_triangular(R, Y, upper=True, left=False)
    return Y


def _padded(part: Tensor, places: range, size: int) -> Tensor:  # (batch, places, r) -> (batch, size, r)
    """Return zeros with the rows of this rank in their places."""
    if len(places) == size:
        return part.contiguous()
    padded = part.new_zeros(len(part), size, part.shape[-1])
    padded[:, places.start : places.stop] = part
    return padded

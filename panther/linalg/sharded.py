"""Matrices whose rows are on several ranks: what drivers multiply by, without gathering them."""

__all__ = ["RowSharded", "ShardedOperand", "as_square"]

import sys
from typing import Any

import torch
from torch import Tensor

from panther.errors import ShapeError
from panther.linalg._ranks import Group, Ranks
from panther.linalg.operand import SHARDED_KINDS, Operand, as_operand, check_finite
from panther.sketch import SignSketch


class RowSharded:
    r"""A matrix (m, n) whose rows are sharded over the ranks of a process group, in the order of ranks.

    All drivers except ``interpolative`` and ``rp_cholesky`` accept it, called on every rank with equal arguments. What
    has m rows (U, Q, and b of least squares) has the rows of this rank; the rest (S, V, B, R, P, x, and all vectors of
    square matrices) is replicated. The number of ranks changes results by rounding only. A DTensor that is ``Shard(0)``
    over a mesh of one dimension is accepted as ``RowSharded(A.to_local(), A.device_mesh.get_group())``.

    Rows are never sent: sums of n x l numbers are, l the columns of a block, and of d x l, d the columns of all blocks;
    a symmetric A sends its products, n x l. ``n_iter="auto"`` is 4. Instead of a sketch, ``cqrrpt`` and
    ``sketch_lstsq`` factor the rows of each rank, which have to be dense, by QR, and then send n x n triangles.

    Args:
        local_rows: The rows of this rank (rows, n), also none: a dense or sparse matrix, or one that only has products.
        group: A process group of torch.distributed; None is the default group, or this process alone without one.

    Attributes:
        shape: (m, n), with the rows of all ranks.

    Raises:
        DistributedError: If the number of columns or the dtype differs between ranks. Drivers raise it if arguments do.
            Every rank raises the same error, also the error of one rank, such as b of a wrong shape.

    Example:
        >>> import panther as pr
        >>> A = pr.linalg.RowSharded(torch.eye(4))  # this rank's share
        >>> U, S, V = pr.linalg.randomized_svd(A, 2, seed=0)
        >>> U.shape, S
        (torch.Size([4, 2]), tensor([1., 1.]))
    """

    def __init__(self, local_rows: Any, group: Group = None) -> None:
        self.ranks = Ranks(group)
        with self.ranks.together():
            self._local = as_operand(local_rows, "local_rows", batched=False)
            num_rows, n = self._local.shape
            self.ranks.agree("columns and dtype of local_rows", f"{n} columns of {self._local.dtype}")
            sizes = self.ranks.gather(torch.tensor(num_rows)).tolist()
        self._first, self.shape = sum(sizes[: self.ranks.rank]), torch.Size((sum(sizes), n))

    def operand(self) -> "ShardedOperand":
        """Return the matrix as drivers use it."""
        return ShardedOperand(self._local, self.ranks, self.shape, self._first)


class ShardedOperand(Operand):
    """A matrix that is sharded by rows, as drivers use it.

    Attributes:
        local: The rows of this rank.
        gathers: Whether products ``A @ X`` have the rows of all ranks, as drivers of symmetric matrices need them.
    """

    def __init__(self, local: Operand, ranks: Ranks, shape: torch.Size, first: int) -> None:
        self.local, self.ranks, self.gathers, self._first = local, ranks, False, first
        self.A, self.device, self.dtype, self.eps = local.A, local.device, local.dtype, local.eps
        self.shape, self.dense, self.num_rows = shape, None, local.shape[0]

    def matmul(self, X: Tensor) -> Tensor:  # (n, l) -> (rows, l)
        """Return this rank's rows of ``A @ X``, or all of them."""
        Y = self.local.matmul(X)
        if not self.gathers:
            return Y
        product = Y.new_zeros(self.shape[0], Y.shape[1])
        product[self._first : self._first + self.num_rows] = Y
        return self.ranks.sum(product)

    def rmatmul(self, X: Tensor) -> Tensor:  # (rows, l) or (m, l) -> (n, l)
        """Return ``A.mT @ X``, the sum of the products of all ranks."""
        return self.ranks.sum(self.local.accurate_rmatmul(self.rows_of(X)))

    def signs(self, columns: int, seed: int) -> Tensor:  # (rows, columns)
        """Return this rank's rows of a matrix (m, columns) of random signs."""
        S = SignSketch(columns, self.shape[0], seed=seed, scale=False, dtype=self.dtype, device=self.device)
        return S.block(slice(None), range(self._first, self._first + self.num_rows)).mT

    def rows_of(self, Y: Tensor) -> Tensor:
        """Return this rank's rows of a matrix, which has the rows of all ranks or of this one."""
        return Y[self._first : self._first + self.num_rows] if len(Y) == self.shape[0] else Y

    @property
    def values(self) -> Tensor | None:
        """The entries that this rank has."""
        return self.local.values

    def check_finite(self, product: Tensor) -> None:
        """Raise the same ValueError on every rank if the product of one of them has NaN or infinity."""
        if bool(self.ranks.sum((~product.isfinite()).sum())):
            check_finite("A", product if self.values is None else self.values)
            self.ranks.sync()
            raise self._overflow()


def as_square(A: Any, *, batched: bool = True) -> Operand:
    """Return a square matrix as an operand whose products have all rows, or raise ShapeError."""
    operand = as_operand(A, batched=batched)
    if operand.shape[-2] != operand.shape[-1]:
        raise ShapeError(
            f"A, of shape {tuple(operand.shape)}, must be square: use randomized_svd or sketch_lstsq, or pass A.mT @ A"
        )
    if isinstance(operand, ShardedOperand):
        operand.gathers = True
    return operand


def _as_sharded(A: Any) -> RowSharded | None:
    """Return a RowSharded, and a DTensor that is sharded by rows as one; None of anything else."""
    if isinstance(A, RowSharded):
        return A
    module = sys.modules.get("torch.distributed.tensor")  # Without this import there are no DTensors.
    if module is None or not isinstance(A, module.DTensor):
        return None
    if A.device_mesh.ndim != 1 or not A.placements[0].is_shard(0):
        placements = f"has the placements {A.placements} over {A.device_mesh.ndim} dimensions"
        rule = "a DTensor must be sharded by rows over a mesh of one dimension"
        raise ShapeError(f"{rule}, and {placements}: use A.redistribute(placements=[Shard(0)])")
    return RowSharded(A.to_local(), A.device_mesh.get_group())


SHARDED_KINDS.append(_as_sharded)

"""The ranks of a process group: sums of small tensors, and the QR factorisation of a matrix that is sharded by rows."""

__all__ = ["ALONE", "Group", "Ranks", "sharded_qr"]

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from panther.errors import DistributedError

Group: TypeAlias = "torch.distributed.ProcessGroup | None"


class Ranks:
    """The ranks of a group, None for the default group, or for this process alone where there is no group."""

    def __init__(self, group: Group = None, *, alone: bool = False) -> None:
        self.group, self.size, self.rank, self._transport = group, 1, 0, torch.device("cpu")
        if alone or (group is None and not (dist.is_available() and dist.is_initialized())):
            return
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.rank < 0:
            raise DistributedError("this rank is not in the process group: call this on the ranks of the group only")
        if "nccl" in dist.get_backend(group):  # which sends tensors on GPUs only
            self._transport = torch.device("cuda", torch.cuda.current_device())

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        if self.size == 1:
            return x
        total = x.to(self._transport, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total.to(x.device)

    def seed(self, seed: int) -> int:
        """Return the seed of the first rank, because without one every rank draws its own."""
        return int(self.gather(torch.tensor(seed))[0])

    def norm(self, x: Tensor) -> Tensor:
        """Return the root of the sum of squares over the ranks."""
        return x if self.size == 1 else self.sum(x.square()).sqrt()

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape and dtype, stacked along a new first dimension."""
        if self.size == 1:
            return x[None]
        message = x.to(self._transport).contiguous()
        gathered = [torch.empty_like(message) for _ in range(self.size)]
        dist.all_gather(gathered, message, group=self.group)
        return torch.stack(gathered).to(x.device)


ALONE = Ranks(alone=True)


def sharded_qr(X: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:  # (rows, n) -> (rows, r), (r, n), r = min(m, n)
    """Return this rank's rows of Q, and R with a nonnegative diagonal, of a matrix (m, n) that is sharded by rows.

    Q is orthonormal for any rank and condition. A rank sends the n^2 numbers of its own R to every other rank. J.
    Demmel, L. Grigori, M. Hoemmen and J. Langou, "Communication-optimal parallel and sequential QR and LU
    factorizations", SIAM J. Sci. Comput. 34 (2012), doi:10.1137/080731992.
    """
    Q, R = torch.linalg.qr(X.double())
    n = X.shape[1]
    message = torch.nn.functional.pad(R, (0, 1, 0, n - len(R)))
    message[:, n] = len(R)
    triangles = [part[: int(part[:1, n].sum()), :n] for part in ranks.gather(message)]
    first = sum(len(triangle) for triangle in triangles[: ranks.rank])
    outer, R = torch.linalg.qr(torch.cat(triangles))
    signs = torch.where(R.diagonal() < 0, -1.0, 1.0).to(R.dtype)
    Q = Q @ (outer[first : first + Q.shape[1]] * signs)
    return Q.to(X.dtype), (signs[:, None] * R).to(X.dtype)

"""The ranks of a process group: sums of small tensors, and the QR factorisation of a matrix that is sharded by rows."""

__all__ = ["ALONE", "Group", "Ranks", "sharded_qr"]

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from panther.errors import DistributedError, PantherError

Group: TypeAlias = "torch.distributed.ProcessGroup | None"


class Ranks:
    """The ranks of a group, None for the default group, or for this process alone where there is no group."""

    def __init__(self, group: Group = None, *, alone: bool = False) -> None:
        self.group, self.size, self.rank, self._transport = group, 1, 0, torch.device("cpu")
        self._is_waiting = False
        if alone or (group is None and not (dist.is_available() and dist.is_initialized())):
            return
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if self.rank < 0:
            raise DistributedError("this rank is not in the process group: call this on the ranks of the group only")
        if "nccl" in dist.get_backend(group):  # which sends tensors on GPUs only
            self._transport = torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise the same error on every rank if the block fails on one, instead of leaving the others to wait for it.

        Before they send, all ranks ask by :meth:`sync` whether any has failed; a rank that has answers once and leaves.
        """
        try:
            yield
        except Exception as error:
            if "is_common" not in vars(error) and not self._is_waiting:
                self.sync(error)
            raise
        self.sync()

    def sync(self, error: Exception | None = None) -> None:
        """Raise the same error on every rank if one of them has an error."""
        if self.size == 1:
            return
        failed = torch.tensor([error is not None], dtype=torch.uint8, device=self._transport)
        self._is_waiting = True  # This stays True after a timeout, so that nothing waits for the same rank twice.
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        self._is_waiting = False
        if not bool(failed):
            return
        kind: type[Exception] = DistributedError  # Other ranks may not have a user's class.
        if error is not None and (isinstance(error, PantherError) or type(error) in (TypeError, ValueError)):
            kind = type(error)
        answers = self._gather_objects(None if error is None else (kind, str(error)))
        kind = next(answer[0] for answer in answers if answer)
        message = self._by_rank([answer and answer[1] for answer in answers])
        common: Exception = error if error is not None and message == str(error) else kind(message)
        vars(common)["is_common"] = True
        if common is error:
            raise error
        raise common from error

    def agree(self, noun: str, description: str) -> None:
        """Raise DistributedError on every rank unless all give the same description."""
        self.sync()
        message = self._by_rank(self._gather_objects(description))
        if message != description:
            rule = f"{noun} must be equal on all ranks, and are not: {message}"
            raise DistributedError(f"{rule}: use the same on every rank")

    def _gather_objects(self, value: Any) -> list[Any]:
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _by_rank(self, texts: list[str | None]) -> str:
        """Return the text of all ranks, or the texts that are not None with their ranks in the default group."""
        if len(set(texts)) == 1:
            return str(texts[0])
        ranks = dist.get_process_group_ranks(self.group)
        by_text: dict[str, list[str]] = {}
        for rank, text in zip(ranks, texts, strict=True):
            if text is not None:
                by_text.setdefault(text, []).append(f"rank {rank}")
        return "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        if self.size == 1:
            return x
        self.sync()
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
        self.sync()
        message = x.to(self._transport).contiguous()
        gathered = [torch.empty_like(message) for _ in range(self.size)]
        dist.all_gather(gathered, message, group=self.group)
        return torch.stack(gathered).to(x.device)


ALONE = Ranks(alone=True)


def sharded_qr(X: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:  # (rows, n) -> (rows, r), (r, n), r = min(m, n)
    """Return this rank's rows of Q, and R with a nonnegative diagonal, of a matrix (m, n) that is sharded by rows.

    Q is orthonormal for any rank and condition. A rank sends the n^2 numbers of its own R to every other rank. Demmel,
    Grigori, Hoemmen and Langou (2012), doi:10.1137/080731992.
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

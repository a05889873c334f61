"""Projections: for matrices whose optimizer needs a projection of the gradient, only the projection is sent."""

__all__ = ["Projected", "Projection"]

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from panther.errors import ConfigError, DistributedError
from panther.linalg.operand import full_precision
from panther.sketch.projecting import PROJECTING_OPTIMIZERS


@dataclass(frozen=True)
class Projection:
    """The projection that an optimizer applies to the gradient of a matrix in its next step."""

    P: Tensor
    """``(rank, columns)``, for the columns that this rank has."""
    is_transposed: bool
    """Whether P acts on the rows of the parameter, which are the columns of its transpose."""
    source: str
    """The name, the seed and the period from which P is drawn, equal on all ranks."""

    def apply(self, gradient: Tensor) -> Tensor:
        """Return :math:`G P^T`, of shape ``(rows, rank)``."""
        G = gradient.mT if self.is_transposed else gradient
        with full_precision():
            return G.to(self.P.dtype) @ self.P.mT

    def decode(self, sketch: Tensor, gradient: Tensor) -> None:
        """Write the matrix of the least norm with this sketch, :math:`S (P P^T)^+ P`, into the gradient."""
        with full_precision():
            gram = self.P @ self.P.mT
            L, failed = torch.linalg.cholesky_ex(gram)
            tolerance = torch.finfo(gram.dtype).eps ** 0.5
            # Rows of few signs may be equal: four rows of eight signs in a period of a hundred.
            if failed or (L.diagonal().square() < tolerance * gram.diagonal()).any():
                solution = torch.linalg.pinv(gram, rtol=tolerance, hermitian=True) @ sketch.mT
            else:
                solution = torch.cholesky_solve(sketch.mT, L)
            G = solution.mT @ self.P
        gradient.copy_(G.mT if self.is_transposed else G)


class Projected:
    """Send :math:`G P^T` in place of the gradient G, for the matrices whose optimizer projects them.

    The optimizer gets the orthogonal projection of the mean gradient onto the rows of P, whose sketch is that of the
    mean gradient, so that it takes the step that it would take with whole gradients. Norms of gradients, and clipping
    by them, are of the projections. All remaining gradients, and gradients of matrices whose rank is more than half of
    the columns on this rank, are sent whole.

    Args:
        group: The ranks that share gradients.

    Cost: for an (m, n) matrix with m >= n, ``rank m`` numbers are sent in place of ``m n``, for ``4 rank m n`` flops.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._checked: set[tuple[int, int]] = set()
        self._is_used = False

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to send a bucket; as DDP's hook, with the state as its first argument."""
        projections = [_projection(parameter) for parameter in bucket.parameters()]
        parts = [
            gradient.flatten() if projection is None else projection.apply(gradient).flatten()
            for gradient, projection in zip(bucket.gradients(), projections, strict=True)
        ]
        sizes = [part.numel() for part in parts]
        dtype = bucket.buffer().dtype
        message = torch.cat([part.to(dtype) for part in parts])
        self._check_message(bucket.index(), message, projections)
        self._check_use(any(projections), bucket.is_last())
        work = dist.all_reduce(message.div_(dist.get_world_size(self.group)), group=self.group, async_op=True)

        def decode(_: Any) -> Tensor:
            for part, gradient, projection in zip(message.split(sizes), bucket.gradients(), projections, strict=True):
                if projection is None:
                    gradient.copy_(part.view(gradient.shape))
                else:
                    rank = projection.P.shape[0]
                    projection.decode(part.view(-1, rank).to(projection.P.dtype), gradient)
            return bucket.buffer()

        return work.get_future().then(decode)

    def _check_message(self, index: int, message: Tensor, projections: list[Projection | None]) -> None:
        """Raise DistributedError on every rank if the messages of a bucket differ, once for each length.

        They differ if their lengths do, or the sources of their projections.
        """
        key = index, message.numel()
        if key in self._checked:
            return
        sources = repr([projection and projection.source for projection in projections])
        digest = int.from_bytes(hashlib.blake2b(sources.encode(), digest_size=7).digest())
        entry = torch.tensor([message.numel(), digest], device=message.device)
        entries = [torch.empty_like(entry) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(entries, entry, group=self.group)
        lengths, digests = (sorted(set(column)) for column in zip(*(entry.tolist() for entry in entries), strict=True))
        fix = "give every rank an optimizer of the same parameters, ranks, names, seeds and periods"
        if len(lengths) > 1:
            raise DistributedError(
                f"comm_hook='projected' would send {' and '.join(map(str, lengths))} numbers of one bucket on "
                f"different ranks: {fix}"
            )
        if len(digests) > 1:
            raise DistributedError(
                f"comm_hook='projected' would add up different projections, the first one on this rank from "
                f"{next((projection.source for projection in projections if projection), None)}: {fix}"
            )
        self._checked.add(key)

    def _check_use(self, has_projections: bool, is_last: bool) -> None:
        """Raise ConfigError if a step ends in which no gradient was projected, and none was before."""
        self._is_used = self._is_used or has_projections
        if is_last and not self._is_used:
            raise ConfigError(
                "comm_hook='projected' sends what panther.optim.SketchedAdamW(update='projected') needs of the "
                "gradients, and no such optimizer has a matrix of the model: make the optimizer before the first step, "
                "or use comm_hook='sketch'"
            )


def _projection(parameter: Tensor) -> Projection | None:
    """Return the projection by the optimizer that was made last, unless it is not much smaller than the gradient."""
    for optimizer in reversed(list(PROJECTING_OPTIMIZERS)):
        projection: Projection | None = optimizer.sent_projection(parameter)
        if projection is not None:
            return projection if 2 * projection.P.shape[0] <= projection.P.shape[1] else None
    return None

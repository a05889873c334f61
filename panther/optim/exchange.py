"""Orthogonalise matrices that are sharded over ranks, a batch of one layout at a time.

Each matrix belongs to one rank, its owner. The shards go to the owner, which orthogonalises the complete matrix and
sends the shards of the result back: a rank sends 2 (N - 1)/N^2 m n numbers for an (m, n) matrix. All ranks run the same
batches in the same order.
"""

__all__ = ["Owners", "check_gradients", "update_shards"]

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from panther.distributed.comm.agreement import agree
from panther.distributed.comm.diagnostics import watched
from panther.distributed.comm.ranks import transport
from panther.errors import DistributedError
from panther.optim.matrix_updates import MatrixUpdate, advance_momenta, apply_updates
from panther.optim.newton_schulz import orthogonalize
from panther.optim.shards import ShardLayout, sending_device

_CALL = "MuonAdamW.step"


class Owners:
    """Choose the owner of each matrix: the ranks of a group in turn, or the rank that has the matrix already."""

    def __init__(self) -> None:
        self._counts: dict[dist.ProcessGroup, int] = {}

    def choose(self, layout: ShardLayout, count: int) -> list[int]:
        """Return the owners of ``count`` matrices, the same ones on every rank."""
        if layout.holder is not None:
            return [layout.holder] * count
        first = self._counts.get(layout.group, 0)
        self._counts[layout.group] = first + count
        return [number % layout.ranks for number in range(first, first + count)]


def update_shards(batch: Sequence[MatrixUpdate], owners: Owners) -> None:
    """Update sharded matrices of one layout."""
    layout = batch[0].layout
    assert layout is not None
    shards = advance_momenta(batch)  # (batch, rows, columns) of this rank
    by_owner = _by_rank(owners.choose(layout, len(shards)), layout.ranks)
    owned = by_owner[layout.rank]
    rectangles = layout.rectangles
    pieces = _exchange(
        [shards[indices] for indices in by_owner], [len(owned) * rectangle.size for rectangle in rectangles], layout
    )
    matrices = shards.new_empty(len(owned), *layout.shape)
    places = [
        matrices[:, r.rows.start : r.rows.stop, r.columns.start : r.columns.stop] for r in rectangles
    ]  # views of the matrices
    for place, piece in zip(places, pieces, strict=True):
        place.copy_(piece.view(place.shape))
    if owned:
        matrices.copy_(orthogonalize(matrices, dtype=matrices.dtype))
    pieces = _exchange(places, [len(indices) * layout.rectangle.size for indices in by_owner], layout)
    result = torch.empty_like(shards)
    for indices, piece in zip(by_owner, pieces, strict=True):
        result[indices] = piece.view(len(indices), *shards.shape[1:])
    apply_updates(batch, result)


def check_gradients(matrices: Sequence[tuple[str, ShardLayout, bool]], call_name: str) -> None:
    """Raise DistributedError on every rank unless the ranks of each group have gradients of the same sharded matrices.

    A matrix has a name, which is equal on all ranks, a layout, and whether this rank has its gradient. Cost: an
    all-reduce of 16 bytes for each group, for which the host waits.
    """
    matrices_by_group: dict[dist.ProcessGroup, list[tuple[str, ShardLayout, bool]]] = {}
    for matrix in matrices:
        matrices_by_group.setdefault(matrix[1].group, []).append(matrix)
    for group, of_group in matrices_by_group.items():

        def describe(of_group: Sequence[tuple[str, ShardLayout, bool]] = of_group) -> dict[str, str]:
            if error := next((layout.error for _, layout, _ in of_group if layout.error), None):
                raise DistributedError(error)
            presence: dict[str, str] = {}
            for name, _, has_gradient in of_group:
                state = "present" if has_gradient else "missing"
                presence[name] = f"{presence[name]} and {state}" if name in presence else state
            return presence

        compared = repr([(name, has_gradient, layout.error is None) for name, layout, has_gradient in of_group])
        digest = int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=7).digest())
        extremes = torch.tensor([digest, -digest], device=transport(group))
        with watched(call_name, group):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
            largest, smallest = extremes.tolist()
        if largest != -smallest:
            fix = "compute the loss from the same parameters on every rank, or give the missing gradients zeros"
            agree(call_name, describe, group, fix, "gradients of sharded matrices")
        describe()  # raises if every rank has the same error


def _exchange(parts: Sequence[Tensor], counts: Sequence[int], layout: ShardLayout) -> list[Tensor]:
    """Send a part to each rank, and return the parts of all ranks, flat.

    The part for this rank is returned and not sent. ``counts`` are the numbers of entries from each rank.
    """
    rank, device = layout.rank, sending_device(layout.group, parts[0])
    for_this_rank = parts[rank].flatten()
    outgoing = [part.flatten() for index, part in enumerate(parts) if index != rank]
    message = torch.cat(outgoing).to(device)
    input_sizes = [0 if index == rank else part.numel() for index, part in enumerate(parts)]
    output_sizes = [0 if index == rank else count for index, count in enumerate(counts)]
    received = message.new_empty(sum(output_sizes))
    with watched(_CALL, layout.group):
        dist.all_to_all_single(received, message, output_sizes, input_sizes, group=layout.group)
    pieces = list(received.to(for_this_rank.device).split(output_sizes))
    pieces[rank] = for_this_rank
    return pieces


def _by_rank(owners: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of the matrices of each owner."""
    by_owner: list[list[int]] = [[] for _ in range(ranks)]
    for index, owner in enumerate(owners):
        by_owner[owner].append(index)
    return by_owner

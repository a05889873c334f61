r"""What linear attention exchanges between ranks that hold consecutive shards of a sequence.

A rank needs the sums over the keys of earlier ranks, and for attention that is exact in a window the keys and values of
its window. Sums have units, :math:`e^{u}` with the running maximum u of each rank: the sum before rank r is
:math:`\sum_{s<r} e^{u_s - U_r} S_s` in units of the maximum :math:`U_r` of the ranks before it.
"""

__all__ = ["SequenceShards"]

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from panther.distributed.comm.collectives import gather_states, send_to_next, sum_before
from panther.distributed.comm.ranks import Group, is_fake, ranks_of
from panther.errors import ShapeError
from panther.nn import AttentionState


class SequenceShards:
    """The ranks of a group. They hold the equal, consecutive shards of a sequence, one each.

    Args:
        group: Process group, in the order of the shards; None means all ranks.

    Attributes:
        rank: Position of this rank in the group.
        size: Number of ranks.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self.size = len(ranks_of(group))
        self.rank = dist.get_rank(group)

    def check(self, keys: Tensor) -> None:
        """Raise on every rank if the shards differ in shape, from a message of 32 bytes in every call.

        Comparing each shape once would not notice a last batch that one rank has divided differently.
        """
        if is_fake(self.group):  # no other rank exists
            return
        rows = gather_states(torch.tensor(keys.shape, device=keys.device), self.group).tolist()
        if any(row != rows[0] for row in rows):
            shapes = ", ".join(map(str, map(tuple, rows)))
            raise ShapeError(
                "the shards of a sequence must have one shape (batch, heads, positions, width) on all ranks, and have "
                f"{shapes}: pad the sequence at its end to a multiple of the {self.size} ranks"
            )

    def state_before(self, state: AttentionState) -> AttentionState:
        """Return the state before this rank's shard, from the state of the shard alone."""
        sums, norms, num_keys = state.sums, state.norms, state.num_keys
        N, H = sums.shape[:2]
        units = sums.new_zeros(N, H, 1) if state.units is None else state.units
        # Numbers without derivatives: the units, and how many keys are not masked.
        numbers = units[..., 0] if num_keys is None else torch.cat((units[..., 0], num_keys.to(units.dtype)), -1)
        gathered = gather_states(numbers, self.group)  # (ranks, N, H or H + 1)
        weights, units = _weights_and_units(gathered[..., :H, None], self.rank)
        flat = sums.flatten(-2) if norms is None else torch.cat((sums.flatten(-2), norms), -1)
        flat = sum_before(flat, weights, self.group)
        if state.units is None:  # All units are 0, unless keys of other ranks are weighted by a mask of numbers.
            flat = flat * units.masked_fill(units == -torch.inf, 0).exp()
        norms = None if norms is None else flat[..., -1:]
        sums = flat[..., : sums.shape[-2] * sums.shape[-1]].unflatten(-1, sums.shape[-2:])
        if num_keys is not None:
            num_keys = gathered[: self.rank, :, H:].sum(0)
        state_units = None if state.units is None else units
        return AttentionState(sums, state_units, norms, num_keys, self.rank * state.length, state.feature_map)

    def sums_before(self, sums: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums (N, H, m, E + 1) over the ranks before this rank, and their units (N, H, 1)."""
        weights, units = _weights_and_units(gather_states(units, self.group), self.rank)
        return sum_before(sums.flatten(-2), weights, self.group).unflatten(-1, sums.shape[-2:]), units

    def from_previous(self, rows: Tensor, received_rows: int) -> Tensor:  # (rows, *) -> (received_rows, *)
        """Send rows to the next rank, and return the rows that the previous rank sends."""
        return send_to_next(rows, received_rows, self.group)

    def __deepcopy__(self, memo: Any) -> "SequenceShards":
        """Return the same object: copies of a model have the same ranks."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to be pickled: a process group exists in one process.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a model that is sharded along the sequence belongs to a process group and cannot be pickled: save its "
            "state_dict, or use pr.save_compressed"
        )


def _weights_and_units(units: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the weights of the sums of each rank before each rank, and the units before this rank.

    Args:
        units: The largest exponent of each rank, (ranks, N, H, 1).
        rank: This rank.

    Returns:
        Weights (ranks, ranks, N, H, 1), which are to be used for earlier ranks alone, and units (N, H, 1), -inf before
        the first rank.
    """
    before = torch.cat((torch.full_like(units[:1], -torch.inf), units.cummax(0).values[:-1]))
    fixed = before.masked_fill(before == -torch.inf, 0)
    # The largest weight that is used is 1. Weights of later ranks are not used, and may be large.
    weights = (units[None] - fixed[:, None]).clamp_max(0).exp()
    return weights, before[rank]

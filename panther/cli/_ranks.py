"""The ranks of a launcher, for commands that divide their work among them."""

__all__ = ["joined_ranks", "num_ranks", "share_of_batches"]

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from panther.errors import PantherError

if TYPE_CHECKING:
    import torch.distributed as dist

_UNIT = 5  # one of five batches is held out for checks


def num_ranks() -> int:
    """Return the number of ranks that torchrun or ``panther launch`` has started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def joined_ranks() -> "Iterator[dist.ProcessGroup | None]":
    """Yield the group of all ranks, or None if there is one process."""
    if num_ranks() == 1:
        yield None
        return
    import torch.distributed as dist

    from panther.distributed import init, shutdown

    init()
    try:
        yield dist.group.WORLD
    finally:
        shutdown()


def share_of_batches(batches: Any, rank: int, count: int) -> Sequence[Any]:
    """Return the batches of a rank, in fives, so that the ranks hold out the batches that one process does.

    Raises:
        PantherError: If there are too few.
    """
    batches = list(batches)
    fives = [batches[start : start + _UNIT] for start in range(0, len(batches), _UNIT)]
    if len(fives) > 1 and len(fives[-1]) < _UNIT:
        fives[-2:] = [[*fives[-2], *fives[-1]]]
    if len(fives) < count:
        raise PantherError(
            f"{len(batches)} batches are too few for {count} ranks, because each rank needs {_UNIT}: start fewer "
            "ranks, or make smaller batches"
        )
    return [batch for five in fives[rank * len(fives) // count : (rank + 1) * len(fives) // count] for batch in five]

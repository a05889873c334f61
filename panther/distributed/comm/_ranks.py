"""Name ranks, list those of a group, and find the device on which they exchange small tensors."""

__all__ = ["Group", "is_fake", "name_ranks", "ranks_of", "transport"]

import torch
import torch.distributed as dist

from panther.errors import DistributedError

Group = dist.ProcessGroup | None
"""None stands for all ranks."""


def name_ranks(ranks: list[int]) -> str:
    """Name a few ranks in words.

    Example:
        >>> name_ranks([1]), name_ranks([0, 2])
        ('rank 1', 'ranks 0, 2')
    """
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks of the group, in its order.

    Raises:
        DistributedError: If there is no process group, or this rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    if dist.get_rank(group) < 0:
        raise DistributedError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may call this")
    return dist.get_process_group_ranks(group)


def transport(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group exchanges small tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_fake(group: Group) -> bool:
    """Return whether the group is torch's fake one, on which nothing is sent and no other rank exists.

    The advisor shards models over such a group to measure them; there is nobody to agree with.
    """
    in_group = dist.is_available() and dist.is_initialized() and dist.get_rank(group) >= 0
    return in_group and dist.get_backend(group) == "fake"

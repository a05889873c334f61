"""Ask for the process group, name ranks, and find the device on which a group exchanges small tensors."""

__all__ = ["Group", "in_process_group", "is_fake", "name_ranks", "ranks_of", "require_process_group", "transport"]

import torch
import torch.distributed as dist

from panther.errors import DistributedError

Group = dist.ProcessGroup | None
"""None stands for all ranks."""


def in_process_group() -> bool:
    """Return whether this process has a process group; the only place that asks torch for it."""
    return dist.is_initialized()


def require_process_group(group: Group = None) -> None:
    """Check that there is a process group, and that this rank is in ``group``.

    Raises:
        DistributedError: If there is none, or this rank is not in it.
        TypeError: If ``group`` is not a process group.
    """
    # A rank that new_group leaves out gets a number for its group.
    known = (None, dist.GroupMember.NON_GROUP_MEMBER)
    if not isinstance(group, dist.ProcessGroup) and group not in known:
        raise TypeError(
            f"a group must be a process group, such as mesh['dp'].get_group(), or None, not {type(group).__name__}"
        )
    if not in_process_group():
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    if dist.get_rank(group) < 0:
        raise DistributedError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may call this")


def name_ranks(ranks: list[int]) -> str:
    """Name a few ranks in words, such as "rank 1" and "ranks 0, 2"."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def ranks_of(group: Group) -> list[int]:
    """Return the global ranks of the group, in its order, if this rank is in it."""
    require_process_group(group)
    return dist.get_process_group_ranks(group)


def transport(group: Group) -> torch.device:
    """Return the device on which the group exchanges small tensors: the current GPU with NCCL, else the CPU."""
    if in_process_group() and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_fake(group: Group) -> bool:
    """Return whether the group is torch's fake one, on which nothing is sent and no other rank exists.

    The advisor shards models over such a group to measure them; there is nobody to agree with.
    """
    return in_process_group() and dist.get_rank(group) >= 0 and dist.get_backend(group) == "fake"

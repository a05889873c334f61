"""The process group of this process, names of ranks in messages, and the device on which a group exchanges tensors."""

__all__ = ["Group", "in_process_group", "is_fake", "name_ranks", "ranks_of", "require_process_group", "transport"]

import torch
import torch.distributed as dist

from panther.errors import DistributedError

Group = dist.ProcessGroup | None
"""None stands for all ranks."""


def in_process_group() -> bool:
    """Return whether this process has a process group. No other function asks torch for it."""
    return dist.is_initialized()


def require_process_group(group: Group = None) -> None:
    """Check that a process group exists, and that this rank is in ``group``.

    Raises:
        DistributedError: If no process group exists, or this rank is not in ``group``.
        TypeError: If ``group`` is not a process group.
    """
    # torch's new_group returns NON_GROUP_MEMBER, a number, on ranks that are not in the group.
    if not isinstance(group, dist.ProcessGroup) and group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
        raise TypeError(
            f"a group must be a process group, such as mesh['dp'].get_group(), or None, not {type(group).__name__}"
        )
    if not in_process_group():
        raise DistributedError("there is no process group: call panther.distributed.init() first")
    if dist.get_rank(group) < 0:
        raise DistributedError(f"rank {dist.get_rank()} is not in the group: only the group's ranks may call this")


def name_ranks(ranks: list[int]) -> str:
    """Return the name of ranks in messages, such as "rank 1" and "ranks 0, 2"; at most 16 ranks are listed."""
    numbers = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


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
    """Return whether the group is torch's fake group, which sends nothing and has no other rank.

    The advisor shards models over such a group to measure them, so that agreements with other ranks are left out.
    """
    return in_process_group() and dist.get_rank(group) >= 0 and dist.get_backend(group) == "fake"

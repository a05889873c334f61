"""The node of each rank, the memory of this node, and a warning about groups that should stay within a node."""

__all__ = ["forget_nodes", "nodes_of", "note_nodes", "physical_memory", "warn_across_nodes"]

import os
import warnings
from collections import Counter
from collections.abc import Sequence

from panther.distributed.comm.mesh import get_rank, get_world_size
from panther.distributed.comm.ranks import Group, is_fake, name_ranks, ranks_of
from panther.errors import PerformanceWarning

_nodes: tuple[int, ...] = ()
"""The node of each rank, as the ranks told each other when they met."""


def note_nodes(nodes: Sequence[int]) -> None:
    """Store the node of each rank of the process group that is about to be created."""
    global _nodes
    _nodes = tuple(nodes)


def forget_nodes() -> None:
    """Forget the nodes of the ranks, when the process group is destroyed."""
    note_nodes(())


def physical_memory() -> float:
    """Return the bytes of memory of this node, or infinity if the system does not report it, as Windows."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")


def nodes_of(ranks: Sequence[int]) -> list[int]:
    """Return the node of each rank, numbered from 0; all ranks are on node 0 if their nodes are unknown.

    The nodes of a process group that torch created follow from LOCAL_WORLD_SIZE, which launchers set.
    """
    world = get_world_size()
    if len(_nodes) == world:
        return [_nodes[rank] for rank in ranks]
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdecimal() or not int(local) or world % int(local):
        return [0 for _ in ranks]
    return [rank // int(local) for rank in ranks]


def warn_across_nodes(parallelism: str, group: Group) -> None:
    """Warn, on the group's first rank, if a group that sends activations in every layer is not within a node."""
    if is_fake(group):
        return
    ranks = ranks_of(group)
    share = Counter(nodes_of(ranks))
    if len(share) == 1 or get_rank(group) != 0:
        return
    least = min(share.values())
    size = f"{least}, the ranks of a node," if least > 1 else "1"
    warnings.warn(
        f"{parallelism} over {name_ranks(ranks)} crosses {len(share)} nodes, and every layer sends its activations "
        f"between them, forward and backward: use a size of {size} and data or pipeline parallelism between nodes",
        PerformanceWarning,
        stacklevel=2,
    )

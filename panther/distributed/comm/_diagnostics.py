"""Errors of ranks that cannot reach one another: they name the ranks that do not answer.

Nothing is sent as long as communication works. When an exchange fails or times out, every rank that notices leaves a
note in the store in which the ranks met, and those that leave none within a moment are named.
"""

__all__ = ["gather_all", "watched"]

import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch.distributed as dist

from panther._torch import default_store, group_timeout
from panther.distributed.comm._ranks import name_ranks, transport
from panther.errors import DistributedError

_GRACE_S = 2.0  # ranks that time out do so within this time of one another
_POLL_S = 0.02
_SIGNS = ("gloo", "NCCL", "ProcessGroup", "Connection closed by peer", "Connection reset by peer", "Wait timeout")

_faults = 0
_gatherings: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def gather_all(doing: str, group: dist.ProcessGroup | None = None) -> None:
    """Wait in the store until every rank of the group is here; for NCCL, whose watchdog ends processes that wait."""
    found = group or dist.group.WORLD
    assert found is not None
    # Keys of a store stay, so every gathering has a number of its own.
    number = _gatherings[found] = _gatherings.get(found, 0) + 1
    name = f"panther/here/{found.group_name}/{number}"
    timeout = group_timeout(found, transport(group))
    with watched(doing, group):
        store = default_store()
        store.set(f"{name}/{dist.get_rank()}", "")
        store.wait([f"{name}/{rank}" for rank in dist.get_process_group_ranks(group)], timeout)


@contextmanager
def watched(doing: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn an error of the transport while ``doing`` something into one that names ranks; other errors pass."""
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        # torch raises RuntimeError for most faults of the transport, and for programming errors as well.
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _SIGNS):
            raise
        seconds = time.monotonic() - begun
        raise DistributedError(_explain(doing, group, seconds, str(error).splitlines()[0])) from error


def _explain(doing: str, group: dist.ProcessGroup | None, seconds: float, fault: str) -> str:
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    head = f"{doing} failed on rank {rank} after {seconds:.1f} s"
    notes = _roll_call(doing, rank, ranks)
    if notes is None:
        return f"{head}, because the process that hosts the store, rank 0 or the launcher, has ended: see its error"
    by_note: dict[str, list[int]] = {}
    for other, note in notes.items():
        if note != doing:
            by_note.setdefault(note, []).append(other)
    parts = [f"{name_ranks(others)} failed in {note}" for note, others in by_note.items()]
    silent = [other for other in ranks if other not in notes]
    fix = "make the same call on every rank"
    if silent:
        parts.insert(0, f"{name_ranks(silent)} did not take part and reported no error")
        fix = "see why these ranks ended or are late, or raise timeout_s of init"
    if not parts:
        return f"{head} ({fault}), although all ranks are running: check the network between them"
    return f"{head}: {'; '.join(parts)}: {fix}"


def _roll_call(doing: str, rank: int, ranks: list[int]) -> dict[int, str] | None:
    """Return what each rank that also failed was doing; None if the store is gone."""
    global _faults
    _faults += 1  # ranks that fail together have failed as often before
    keys = {other: f"panther/fault/{_faults}/{other}" for other in ranks}
    deadline = time.monotonic() + _GRACE_S
    try:
        store = default_store()
        store.set(keys[rank], doing)
        missing = [other for other in ranks if other != rank]
        while missing and time.monotonic() < deadline:
            missing = [other for other in missing if not store.check([keys[other]])]
            time.sleep(_POLL_S)
        return {other: store.get(keys[other]).decode() for other in ranks if other not in missing}
    except RuntimeError:
        return None

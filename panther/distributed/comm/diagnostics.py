"""Errors of ranks that cannot reach each other: the message names the ranks that do not answer.

Nothing is sent as long as communication works. When an exchange fails or times out, every rank that notices it leaves a
note in the store in which the ranks met. The error names the ranks that leave no note within two seconds.
"""

__all__ = ["explain_transport_error", "gather_all", "watched"]

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist

from panther._torch import default_store, group_timeout
from panther.distributed.comm.ranks import in_process_group, is_fake, name_ranks, transport
from panther.errors import DistributedError, PantherError

_GRACE_S = 2.0  # all ranks that time out do so within this time
_STORE_S = 2.0  # additional time if the store answers slowly
_POLL_S = 0.02
_SIGNS = (
    "gloo", "NCCL", "ProcessGroup", "Connection closed by peer", "Connection reset by peer", "Wait timeout",
    "Application timeout", "Broken pipe",
)  # fmt: skip

_failed_calls: WeakKeyDictionary[dist.ProcessGroup, dict[int, int]] = WeakKeyDictionary()
"""For each rank of the default group: the number of its failed calls that this process knows of."""

_gatherings: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def gather_all(doing: str, group: dist.ProcessGroup | None = None) -> None:
    """Wait in the store until every rank of the group has come. With NCCL, waiting in a collective ends the process."""
    member_group = group or dist.group.WORLD
    assert member_group is not None
    # The keys of earlier gatherings stay in the store, so every gathering has a new number.
    number = _gatherings[member_group] = _gatherings.get(member_group, 0) + 1
    name = f"panther/here/{member_group.group_name}/{number}"
    timeout = group_timeout(member_group, transport(group))
    with watched(doing, group):
        store = default_store()
        store.set(f"{name}/{dist.get_rank()}", "")
        store.wait([f"{name}/{rank}" for rank in dist.get_process_group_ranks(group)], timeout)


@contextmanager
def watched(doing: str | Callable[[], str], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn an error of the transport into an error that names ranks and the call ``doing``; other errors pass."""
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not _is_of_transport(error):
            raise
        raise _explain(doing if isinstance(doing, str) else doing(), group, time.monotonic() - begun, error) from error


def explain_transport_error(error: BaseException) -> DistributedError | None:
    """Return an error that names ranks, if ``error`` is of the transport and has not been explained yet; else None."""
    if isinstance(error, RuntimeError) and _is_of_transport(error):
        return _explain("a collective operation", None, None, error)
    return None


def _is_of_transport(error: RuntimeError) -> bool:
    # torch raises RuntimeError for most faults of the transport, and for programming errors as well.
    if isinstance(error, PantherError) or not in_process_group() or is_fake(None) or dist.get_world_size() == 1:
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)


def _explain(
    doing: str, group: dist.ProcessGroup | None, seconds: float | None, error: RuntimeError
) -> DistributedError:
    fault = str(error).splitlines()[0]
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    head = f"{doing} failed on rank {rank}" + ("" if seconds is None else f" after {seconds:.1f} s")
    notes = _roll_call(doing, rank, ranks)
    if notes is None:
        return DistributedError(
            f"{head}, because the process that hosts the store, rank 0 or the launcher, has ended or does not answer: "
            "see its error"
        )
    by_note: dict[str, list[int]] = {}
    for other, note in notes.items():
        if note != doing:
            by_note.setdefault(note, []).append(other)
    parts = [f"{name_ranks(failed_ranks)} failed in {note}" for note, failed_ranks in by_note.items()]
    fix = "make the same call on every rank"
    if silent_ranks := [other for other in ranks if other not in notes]:
        parts.insert(0, f"{name_ranks(silent_ranks)} did not take part and reported no error")
        limit_s = group_timeout(group or dist.group.WORLD, transport(group)).total_seconds()  # type: ignore[arg-type]
        fix = (
            "see in their logs where these ranks hang or why they ended or are late, or raise timeout_s of init "
            f"({limit_s:g} s)"
        )
    if not parts:
        return DistributedError(f"{head} ({fault}), although all ranks are running: check the network between them")
    return DistributedError(f"{head}: {'; '.join(parts)}: {fix}")


def _roll_call(doing: str, rank: int, ranks: list[int]) -> dict[int, str] | None:
    """Return the calls in which ranks failed; None if the store is gone.

    The process that hosts the store may be stopped, for which torch's store waits without a limit, so a thread reads
    it.
    """
    answers: list[dict[int, str]] = []

    def call() -> None:
        with suppress(RuntimeError):
            answers.append(_call_roll(doing, rank, ranks))

    thread = threading.Thread(target=call, name="panther-roll-call", daemon=True)
    thread.start()
    thread.join(_GRACE_S + _STORE_S)
    return answers[0] if answers else None


def _call_roll(doing: str, rank: int, ranks: list[int]) -> dict[int, str]:
    """Leave a note in the store, and return the notes of all ranks; raise RuntimeError if the store is gone."""
    assert dist.group.WORLD is not None
    # The store has only the latest note of a rank. Its number says whether this process has read the note before.
    note_numbers = _failed_calls.setdefault(dist.group.WORLD, {})
    note_numbers[rank] = note_numbers.get(rank, 0) + 1
    notes = {rank: doing}
    deadline = time.monotonic() + _GRACE_S
    store = default_store()
    store.set(f"panther/fault/{rank}", json.dumps([note_numbers[rank], doing]))
    while len(notes) < len(ranks) and time.monotonic() < deadline:
        for other in ranks:
            if other not in notes and store.check([f"panther/fault/{other}"]):
                number, note = json.loads(store.get(f"panther/fault/{other}"))
                if number > note_numbers.get(other, 0):
                    note_numbers[other], notes[other] = number, note
        time.sleep(_POLL_S)
    return {other: notes[other] for other in ranks if other in notes}

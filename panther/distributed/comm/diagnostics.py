"""Errors of ranks that cannot reach each other: the message names the ranks that do not answer and their position.

Nothing is sent as long as communication works. When an exchange fails or times out, every rank that notices it leaves a
note in the store in which the ranks met. The error names the ranks that leave no note within two seconds.
"""

__all__ = ["answer_requests", "explain_transport_error", "gather_all", "stop_answering", "watched"]

import atexit
import json
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from panther._torch import default_store, group_timeout
from panther.distributed.comm.ranks import in_process_group, is_fake, name_ranks, transport
from panther.errors import DistributedError, PantherError

_PERIOD_S = 1.0  # between two looks of a rank at the requests in the store
_GRACE_S = 2.0  # all ranks that time out do so within this time
_ANSWER_S = _PERIOD_S + 1.5  # for an answer of a machine that may be busy
_STORE_S = 1.5  # additional time if the store answers slowly
_POLL_S = 0.02
_REQUESTS = "panther/positions"
_NO_ANSWER = "did not answer: it has ended, is stopped, or keeps the lock of the Python interpreter"
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, str(Path(torch.__file__).parent), "<")
_SIGNS = (
    "gloo", "NCCL", "ProcessGroup", "Connection closed by peer", "Connection reset by peer", "Wait timeout",
    "Broken pipe",
)  # fmt: skip
_NAMED_POSITIONS = 4  # the message tells the position of at most this many ranks

_failed_calls: WeakKeyDictionary[dist.ProcessGroup, dict[int, int]] = WeakKeyDictionary()
"""For each rank of the default group: the number of its failed calls that this process knows of."""


class _Answering(threading.Thread):
    """Store the position of this process whenever a rank has asked for it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__(name="panther-positions", daemon=True)
        self.store: dist.Store | None = store
        self.rank, self.ended = rank, threading.Event()

    def run(self) -> None:
        store, self.store = self.store, None
        assert store is not None
        answered = 0
        while not self.ended.wait(_PERIOD_S):
            try:
                number = store.add(_REQUESTS, 0)
                if number > answered:
                    answered = number
                    store.set(f"{_REQUESTS}/{self.rank}", json.dumps([number, _position()]))
            except RuntimeError:  # the process that hosts the store has ended
                return
        with suppress(RuntimeError):
            store.set(f"{_REQUESTS}/{self.rank}", json.dumps([sys.maxsize, "has left the process group"]))


_answering: _Answering | None = None


def answer_requests(store: dist.Store, rank: int) -> None:
    """Start to answer the other ranks."""
    global _answering
    stop_answering()
    lowest = store
    while isinstance(lowest, dist.PrefixStore):
        lowest = lowest.underlying_store
    # The thread needs a separate connection, because an operation that waits in a TCPStore blocks its connection.
    own_store = store.clone() if isinstance(lowest, dist.TCPStore) and hasattr(store, "clone") else store
    _answering = _Answering(own_store, rank)
    _answering.start()


@atexit.register
def stop_answering() -> None:
    """End the thread, which must not use the store while the interpreter ends."""
    global _answering
    thread, _answering = _answering, None
    if thread is not None and thread.is_alive():
        thread.ended.set()
        thread.join(_ANSWER_S)


def _position() -> str:
    """Return the innermost function of the main thread that is not of Python's library or of torch, and its line."""
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "runs no Python code"
    return f"is in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


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
    answers = _roll_call(doing, rank, ranks)
    if answers is None:
        return DistributedError(
            f"{head}, because the process that hosts the store, rank 0 or the launcher, has ended or does not answer: "
            "see its error"
        )
    notes, positions = answers
    by_note: dict[str, list[int]] = {}
    for other, note in notes.items():
        if note != doing:
            by_note.setdefault(note, []).append(other)
    parts = [f"{name_ranks(failed_ranks)} failed in {note}" for note, failed_ranks in by_note.items()]
    fix = "make the same call on every rank"
    if positions:
        places = [f"rank {other} {position}" for other, position in list(positions.items())[:_NAMED_POSITIONS]]
        parts.insert(0, f"{name_ranks(list(positions))} did not take part and reported no error ({'; '.join(places)})")
        limit_s = group_timeout(group or dist.group.WORLD, transport(group)).total_seconds()  # type: ignore[arg-type]
        fix = f"see why these ranks ended or are late, or raise timeout_s of init ({limit_s:g} s)"
    if not parts:
        return DistributedError(f"{head} ({fault}), although all ranks are running: check the network between them")
    return DistributedError(f"{head}: {'; '.join(parts)}: {fix}")


def _roll_call(doing: str, rank: int, ranks: list[int]) -> tuple[dict[int, str], dict[int, str]] | None:
    """Return the calls in which ranks failed, and the positions of all other ranks; None if the store is gone.

    The process that hosts the store may be the stopped one, and torch's store waits for it without a limit. So a second
    thread reads the store, and this thread waits for a limited time.
    """
    answers: list[tuple[dict[int, str], dict[int, str]]] = []

    def call() -> None:
        with suppress(RuntimeError):
            answers.append(_call_roll(doing, rank, ranks))

    thread = threading.Thread(target=call, name="panther-roll-call", daemon=True)
    thread.start()
    thread.join(_ANSWER_S + _STORE_S)
    return answers[0] if answers else None


def _call_roll(doing: str, rank: int, ranks: list[int]) -> tuple[dict[int, str], dict[int, str]]:
    """Leave a note in the store, and return notes and positions; raise RuntimeError if the store is gone."""
    assert dist.group.WORLD is not None
    # The store has only the latest note of a rank. Its number says whether this process has read the note before.
    note_numbers = _failed_calls.setdefault(dist.group.WORLD, {})
    note_numbers[rank] = note_numbers.get(rank, 0) + 1
    notes, positions = {rank: doing}, {}
    begun = time.monotonic()
    store = default_store()
    request = store.add(_REQUESTS, 1)
    store.set(f"panther/fault/{rank}", json.dumps([note_numbers[rank], doing]))
    while len(notes) < len(ranks) and time.monotonic() < begun + _GRACE_S:
        for other in ranks:
            if other not in notes and store.check([f"panther/fault/{other}"]):
                number, note = json.loads(store.get(f"panther/fault/{other}"))
                if number > note_numbers.get(other, 0):
                    note_numbers[other], notes[other] = number, note
        time.sleep(_POLL_S)
    silent_ranks = [other for other in ranks if other not in notes]
    while len(positions) < len(silent_ranks) and time.monotonic() < begun + _ANSWER_S:
        for other in silent_ranks:
            if store.check([f"{_REQUESTS}/{other}"]):
                number, position = json.loads(store.get(f"{_REQUESTS}/{other}"))
                if number >= request:
                    positions[other] = position
        time.sleep(_POLL_S)
    return (
        {other: notes[other] for other in ranks if other in notes},
        {other: positions.get(other, _NO_ANSWER) for other in silent_ranks},
    )

"""Errors of ranks that cannot reach each other: the message names the ranks that do not answer and their position.

Nothing is sent as long as communication works. When an exchange fails or times out, every rank that notices it leaves a
note in the store in which the ranks met. The error names the ranks that leave no note within two seconds.
"""

__all__ = [
    "ANSWER_S", "PERIOD_S", "Position", "answer_requests", "ask", "explain_transport_error", "gather_all",
    "positions_of", "stop_answering", "watched",
]  # fmt: skip

import atexit
import json
import linecache
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from panther._torch import default_store, group_timeout
from panther.distributed.comm.ranks import in_process_group, is_fake, name_ranks, transport
from panther.errors import DistributedError, PantherError

PERIOD_S = 1.0
"""Time between two reads of the store."""
ANSWER_S = PERIOD_S + 1.5
"""Time to wait for an answer, on a machine that may be busy."""
_POLL_S = 0.05
_REQUESTS = "panther/positions"
_LONGEST_LINE = 100
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}, str(Path(torch.__file__).parent))
_STATES = {
    "T": "is stopped, as by SIGSTOP",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a file system",
    "S": "waits without giving up the lock of the Python interpreter",
    "R": "computes without giving up the lock of the Python interpreter",
}


@dataclass(frozen=True)
class Position:
    """The position of a rank."""

    text: str
    """The part of a sentence after the rank, such as "is in forward (train.py:31): time.sleep(60)"."""
    stack: str = ""
    """The stack of its main thread; empty if the rank did not answer."""


class _Answering(threading.Thread):
    """Stores this process's stack whenever a rank has asked for it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__(name="panther-positions", daemon=True)
        self.store: dist.Store | None = store
        self.rank, self.ended = rank, threading.Event()

    def run(self) -> None:
        store, self.store = self.store, None
        assert store is not None
        answered = 0
        while not self.ended.wait(PERIOD_S):
            try:
                number = store.add(_REQUESTS, 0)
                if number > answered:
                    answered = number
                    store.set(f"{_REQUESTS}/{self.rank}", json.dumps([number, *_current_position()]))
            except RuntimeError:  # the process that hosts the store has ended
                return
        with suppress(RuntimeError):
            store.set(f"{_REQUESTS}/{self.rank}", json.dumps([sys.maxsize, "has left the process group", ""]))


_answering: _Answering | None = None


def answer_requests(store: dist.Store, rank: int) -> None:
    """Start to answer the other ranks, and store which process this is."""
    global _answering
    stop_answering()
    store.set(f"{_REQUESTS}/process/{rank}", json.dumps([socket.gethostname(), os.getpid()]))
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
        thread.join(ANSWER_S)


def ask(store: dist.Store) -> int:
    """Ask all ranks where they stand, and return the number of the request."""
    return store.add(_REQUESTS, 1)


def positions_of(ranks: Sequence[int], store: dist.Store, number: int, deadline: float) -> dict[int, Position]:
    """Return where ranks stand, by the answers to a request; waits until the deadline of ``time.monotonic``."""
    answers: dict[int, Position] = {}
    while True:
        for rank in ranks:
            if rank not in answers and store.check([f"{_REQUESTS}/{rank}"]):
                answered, text, stack = json.loads(store.get(f"{_REQUESTS}/{rank}"))
                if answered >= number:
                    answers[rank] = Position(text, stack)
        if len(answers) == len(ranks) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return {rank: answers.get(rank) or _without_answer(rank, store) for rank in ranks}


def _without_answer(rank: int, store: dist.Store) -> Position:
    if not store.check([f"{_REQUESTS}/process/{rank}"]):
        return Position("did not answer")
    host, pid = json.loads(store.get(f"{_REQUESTS}/process/{rank}"))
    if host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return Position(f"did not answer: process {pid} on {host} is stopped, has ended, or cannot be reached")
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "Z"
    if state == "Z":
        return Position(f"has ended, process {pid}")
    return Position(f"did not answer: process {pid} {_STATES.get(state, _STATES['S'])}")


def _current_position() -> tuple[str, str]:
    """Return where the main thread of this process is, in words, and its stack."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    if frame is None:
        return "runs no Python code", ""
    return describe_frame(frame), "".join(traceback.format_stack(frame))


def _is_of_a_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_LIBRARIES) or name.startswith("<")


def describe_frame(frame: FrameType) -> str:
    """Return in words where a stack is: in its innermost function that is not of Python's library or of torch."""
    position: FrameType | None = frame
    while position is not None and _is_of_a_library(position):
        position = position.f_back
    described = position or frame
    name, line = described.f_code.co_filename, described.f_lineno
    source = linecache.getline(name, line).strip()[:_LONGEST_LINE]
    return f"is in {described.f_code.co_name} ({name}:{line})" + (f": {source}" if source else "")


_GRACE_S = 2.0  # all ranks that time out do so within this time
_POLL_S = 0.02
_STORE_S = 1.5  # additional time if the store answers slowly
_SIGNS = (
    "gloo", "NCCL", "ProcessGroup", "Connection closed by peer", "Connection reset by peer", "Wait timeout",
    "Broken pipe",
)  # fmt: skip
_NAMED_POSITIONS = 4  # the message tells the position of at most this many ranks

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
        places = [f"rank {other} {position.text}" for other, position in list(positions.items())[:_NAMED_POSITIONS]]
        parts.insert(0, f"{name_ranks(list(positions))} did not take part and reported no error ({'; '.join(places)})")
        limit_s = group_timeout(group or dist.group.WORLD, transport(group)).total_seconds()  # type: ignore[arg-type]
        fix = f"see why these ranks ended or are late, or raise timeout_s of init ({limit_s:g} s)"
    if not parts:
        return DistributedError(f"{head} ({fault}), although all ranks are running: check the network between them")
    explained = DistributedError(f"{head}: {'; '.join(parts)}: {fix}")
    for other, position in positions.items():
        if position.stack:
            explained.add_note(f"Stack of rank {other} at that time (most recent call last):\n{position.stack}")
    return explained


def _roll_call(doing: str, rank: int, ranks: list[int]) -> tuple[dict[int, str], dict[int, Position]] | None:
    """Return the calls in which ranks failed, and the positions of all other ranks; None if the store is gone.

    The process that hosts the store may be the stopped one, and torch's store waits for it without a limit. So a second
    thread reads the store, and this thread waits for a limited time.
    """
    answers: list[tuple[dict[int, str], dict[int, Position]]] = []

    def call() -> None:
        with suppress(RuntimeError):
            answers.append(_call_roll(doing, rank, ranks))

    thread = threading.Thread(target=call, name="panther-roll-call", daemon=True)
    thread.start()
    thread.join(ANSWER_S + _STORE_S)
    return answers[0] if answers else None


def _call_roll(doing: str, rank: int, ranks: list[int]) -> tuple[dict[int, str], dict[int, Position]]:
    """Leave a note in the store, and return notes and positions; raise RuntimeError if the store is gone."""
    assert dist.group.WORLD is not None
    # The store has only the latest note of a rank. Its number says whether this process has read the note before.
    note_numbers = _failed_calls.setdefault(dist.group.WORLD, {})
    note_numbers[rank] = note_numbers.get(rank, 0) + 1
    notes = {rank: doing}
    begun = time.monotonic()
    store = default_store()
    request = ask(store)
    store.set(f"panther/fault/{rank}", json.dumps([note_numbers[rank], doing]))
    while len(notes) < len(ranks) and time.monotonic() < begun + _GRACE_S:
        for other in ranks:
            if other not in notes and store.check([f"panther/fault/{other}"]):
                number, note = json.loads(store.get(f"panther/fault/{other}"))
                if number > note_numbers.get(other, 0):
                    note_numbers[other], notes[other] = number, note
        time.sleep(_POLL_S)
    silent_ranks = [other for other in ranks if other not in notes]
    positions = positions_of(silent_ranks, store, request, begun + ANSWER_S)
    return {other: notes[other] for other in ranks if other in notes}, positions

"""The positions of other ranks: errors of ranks that wait name the line that a late rank is executing.

A thread on every rank looks into the store once a second. When a rank asks, each thread stores its process's stack.
A rank that does not answer is stopped, holds the lock of the Python interpreter, or has ended. If it is a process of
this machine, its state tells which.
"""

__all__ = ["ANSWER_S", "PERIOD_S", "Position", "answer_requests", "ask", "positions_of", "stop_answering"]

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

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

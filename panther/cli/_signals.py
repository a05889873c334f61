"""SIGTERM in commands that write files: it raises, as Ctrl-C does, so that incomplete files are removed."""

__all__ = ["TerminatedError", "termination_raised"]

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TerminatedError(BaseException):
    """SIGTERM ends the process. No ``except Exception`` catches this error."""


@contextmanager
def termination_raised(is_wanted: bool) -> Iterator[None]:
    """Let SIGTERM raise TerminatedError within the block."""
    # Python sets handlers of signals in the main thread only.
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise TerminatedError

    previous_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)

"""SIGTERM and Ctrl-C in commands that write files: each ends the command, also where other libraries lose the error."""

__all__ = ["TerminatedError", "raise_if_ended", "signals_raised"]

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_received: list[int] = []  # numbers of the signals that have arrived during the command


class TerminatedError(BaseException):
    """SIGTERM ends the process. No ``except Exception`` catches this error."""


@contextmanager
def signals_raised(is_wanted: bool) -> Iterator[None]:
    """Let SIGTERM raise as Ctrl-C does, so that temporary files are removed and the command says that it ended.

    Python may run the handler anywhere, for example in a class that another library defines, where the error becomes a
    RuntimeError, or in a finalizer, where it is lost. An error that follows is therefore replaced by the one of the
    signal, and :func:`raise_if_ended` raises what was lost.
    """
    # Python sets handlers of signals in the main thread only.
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        _received.append(number)
        raise _error_of(number)

    previous_handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, end)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # A shell lets jobs in the background ignore it.
        previous_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, end)
    try:
        yield
    except (KeyboardInterrupt, TerminatedError):
        raise
    except BaseException as error:
        if _received:
            raise _error_of(_received[-1]) from error
        raise
    finally:
        _received.clear()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def raise_if_ended() -> None:
    """Raise the error of a signal that has arrived and whose error was lost. Call it before a result is complete."""
    if _received:
        raise _error_of(_received[-1])


def _error_of(number: int) -> BaseException:
    return TerminatedError() if number == signal.SIGTERM else KeyboardInterrupt()

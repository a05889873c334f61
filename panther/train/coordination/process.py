"""The process of a run: the process group that it joins, and the signals that it receives."""

__all__ = ["catch_signals", "join_process_group"]

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from panther.distributed import init, shutdown
from panther.distributed.comm.process_group import DEFAULT_TIMEOUT_S
from panther.distributed.comm.ranks import in_process_group
from panther.distributed.comm.supervision.ending import SIGNALS, is_free, signals_counted
from panther.distributed.comm.supervision.groups import apply_timeout
from panther.train.coordination.step_exchange import StepExchange


def join_process_group(timeout_s: float | None) -> None:
    """Join the process group of the launcher that started this process, if a launcher has, until the process ends.

    A group that exists gets the timeout, unless it is None. The process does not leave the group when training ends,
    because evaluating, exporting or training a distributed model further needs it.
    """
    if in_process_group():
        if timeout_s is not None:
            apply_timeout(timeout_s)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        init(timeout_s=DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
        atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    # After an exception, other ranks may be waiting in a different operation, and shutdown would wait for them.
    if not hasattr(sys, "last_value"):
        shutdown()


@contextmanager
def catch_signals(grace_period_s: float | None = None) -> Iterator[StepExchange]:
    """Yield an exchange that is notified of signals; a second SIGINT raises KeyboardInterrupt at once.

    SIGHUP and SIGUSR1 are not caught if the process already has a handler for them or ignores them. After a second
    signal the process has the grace period to end.
    """
    exchange = StepExchange()
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread only
        yield exchange
        return

    def note(number: int, frame: Any) -> None:
        if number in exchange.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        exchange.received.append(number)

    caught = [number for number in SIGNALS if number in (signal.SIGTERM, signal.SIGINT) or is_free(number)]
    before = {number: signal.signal(number, note) for number in caught}
    try:
        with signals_counted(grace_period_s):
            yield exchange
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

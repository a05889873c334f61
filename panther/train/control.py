"""What ranks agree on in every step, in one small message: the loss, whether it is finite, and who was told to stop."""

__all__ = ["Control", "agree", "join", "on_first", "signals"]

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from panther.distributed import get_distributed_info, get_world_size, init, shutdown
from panther.distributed.comm._agreement import gather_objects, run_on_first_rank
from panther.distributed.comm._ranks import in_process_group
from panther.train.batches import Batch

_T = TypeVar("_T")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHOWN = 16


class Control:
    """One message a step, sent while backward runs."""

    def __init__(self) -> None:
        self.received: list[int] = []
        """Signals this process got."""
        self.stopped = 0
        """The signal that some rank got, as of the last step; 0 for none."""
        self._device = get_distributed_info().device
        self._alone = get_world_size() == 1
        self._own_loss = 0.0
        self._row = [0.0] * 5
        self._sent = torch.zeros(5)
        self._work: Any = None

    def start(self, loss: float, samples: int, counted: bool) -> None:
        """Send this rank's sum of losses over its samples."""
        self._own_loss = value = loss
        finite = value - value == 0.0
        told = [float(number in self.received) for number in _SIGNALS]
        row = [*told, float(not finite), value if finite and counted else 0.0, float(samples if counted else 0)]
        if self._alone:
            self._row = row
        else:
            self._sent = torch.tensor(row, dtype=torch.float64, device=self._device)
            self._work = dist.all_reduce(self._sent, async_op=True)

    def finish(self) -> tuple[float, float]:
        """The mean loss over all samples of the step, NaN if one rank's is not finite, and the samples."""
        if self._work is not None:
            self._work.wait()
            self._work, self._row = None, self._sent.tolist()
        *told, nonfinite, loss, samples = self._row
        self.stopped = next((int(number) for number, count in zip(_SIGNALS, told, strict=True) if count), 0)
        return (float("nan") if nonfinite else loss / max(samples, 1.0)), samples

    def nonfinite(self, window: list[Batch]) -> str:
        """Which ranks had it, on which samples; every rank must call it."""
        value = self._own_loss
        indices = [index for batch in window for index in batch.indices or ()]
        found = gather_objects((value, indices), None)
        told = []
        for rank, (loss, own) in enumerate(found):
            if loss - loss != 0.0:
                samples = ", ".join(map(str, own[:_SHOWN])) + (
                    f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
                )
                told.append(f"the loss is {loss} on rank {rank}" + (f", on the samples {samples}" if own else ""))
        return "; ".join(told) or "the norm of the gradient is not finite, and the losses are"


def agree(values: list[float]) -> list[float]:
    """Sums over all ranks."""
    if get_world_size() == 1:
        return list(values)
    row = torch.tensor(values, dtype=torch.float64, device=get_distributed_info().device)
    dist.all_reduce(row)
    return row.tolist()


def on_first(work: Callable[[], _T]) -> _T:
    """Do the work on the first rank; all get its result, or its error."""
    return run_on_first_rank(work, None)


def join(timeout_s: float) -> None:
    """Be in the process group of a launcher that started this process, if there is one, until the process ends.

    The model, as it was wrapped, needs the group for as long as it is there: to be evaluated, exported, trained on.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not in_process_group():
        init(timeout_s=timeout_s)
        atexit.register(_leave)


def _leave() -> None:
    if not hasattr(sys, "last_value"):  # after an exception nobody is waited for
        shutdown()


@contextmanager
def signals() -> Iterator[Control]:
    """A control that hears SIGTERM and SIGINT; a second SIGINT interrupts at once, as ever."""
    control = Control()
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield control
        return

    def note(number: int, frame: Any) -> None:
        if number in control.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        control.received.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield control
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

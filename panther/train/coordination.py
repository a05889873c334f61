"""The exchange of ranks in every step: the loss, whether it is finite, and signals that arrived."""

__all__ = ["SIGNALS", "StepExchange", "catch_signals", "join_process_group", "sum_over_ranks"]

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from panther.distributed import get_distributed_info, get_world_size, init, shutdown
from panther.distributed.comm._agreement import gather_objects
from panther.distributed.comm._ranks import in_process_group

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHOWN = 16  # samples of a rank that an error message lists


class StepExchange:
    """One small all-reduce per step, sent while the backward pass runs."""

    def __init__(self) -> None:
        self.received: list[int] = []
        """Signals that this process received."""
        self.stop_signal = 0
        """The signal that some rank had received by the last step; 0 for none."""
        self._alone = get_world_size() == 1
        # Alone there is nothing to send, and a GPU would only be waited for.
        self._device = torch.device("cpu") if self._alone else get_distributed_info().device
        self._own_loss = 0.0
        self._sent = torch.zeros(5)
        self._work: Any = None

    def start(self, loss_sum: float, samples: int, reports_loss: bool) -> None:
        """Send the sum of this rank's losses over its samples; both are ignored where the rank does not report."""
        self._own_loss = loss_sum
        finite = loss_sum - loss_sum == 0.0
        signals = [float(number in self.received) for number in SIGNALS]
        row = [
            *signals,
            float(not finite),
            loss_sum if finite and reports_loss else 0.0,  # a NaN would hide which of the sums it came from
            float(samples if reports_loss else 0),
        ]
        self._sent = torch.tensor(row, dtype=torch.float64, device=self._device)
        if not self._alone:
            # Asynchronous, so that it costs nothing: the backward pass that follows takes longer.
            self._work = dist.all_reduce(self._sent, async_op=True)

    def finish(self) -> tuple[float, float]:
        """Return the mean loss over all samples of the step (NaN if a rank's is not finite) and their number."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        *signals, nonfinite, loss_sum, samples = self._sent.tolist()
        self.stop_signal = next((int(number) for number, n in zip(SIGNALS, signals, strict=True) if n), 0)
        return (float("nan") if nonfinite else loss_sum / max(samples, 1.0)), samples

    def describe_nonfinite(self, indices: Sequence[int]) -> str:
        """Name the ranks whose loss is not finite, and their samples of the step. Every rank must call it."""
        parts = []
        for rank, (loss, own) in enumerate(gather_objects((self._own_loss, list(indices)), None)):
            if loss - loss != 0.0:
                more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
                samples = ", ".join(map(str, own[:_SHOWN])) + more
                parts.append(f"the loss is {loss} on rank {rank}" + (f", on the samples {samples}" if own else ""))
        return "; ".join(parts) or "the norm of the gradient is not finite, although the losses are"


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sum of each value over all ranks."""
    if get_world_size() == 1:
        return list(values)
    row = torch.tensor(values, dtype=torch.float64, device=get_distributed_info().device)
    dist.all_reduce(row)
    return row.tolist()


def join_process_group(timeout_s: float) -> None:
    """Join the process group of the launcher that started this process, if there is one, until the process ends.

    It is not left when training ends: evaluating, exporting or training a distributed model further needs it.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not in_process_group():
        init(timeout_s=timeout_s)
        atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    # After an exception the other ranks may be waiting in another operation, and shutdown would wait for them.
    if not hasattr(sys, "last_value"):
        shutdown()


@contextmanager
def catch_signals() -> Iterator[StepExchange]:
    """Yield an exchange that is notified of SIGTERM and SIGINT; a second SIGINT raises KeyboardInterrupt at once."""
    exchange = StepExchange()
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers only there
        yield exchange
        return

    def note(number: int, frame: Any) -> None:
        if number in exchange.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        exchange.received.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield exchange
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

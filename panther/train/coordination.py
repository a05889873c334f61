"""The exchange of ranks in every step: the loss, whether it is finite, and signals that arrived."""

__all__ = ["SIGNALS", "StepExchange", "catch_signals", "join_process_group", "sum_over_ranks"]

import atexit
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from panther.distributed import get_distributed_info, get_world_size, init, shutdown
from panther.distributed.comm._agreement import gather_objects
from panther.distributed.comm._ranks import in_process_group
from panther.distributed.data.gradient_compression import hold_group

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHOWN = 16  # samples of a rank that an error message lists


class GradientCarrier:
    """Sends a few numbers behind the last gradients of a DistributedDataParallel, in the same message.

    A message of 40 bytes of its own made a step of 1 ms on two processes with gloo a quarter to a third longer.
    """

    def __init__(self, model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self._group = group
        self._row: Tensor | None = None
        self._sums: Tensor | None = None
        hold_group(group)
        model.register_comm_hook(None, self._average)

    @classmethod
    def of(cls, model: nn.Module) -> "GradientCarrier | None":
        """Return one for a DDP model without another hook; None if its gradients would round the numbers."""
        assert isinstance(model, DistributedDataParallel)
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        return cls(model, model.process_group) if dtypes <= {torch.float32, torch.float64} else None

    def send(self, row: Tensor) -> None:
        """Give the numbers that the next backward pass sends."""
        self._row = row

    def receive(self) -> Tensor:
        """Return the sums over the ranks, after the backward pass."""
        sums, self._sums = self._sums, None
        assert sums is not None, "the last gradients were not reduced"
        return sums

    def _average(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, row = bucket.buffer(), self._row
        buffer /= self._group.size()
        if row is None or not bucket.is_last():
            return _future(buffer, self._group).then(lambda future: future.value()[0])
        self._row, length = None, buffer.numel()

        def parts(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            (reduced,) = future.value()
            self._sums = reduced[length:]
            return reduced[:length]

        return _future(torch.cat([buffer, row.to(buffer)]), self._group).then(parts)


def _future(tensor: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[list[Tensor]]:
    return cast(dist.Work, dist.all_reduce(tensor, group=group, async_op=True)).get_future()


class StepExchange:
    """Five numbers of every step, summed over the ranks: with the gradients, or by a message during backward.

    Nothing waits for a GPU before the backward pass: the loss is read after it.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """Signals that this process received."""
        self.stop_signal = 0
        """The signal that some rank had received by the last step; 0 for none."""
        self._alone = get_world_size() == 1
        self._own_loss: float | Tensor = 0.0
        self._sent: list[float] | Tensor = []
        self._carrier: GradientCarrier | None = None
        self._work: Any = None

    def start(
        self, loss_sum: float | Tensor, samples: int, reports_loss: bool, carrier: GradientCarrier | None
    ) -> None:
        """Send the sum of this rank's losses over its samples; both are ignored where the rank does not report."""
        self._own_loss, self._carrier = loss_sum, carrier
        signals = [float(number in self.received) for number in SIGNALS]
        counted = float(samples if reports_loss else 0)
        if isinstance(loss_sum, Tensor):
            row_finite = loss_sum.isfinite().to(loss_sum)
            # A NaN would hide which of the sums it came from.
            losses = loss_sum.nan_to_num(0.0, 0.0, 0.0) * reports_loss
            row = torch.tensor([*signals, 1.0, 0.0, counted], dtype=loss_sum.dtype).to(loss_sum.device)
            row[2] -= row_finite
            row[3] += losses
        else:
            finite = math.isfinite(loss_sum)
            numbers = [*signals, float(not finite), loss_sum if finite and reports_loss else 0.0, counted]
            if self._alone:
                self._sent = numbers
                return
            device = get_distributed_info().device if carrier is None else None
            row = torch.tensor(numbers, dtype=torch.float64, device=device)
        self._sent = row
        if carrier is not None:
            carrier.send(row)
        elif not self._alone:
            # Asynchronous: the backward pass that follows takes longer.
            self._work = dist.all_reduce(row, async_op=True)

    def finish(self) -> tuple[float, float]:
        """Return the mean loss over all samples of the step (NaN if a rank's is not finite) and their number."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._carrier is not None:
            self._sent = self._carrier.receive()
        sent = self._sent.tolist() if isinstance(self._sent, Tensor) else self._sent
        *signals, nonfinite, loss_sum, samples = sent
        self.stop_signal = next((int(number) for number, n in zip(SIGNALS, signals, strict=True) if n), 0)
        return (float("nan") if nonfinite else loss_sum / max(samples, 1.0)), samples

    def describe_nonfinite(self, indices: Sequence[int]) -> str:
        """Name the ranks whose loss is not finite, and their samples of the step. Every rank must call it."""
        parts = []
        for rank, (loss, own) in enumerate(gather_objects((float(self._own_loss), list(indices)), None)):
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

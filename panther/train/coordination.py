"""What ranks exchange in a run: the numbers of every step, sums, signals that arrived, and the agreement to stop."""

__all__ = ["StepExchange", "catch_signals", "gather_over_ranks", "join_process_group", "sum_over_ranks"]

import atexit
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from panther._text import list_names
from panther.distributed import get_distributed_info, get_rank, get_world_size, init, shutdown
from panther.distributed.comm.agreement import gather_objects
from panther.distributed.comm.ending import SIGNALS, is_free, signals_counted
from panther.distributed.comm.process_group import DEFAULT_TIMEOUT_S
from panther.distributed.comm.ranks import apply_timeout, in_process_group
from panther.errors import ConfigError
from panther.train.optimization.trainable import MAX_SAMPLES

_NUM_NUMBERS = 9


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sum of each value over all ranks."""
    if get_world_size() == 1:
        return list(values)
    row = torch.tensor(values, dtype=torch.float64, device=get_distributed_info().device)
    dist.all_reduce(row)
    return row.tolist()


def gather_over_ranks(values: Sequence[int]) -> list[list[int]]:
    """Return the values of every rank, by rank. All ranks must pass equally many values."""
    row = torch.tensor(values, dtype=torch.int64, device=get_distributed_info().device)
    rows = [torch.empty_like(row) for _ in range(get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows).tolist()


class StepExchange:
    """Sum the numbers of every step over the ranks, by a message during the backward pass.

    Nothing waits for a GPU before the backward pass, because the loss is read after this pass. It is not read a step
    later, because the parameters of a step that is to be stopped or skipped must not change. Reading it later would
    save nothing: the message costs the time, and not the wait (2 to 19 % of steps of 1 and 5 ms over gloo, in both
    cases).
    """

    def __init__(self) -> None:
        self.received: list[int] = []  # signals that this process received
        self.stop_signal = 0  # the signal that some rank had received by the last step; 0 for none
        self.stops = False  # whether some rank had been asked to stop when the last step began
        self.weight = 0.0  # the sum of the weights of all samples of the last step
        self.gradient_factor = 1.0  # of the gradients of the last step: its samples divided by their weight
        self._device = None if get_world_size() == 1 else get_distributed_info().device
        self._own_loss: float | Tensor = 0.0
        self._sent: list[float] | Tensor = []
        self._work: Any = None

    def start(
        self,
        loss_sum: float | Tensor,
        samples: int,
        reports_loss: bool,
        changed: Sequence[str] = (),
        *,
        weight: float | None = None,
        stops: bool = False,
    ) -> None:
        """Send the numbers of this rank; its loss and samples do not count if it does not report its loss."""
        if self._device is not None and self._device.type != "cpu" and not isinstance(loss_sum, Tensor):
            loss_sum = torch.full((), loss_sum, dtype=torch.float64, device=self._device)
        self._own_loss = loss_sum
        # A flag for a signal, and its number. The sums tell which signal it is, if all ranks received the same signal.
        signals = [1.0, float(self.received[0])] if self.received else [0.0, 0.0]
        counted = float(samples) if reports_loss else 0.0
        weighs = counted if weight is None else weight * reports_loss
        differs = weight is not None and weight != samples
        # Places 2 and 3 follow: whether the loss is not finite, and the loss.
        numbers = [*signals, 0.0, 0.0, counted, weighs, *map(float, (differs, stops, bool(changed)))]
        row: Tensor | list[float] = numbers
        if isinstance(loss_sum, Tensor):
            # The row is filled on the GPU, because a copy from the host's memory would wait for all work of the GPU.
            row = loss_sum.new_zeros(_NUM_NUMBERS)
            for place, number in zip(row.unbind(), numbers, strict=True):
                if number:
                    place.fill_(number)
            row[2].copy_(loss_sum.isfinite().logical_not())
            if reports_loss:
                row[3].copy_(loss_sum.nan_to_num(0.0, 0.0, 0.0))  # NaN would spread to the loss of all ranks
        elif not math.isfinite(loss_sum):
            numbers[2] = 1.0
        elif reports_loss:
            numbers[3] = loss_sum
        if self._device is not None:
            row = torch.as_tensor(row, dtype=torch.float64, device=self._device)
            # The message is asynchronous, because the backward pass that follows takes longer.
            self._work = dist.all_reduce(row, async_op=True)
        self._sent = row
        if changed and self._work is not None:
            # Ranks that reduce gradients of different parameters fail in torch, with an error that names none of them.
            self._work.wait()
            if (num_changed := round(float(row[-1]))) < get_world_size():
                raise ConfigError(
                    f"rank {get_rank()} has frozen or unfrozen {', '.join(changed[:MAX_SAMPLES])}, as {num_changed} of "
                    f"{get_world_size()} ranks did: freeze and unfreeze parameters on every rank, in the same step"
                )

    def finish(self) -> tuple[float, float]:
        """Return the mean loss of the step (NaN if the loss of a rank is not finite) and the samples of all ranks.

        It also sets :attr:`gradient_factor`. If no sample has a weight, the factor is 0 and the loss is NaN.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        sums = self._sent.tolist() if isinstance(self._sent, Tensor) else self._sent
        signaled, numbers, nonfinite, loss_sum, samples, weight, differs, stops, _ = sums
        self.stop_signal = 0
        if ranks_with_signal := round(signaled):
            number = round(numbers) / ranks_with_signal
            # The mean of different signals may be no signal.
            self.stop_signal = int(number) if number in SIGNALS else int(signal.SIGTERM)
        self.stops, self.weight, self.gradient_factor = stops > 0.5, samples, 1.0
        if differs > 0.5:
            self.weight, self.gradient_factor = weight, samples / weight if weight else 0.0
        if nonfinite or (samples and not self.weight):
            return float("nan"), samples
        return loss_sum / (self.weight or 1.0), samples

    def describe_nonfinite(self, indices: Sequence[int]) -> str:
        """Name the ranks whose loss is not finite, and their samples of the step. Every rank must call it."""
        parts = []
        for rank, (loss, indices_of_rank) in enumerate(gather_objects((float(self._own_loss), list(indices)), None)):
            if loss - loss != 0.0:
                names = list_names([*map(str, indices_of_rank)], MAX_SAMPLES)
                samples = f", on the samples {names}" if indices_of_rank else ""
                parts.append(f"the loss is {loss} on rank {rank}{samples}")
        if not parts and not self.weight:
            return "the weights of all its samples are 0, because their labels are ignored or loss_weight says so"
        return "; ".join(parts) or "the norm of the gradient is not finite, although the losses are"


def join_process_group(timeout_s: float | None) -> None:
    """Join the process group of the launcher that started this process, if a launcher has, until the process ends.

    The process does not leave the group when training ends, because evaluating or exporting a distributed model needs
    it.
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

    SIGHUP and SIGUSR1 are not caught if the process already has a handler for them or ignores them.
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
    handlers = {number: signal.signal(number, note) for number in caught}
    try:
        with signals_counted(grace_period_s):
            yield exchange
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

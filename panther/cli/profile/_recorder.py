"""Record a script with torch's profiler, and summarise the record.

A collective on the CPU, such as ``gloo:all_reduce``, lasts from its call until it is done, including the time that it
waits for other ranks. A collective on a GPU lasts as long as its kernels run. The share of communication is the time in
which at least one collective is in progress, divided by the total time.
"""

__all__ = ["Recorder", "covered"]

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from panther._text import format_table

_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
_KERNELS = ("ncclDevKernel", "ncclKernel")
_Range = tuple[float, float]


class Recorder:
    """Records a ``with`` block: all of it, or ``steps`` optimizer steps after the first ``skip``."""

    def __init__(self, steps: int | None, skip: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise Kineto prints that it starts and stops
        self.steps, self.skip, self.count = steps, skip, 0
        self._on_gpu = torch.cuda.is_available()
        self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])])
        self._begin_s: float | None = None
        self._wall_s: float | None = None
        self._optimizer: Any = None

    @property
    def has_recorded(self) -> bool:
        """Return whether the script, or at least one optimizer step of it, was recorded."""
        return self._wall_s is not None and (self.steps is None or self.count > self.skip)

    def __enter__(self) -> None:
        self._hook = register_optimizer_step_post_hook(self._count_step)
        if self.skip == 0:
            self._start()

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        self._stop()

    def _count_step(self, optimizer: Any, *_: object) -> None:
        self._optimizer = self._optimizer or optimizer  # of several optimizers only the first counts
        if optimizer is not self._optimizer or self.steps is None:
            return
        self.count += 1
        if self.count == self.skip + self.steps:
            self._stop()
        elif self.count == self.skip:
            self._start()

    def _start(self) -> None:
        self._profiler.start()
        self._begin_s = time.perf_counter()

    def _stop(self) -> None:
        if self._begin_s is not None and self._wall_s is None:
            if self._on_gpu:
                torch.cuda.synchronize()
            self._wall_s = time.perf_counter() - self._begin_s
            self._profiler.stop()

    def write(self, trace: Path) -> None:
        """Write a Chrome trace."""
        trace.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(trace))

    def _sums(self) -> tuple[dict[str, list[float]], dict[str, list[float]], list[_Range], list[_Range]]:
        """Return calls, own and total ms by operation, calls and ms by collective, and the time ranges of both."""
        operations: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        collectives: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        sending, computing = list[_Range](), list[_Range]()
        for event in self._profiler.events() or ():
            on_device = event.device_type != torch.autograd.DeviceType.CPU
            span = (event.time_range.start, event.time_range.end)
            length_ms = (span[1] - span[0]) / 1e3
            if event.name.startswith(_BACKENDS):
                collectives[event.name][0] += not on_device
                # NCCL's collectives appear on the CPU and on the device, where their true length is.
                if on_device == self._on_gpu or not event.name.startswith("nccl:"):
                    collectives[event.name][1] += length_ms
                    sending.append(span)
            elif on_device and event.name.startswith(_KERNELS):
                sending.append(span)
            elif on_device == self._on_gpu and not (self._on_gpu and event.is_user_annotation):
                own_us = event.device_time_total if self._on_gpu else event.self_cpu_time_total
                for place, value in enumerate((1, own_us / 1e3, length_ms)):
                    operations[event.name][place] += value
                if self._on_gpu or event.name.startswith("aten::"):
                    computing.append(span)
        return operations, collectives, sending, computing

    def print(self, top: int) -> None:
        """Print the ``top`` operations by their own time, and the collectives."""
        operations, collectives, sending, computing = self._sums()
        wall_ms = 1e3 * (self._wall_s or 0)
        steps = "the whole script"
        if self.steps is not None:
            steps = f"{min(self.steps, self.count - self.skip)} optimizer steps"
        print(f"\nProfile of {steps}, {wall_ms:,.1f} ms" + (", rank 0" if "RANK" in os.environ else ""))
        processor = "on the GPU" if self._on_gpu else "on the CPU"
        rows = [[f"operations {processor}", "calls", "own ms", "share", "total ms"]]
        for name, (calls, own_ms, total_ms) in sorted(operations.items(), key=lambda item: -item[1][1])[:top]:
            rows.append([name[:48], f"{calls:,}", f"{own_ms:,.2f}", f"{own_ms / wall_ms:.1%}", f"{total_ms:,.2f}"])
        print(format_table(rows, align="<>"))
        if not collectives:
            print("\nNo communication was seen.")
            return
        rows = [["collectives", "calls", "sum of ms"]]
        rows += [[name, f"{calls:,}", f"{ms:,.2f}"] for name, (calls, ms) in sorted(collectives.items())]
        print("\n" + format_table(rows, align="<>"))
        sending_ms, computing_ms = covered(sending) / 1e3, covered(computing) / 1e3
        print(
            f"Communication: {sending_ms / wall_ms:.1%} of the time, {sending_ms:,.2f} of {wall_ms:,.2f} ms, waiting "
            f"for other ranks included; in {covered(sending + computing) / 1e3 - computing_ms:,.2f} ms of it nothing "
            "was computed."
        )


def covered(ranges: Iterable[_Range]) -> float:
    """Return the length of the union of ranges.

    Example:
        >>> covered([(5, 9), (0, 2), (1, 3)])
        7.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(ranges):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

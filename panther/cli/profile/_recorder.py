"""Run a script under torch's profiler, and sum up what it recorded.

Communication is every collective that the profiler saw: on the CPU from the call until it is done, as
``gloo:all_reduce``, waiting for other ranks included; on a GPU its kernels. Its share is the time in which at least one
was under way, over the whole.
"""

__all__ = ["NoModule", "Profile", "Run", "overlap", "profile_script", "run_script", "union"]

import os
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
_KERNELS = "ncclDevKernel", "ncclKernel"
Ranges = list[tuple[float, float]]


@dataclass(frozen=True)
class Profile:
    """What was recorded, times in ms."""

    wall_ms: float
    operations: dict[str, tuple[int, float, float]]
    """Calls, own time and time with what it calls, by operation."""
    communication: dict[str, tuple[int, float]]
    """Calls and their times added up, by collective."""
    communication_ms: float
    """Time with at least one collective under way."""
    exposed_ms: float
    """Of this, time in which nothing was computed."""
    on_gpu: bool
    steps: int | None
    """Optimizer steps recorded; None is the whole script."""


@dataclass(frozen=True)
class Run:
    """How a recorded script ended."""

    profile: Profile | None
    """None if it ended before there was anything to record."""
    steps: int
    """Optimizer steps that it made."""
    code: int
    """Its exit code."""
    error: BaseException | None
    """What it raised, but for SystemExit."""


class NoModule(Exception):  # noqa: N818 - made into a PantherError by the command
    """There is no module of this name that can be run."""


def union(ranges: Iterable[tuple[float, float]]) -> Ranges:
    """Merge ranges that overlap.

    Example:
        >>> union([(5, 9), (0, 2), (1, 3)])
        [(0, 3), (5, 9)]
    """
    merged: Ranges = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def overlap(first: Ranges, second: Ranges) -> float:
    """Length of what two lists of merged ranges have in common.

    Example:
        >>> overlap([(0, 3), (5, 9)], [(2, 6), (8, 20)])
        3.0
    """
    total, place = 0.0, 0
    for start, end in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        for other_start, other_end in second[place:]:
            if other_start >= end:
                break
            total += min(end, other_end) - max(start, other_start)
    return total


def profile_script(script: str, args: list[str], *, module: bool, steps: int | None, skip: int, trace: Path) -> Run:
    """Run a script in this process, and write a Chrome trace of what was recorded, also if the script failed.

    Raises:
        NoModule: If there is none to run.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says on the terminal that it starts and stops
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    recorder = _Recorder(profile(activities=activities), steps, skip)
    code, raised = 1, None
    with recorder:
        try:
            code = run_script(script, args, module)
        except NoModule:
            raise
        except BaseException as error:  # let through by the command, once what was recorded is shown
            raised = error
    if not recorder.started or (steps is not None and recorder.count <= skip):
        return Run(None, recorder.count, code, raised)
    trace.parent.mkdir(parents=True, exist_ok=True)
    recorder.profiler.export_chrome_trace(str(trace))
    return Run(_summarise(recorder, on_gpu), recorder.count, code, raised)


class _Recorder:
    """Starts and stops the profiler, between optimizer steps if it has to."""

    def __init__(self, profiler: profile, steps: int | None, skip: int) -> None:
        self.profiler, self.steps, self._skip = profiler, steps, skip
        self.count = 0
        self.started = self.stopped = False
        self.wall_s = 0.0
        self._optimizer: Any = None

    def __enter__(self) -> None:
        if self.steps is None:
            self._start()
        else:
            self._hook = register_optimizer_step_post_hook(self._step)
            if self._skip == 0:
                self._start()

    def __exit__(self, *exception: object) -> None:
        if self.steps is not None:
            self._hook.remove()
        self._stop()

    def _step(self, optimizer: Any, *_: object) -> None:
        self._optimizer = self._optimizer or optimizer  # of several the first counts
        if optimizer is not self._optimizer or self.steps is None:
            return
        self.count += 1
        if self.count == self._skip + self.steps:
            self._stop()
        elif self.count == self._skip:
            self._start()

    def _start(self) -> None:
        self.profiler.start()
        self.started = True
        self._begin = time.perf_counter()

    def _stop(self) -> None:
        if self.started and not self.stopped:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.wall_s = time.perf_counter() - self._begin
            self.profiler.stop()
            self.stopped = True


def run_script(script: str, args: list[str], module: bool) -> int:
    """Run a script in this process, with the arguments and the search path that Python would give it; its exit code.

    Raises:
        NoModule: If there is none to run.
    """
    before = sys.argv, list(sys.path)
    sys.argv = [script, *args]
    sys.path.insert(0, os.getcwd() if module else str(Path(script).resolve().parent))
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except ImportError as error:
        if module and _from_runpy(error):
            raise NoModule(f"the module {script} cannot be run: {error}") from None
        raise
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _from_runpy(error: BaseException) -> bool:
    """Whether it was raised by what looks for the module, not by the module."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__") == "runpy"


def _summarise(recorder: _Recorder, on_gpu: bool) -> Profile:
    times: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    calls: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    sending: Ranges = []
    computing: Ranges = []
    for event in recorder.profiler.events() or ():
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith(_BACKENDS):
            if not on_device:
                calls[event.name][0] += 1
            if on_device == on_gpu or not event.name.startswith("nccl:"):
                calls[event.name][1] += (span[1] - span[0]) / 1e3
                sending.append(span)
        elif on_device and event.name.startswith(_KERNELS):
            sending.append(span)
        elif on_device:
            if on_gpu and not event.is_user_annotation:
                computing.append(span)
                _add(times[event.name], span, event.device_time_total)
        else:
            if not on_gpu:
                _add(times[event.name], span, event.self_cpu_time_total)
                if event.name.startswith("aten::"):
                    computing.append(span)
    sending, computing = union(sending), union(computing)
    total = sum(end - start for start, end in sending)
    steps = None if recorder.steps is None else min(recorder.steps, recorder.count - recorder._skip)
    return Profile(
        wall_ms=recorder.wall_s * 1e3,
        operations={name: (int(n), own, whole) for name, (n, own, whole) in times.items()},
        communication={name: (int(n), ms) for name, (n, ms) in calls.items()},
        communication_ms=total / 1e3,
        exposed_ms=(total - overlap(sending, computing)) / 1e3,
        on_gpu=on_gpu,
        steps=steps,
    )


def _add(entry: list[float], span: tuple[float, float], own_us: float) -> None:
    entry[0] += 1
    entry[1] += own_us / 1e3
    entry[2] += (span[1] - span[0]) / 1e3

"""Run a script under torch's profiler, and summarise what it recorded.

Communication is every collective that the profiler saw: on the CPU from the call until it is done, as
``gloo:all_reduce``, waiting for other ranks included; on a GPU its kernels. Its share is the time in which at least one
was in progress, divided by the whole.
"""

__all__ = ["Profile", "Run", "covered", "profile_script", "run_script"]

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

from panther.errors import PantherError

_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
_KERNELS = ("ncclDevKernel", "ncclKernel")


@dataclass(frozen=True)
class Profile:
    """What was recorded, times in ms; ``steps`` is None for the whole script."""

    wall_ms: float
    operations: dict[str, tuple[int, float, float]]
    """Calls, own time and time including what it calls, by operation."""
    communication: dict[str, tuple[int, float]]
    """Calls and the sum of their times, by collective."""
    communication_ms: float
    """Time with at least one collective in progress."""
    exposed_ms: float
    """The share of it in which nothing was computed."""
    on_gpu: bool
    steps: int | None


@dataclass(frozen=True)
class Run:
    """The result of a recorded script."""

    profile: Profile | None
    """None if it ended before there was anything to record."""
    steps: int
    """Optimizer steps that it made."""
    status: int
    """Its exit status."""
    error: BaseException | None
    """The exception that ended it, except for SystemExit."""


class NoModuleError(PantherError):
    """The module cannot be found, or cannot be run."""


def covered(ranges: Iterable[tuple[float, float]]) -> float:
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


def profile_script(script: str, args: list[str], *, module: bool, steps: int | None, skip: int, trace: Path) -> Run:
    """Run a script in this process, and write a Chrome trace of what was recorded, also if the script failed.

    Raises:
        NoModuleError: If there is no such module.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints that it starts and stops
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    recorder = _Recorder(profile(activities=activities), steps, skip)
    status, raised = 1, None
    with recorder:
        try:
            status = run_script(script, args, module)
        except NoModuleError:
            raise
        except BaseException as error:  # raised again by the command, after what was recorded is shown
            raised = error
    if not recorder.started or (steps is not None and recorder.count <= skip):
        return Run(None, recorder.count, status, raised)
    trace.parent.mkdir(parents=True, exist_ok=True)
    recorder.profiler.export_chrome_trace(str(trace))
    return Run(_summarise(recorder, on_gpu), recorder.count, status, raised)


class _Recorder:
    """Starts and stops the profiler, between optimizer steps if ``steps`` are given."""

    def __init__(self, profiler: profile, steps: int | None, skip: int) -> None:
        self.profiler, self.steps, self.skip = profiler, steps, skip
        self.count, self.wall_s = 0, 0.0
        self.started = self.stopped = False
        self._optimizer: Any = None

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
    """Run a script in this process with the arguments and the search path that Python gives; return its exit status.

    Raises:
        NoModuleError: If there is no such module.
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
            raise NoModuleError(f"the module {script} cannot be run: {error}: correct its name") from None
        raise
    finally:
        sys.argv, sys.path[:] = before
    return 0


def _from_runpy(error: BaseException) -> bool:
    """Return whether an error was raised by the search for the module, not by the module."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__") == "runpy"


def _summarise(recorder: _Recorder, on_gpu: bool) -> Profile:
    operations: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    collectives: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    sending, computing = list[tuple[float, float]](), list[tuple[float, float]]()
    for event in recorder.profiler.events() or ():
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        span = (event.time_range.start, event.time_range.end)
        length = (span[1] - span[0]) / 1e3
        if event.name.startswith(_BACKENDS):
            collectives[event.name][0] += not on_device
            # NCCL's collectives appear on the CPU and on the device, where their true length is.
            if on_device == on_gpu or not event.name.startswith("nccl:"):
                collectives[event.name][1] += length
                sending.append(span)
        elif on_device and event.name.startswith(_KERNELS):
            sending.append(span)
        elif on_device == on_gpu and not (on_gpu and event.is_user_annotation):
            own_us = event.device_time_total if on_gpu else event.self_cpu_time_total
            entry = operations[event.name]
            entry[:] = entry[0] + 1, entry[1] + own_us / 1e3, entry[2] + length
            if on_gpu or event.name.startswith("aten::"):
                computing.append(span)
    return Profile(
        wall_ms=recorder.wall_s * 1e3,
        operations={name: (int(n), own, whole) for name, (n, own, whole) in operations.items()},
        communication={name: (int(n), ms) for name, (n, ms) in collectives.items()},
        communication_ms=covered(sending) / 1e3,
        exposed_ms=(covered(sending + computing) - covered(computing)) / 1e3,
        on_gpu=on_gpu,
        steps=None if recorder.steps is None else min(recorder.steps, recorder.count - recorder.skip),
    )

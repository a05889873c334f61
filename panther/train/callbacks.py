"""The callbacks of a run: their base class, that of those the Trainer makes itself, and the profiler of its steps."""

__all__ = ["BuiltInCallback", "Callback", "StepProfiler"]

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import profiler

from panther.distributed import get_rank
from panther.files import write_text

if TYPE_CHECKING:
    from panther.train.trainer import Trainer

_WAIT, _WARMUP, _ACTIVE = 2, 1, 5  # steps: the first ones allocate and compile, and are left out of the profile
_log = logging.getLogger(__name__)


class Callback:
    """Base class of callbacks, whose methods the Trainer calls during a run.

    Every method is called on every rank; by default it does nothing. If a callback has the methods ``state_dict`` and
    ``load_state_dict``, its state is stored in checkpoints.
    """

    def on_start(self, trainer: "Trainer") -> None:
        """Run before the first step, after resuming."""

    def on_step(self, trainer: "Trainer", loss: float) -> None:
        """Run after every optimizer step, with the mean loss of its window over all ranks."""

    def on_skip(self, trainer: "Trainer") -> None:
        """Run after a step that ``on_nonfinite="skip"`` or the scaler of fp16 skipped; ``trainer.step`` counts it."""

    def on_record(self, trainer: "Trainer", record: Mapping[str, Any]) -> None:
        """Run after every new record of the history."""

    def on_epoch(self, trainer: "Trainer") -> None:
        """Run after every epoch."""

    def on_checkpoint(self, trainer: "Trainer") -> None:
        """Run when saving a checkpoint has begun; an asynchronous one is still being written."""


class BuiltInCallback(Callback):
    """A callback that the Trainer makes for each run, and closes at its end."""

    def close(self, status: str) -> None:
        """End the run as ``"FINISHED"``, ``"FAILED"`` by an exception, or ``"KILLED"`` by a signal."""


class StepProfiler(BuiltInCallback):
    """Profiles a few steps into a Chrome trace and a table for each rank."""

    def __init__(self, folder: Path) -> None:
        # Without it, the profiler's library writes to the terminal that it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._folder, self._steps = folder, 0
        plan = profiler.schedule(wait=_WAIT, warmup=_WARMUP, active=_ACTIVE, repeat=1)
        self._profiler = profiler.profile(schedule=plan, on_trace_ready=self._write)
        self._profiler.start()

    def on_step(self, trainer: Any, loss: float) -> None:
        """Count the step."""
        self.on_skip(trainer)

    def on_skip(self, trainer: Any) -> None:
        """Count the step, which was computed up to its gradients."""
        self._steps += 1
        self._profiler.step()

    def close(self, status: str) -> None:
        """Stop, and warn if the run was too short."""
        self._profiler.stop()
        if self._steps < _WAIT + _WARMUP + _ACTIVE and get_rank() == 0:
            profiled = max(0, self._steps - _WAIT - _WARMUP)
            _log.warning("profiled %d of %d steps: the run had only %d", profiled, _ACTIVE, self._steps)

    def _write(self, measured: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        measured.export_chrome_trace(str(self._folder / f"rank-{get_rank()}.json"))
        table = measured.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
        write_text(self._folder / f"rank-{get_rank()}.txt", table)

"""The progress of a run on the first rank: a bar in a terminal, else a line for each record."""

__all__ = ["ProgressBar", "ProgressLines"]

import datetime
import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from panther.errors import require_extra
from panther.train.callbacks import BuiltInCallback

_log = logging.getLogger(__name__)


class ProgressBar(BuiltInCallback):
    """A progress bar of tqdm."""

    def __init__(self) -> None:
        self._tqdm = require_extra("tqdm", "demo").tqdm
        # The default lock is a named semaphore, which a killed process would leave in the system.
        self._tqdm.set_lock(threading.RLock())
        self._bar: Any = None

    def on_start(self, trainer: Any) -> None:
        """Show the bar."""
        self._bar = self._tqdm(total=trainer.total_steps, initial=trainer.step, unit="step")

    def on_step(self, trainer: Any, loss: float) -> None:
        """Advance the bar."""
        self._bar.set_postfix_str(f"loss {loss:.4g}", refresh=False)
        self._bar.update()

    def on_skip(self, trainer: Any) -> None:
        """Advance the bar."""
        self._bar.update()

    def close(self, status: str) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


class ProgressLines(BuiltInCallback):
    """Log a line for each record: the step, the losses and metrics, the samples per second and the remaining time.

    Args:
        prefix: A text at the start of each line.
        every_s: Seconds between two lines. Records in between have no line.
    """

    def __init__(self, prefix: str = "", every_s: float = 0.0) -> None:
        self._prefix, self._every_s, self._logged_at = prefix, every_s, -math.inf
        self._begun = (0, 0.0)
        self._last: Mapping[str, Any] = {}

    def on_start(self, trainer: Any) -> None:
        """Note the step and the time at which the run begins or continues."""
        self._begun = (trainer.step, time.perf_counter())

    def on_record(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """Log the line."""
        self._last = record
        if time.perf_counter() - self._logged_at < self._every_s:
            return
        self._logged_at = time.perf_counter()
        step, total = record["step"], trainer.total_steps
        values = [
            f"{name} {value:.4g}" for name, value in record.items() if name == "loss" or _is_validation(name, value)
        ]
        if record.get("samples_per_s") is not None:
            values.append(f"{record['samples_per_s']:,.4g} samples a second")
        if total is not None and step < total and (left := self._seconds_left(step, total)) is not None:
            values.append(f"{datetime.timedelta(seconds=round(left))} left")
        of_total = "" if total is None else f" of {total}"
        _log.info("%sstep %d%s: %s", self._prefix, step, of_total, ", ".join(values))

    def _seconds_left(self, step: int, total: int) -> float | None:
        first, begin = self._begun
        if step == first:
            return None
        return (time.perf_counter() - begin) / (step - first) * (total - step)

    def close(self, status: str) -> None:
        """Log the time and the price of a finished run."""
        if status == "FINISHED" and "device_hours" in self._last:
            price = "" if self._last.get("price") is None else f", which cost {self._last['price']:,.2f}"
            elapsed = datetime.timedelta(seconds=round(self._last["elapsed_s"]))
            _log.info(
                "%sfinished after %s: %.3g device-hours%s", self._prefix, elapsed, self._last["device_hours"], price
            )


def _is_validation(name: str, value: Any) -> bool:
    return name.startswith("validation_") and isinstance(value, int | float)

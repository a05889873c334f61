"""The history of a run as a table, a file or a plot; and the losses, speed and cost that its records have."""

__all__ = ["History", "Meter", "peak_memory"]

import contextlib
import csv
import io
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from panther.distributed import get_world_size
from panther.errors import require_extra
from panther.files import write_text

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class History:
    """The records of a run, each a mapping with ``step``, ``epoch``, ``elapsed_s`` and quantities.

    ``epoch`` counts completed epochs; the end of a stream is not known before the step after it. ``elapsed_s`` is the
    time spent in ``fit``, including the time of the run that this run resumed. ``device_hours`` is the same time
    multiplied by the number of processes.
    Training records have ``loss`` (the mean over the samples of all ranks since the last record), ``learning_rate``,
    ``gradient_norm``, ``samples_per_s``, ``memory_bytes`` (this process's peak memory; None on Windows without a GPU)
    and ``skipped``. Validation records have ``validation_loss`` and ``validation_<metric>``.

    Args:
        records: The first records.

    Example:
        >>> history = History(
        ...     [{"step": 1, "loss": 2.0}, {"step": 2, "validation_loss": 1.5}]
        ... )
        >>> history.best
        {'step': 2, 'validation_loss': 1.5}
        >>> history["loss"]
        ([1], [2.0])
    """

    def __init__(self, records: Sequence[Mapping[str, Any]] = ()) -> None:
        self._records = [dict(record) for record in records]

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        self._records.append(dict(record))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the records in order."""
        return iter(self._records)

    def __getitem__(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one quantity.

        Raises:
            KeyError: If no record has the quantity.
        """
        rows = [row for row in self._records if row.get(name) is not None]
        if not rows:
            fix = f"choose one of {', '.join(self.names)}" if self.names else "the history has no records, train first"
            raise KeyError(f"no record has {name!r}: {fix}")
        return [row["step"] for row in rows], [row[name] for row in rows]

    @property
    def names(self) -> list[str]:
        """All quantities, in the order of their first record."""
        return list(dict.fromkeys(name for row in self._records for name in row))

    @property
    def last(self) -> dict[str, Any]:
        """The latest value of each quantity."""
        return {name: value for row in self._records for name, value in row.items() if value is not None}

    @property
    def best(self) -> dict[str, Any]:
        """The record with the lowest validation loss, or with the lowest training loss if nothing was validated.

        Raises:
            ValueError: If there are no records.
        """
        for name in ("validation_loss", "loss"):
            rows = [row for row in self._records if row.get(name) is not None and math.isfinite(row[name])]
            if rows:
                return min(rows, key=lambda row: row[name])
        raise ValueError("the history has no records: train first")

    @property
    def total_time(self) -> float:
        """Seconds from the start of training to the last record; 0 without records."""
        return max((row["elapsed_s"] for row in self._records if "elapsed_s" in row), default=0.0)

    @property
    def device_hours(self) -> float:
        """Hours of all processes together, from the start of training to the last record; 0 without records."""
        return max((row["device_hours"] for row in self._records if "device_hours" in row), default=0.0)

    @property
    def best_accuracy(self) -> float:
        """The highest ``validation_accuracy``.

        Raises:
            ValueError: If no record has this quantity.
        """
        values = [row["validation_accuracy"] for row in self._records if row.get("validation_accuracy") is not None]
        if not values:
            raise ValueError("no record has validation_accuracy: pass metrics={'accuracy': ...}, and validation data")
        return max(values)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row per record and one column per quantity; missing values are empty."""
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, self.names)
        writer.writeheader()
        writer.writerows(self._records)
        write_text(path, table.getvalue())

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the losses, and in a second panel the metrics, over the steps.

        Args:
            path: Image file to write; None writes nothing.

        Returns:
            The matplotlib Figure.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        figure_module = require_extra("matplotlib.figure", "demo")
        losses: list[str] = [name for name in ("loss", "validation_loss") if name in self.names]
        metrics = [name for name in self.names if name.startswith("validation_") and name not in losses]
        panels = {"loss": losses, "metric": metrics} if metrics else {"loss": losses}
        figure = figure_module.Figure(figsize=(5 * len(panels), 3.5), layout="constrained")
        for panel, (label, names) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            for name in names:
                steps, values = self[name]
                panel.plot(steps, values, marker="." if len(steps) < 50 else "", label=name.replace("_", " "))
            panel.set(xlabel="step", ylabel=label)
            panel.grid(alpha=0.3)
            if panel.lines:
                panel.legend()
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def peak_memory() -> int | None:
    """Return the peak memory of this process in bytes: on its GPU if it uses one, else resident; None on Windows."""
    if torch.cuda.is_initialized() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    if resource is None:
        return None
    # On Linux, getrusage begins with the peak of the process that started this process.
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


class Meter:
    """Measure a run: losses, samples and time since the last record, and the time since its start.

    The seconds include earlier calls of ``fit`` and the run that this run resumes, and device-seconds are multiplied by
    the number of processes at that time.
    """

    def __init__(self) -> None:
        self.sums = [0.0, 0.0]
        self.elapsed_s = self.device_seconds = 0.0
        self.start()

    def start(self) -> None:
        """Begin to measure the time and the speed."""
        self._clock = self.counted_until = time.perf_counter()
        self._samples = 0.0

    def add_step(self, loss: float, weight: float, samples: float) -> None:
        """Count the mean loss of a step, the weight of the loss, and the samples of all ranks."""
        self.sums = [self.sums[0] + loss * weight, self.sums[1] + weight]
        self._samples += samples

    def begin_record(self) -> None:
        """Forget the losses and samples of the last record."""
        self.sums, self._clock, self._samples = [0.0, 0.0], time.perf_counter(), 0.0

    def leave_out(self, seconds: float) -> None:
        """Leave a time out of the speed: ``samples_per_s`` is the speed of training without validation."""
        self._clock += seconds

    @property
    def mean_loss(self) -> float:
        """The mean of the losses since the last record."""
        losses, weight = self.sums
        return losses / weight

    def samples_per_s(self) -> float:
        """Return the number of samples per second since the last record."""
        return self._samples / max(time.perf_counter() - self._clock, 1e-9)

    def count_time(self) -> None:
        """Add the time since the last call to the time of the run."""
        now = time.perf_counter()
        seconds, self.counted_until = now - self.counted_until, now
        self.elapsed_s += seconds
        self.device_seconds += seconds * get_world_size()

    def cost(self) -> dict[str, float]:
        """Return the time of the run up to now, and its device-hours."""
        self.count_time()
        return {"elapsed_s": self.elapsed_s, "device_hours": self.device_seconds / 3600}

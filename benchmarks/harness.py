"""Time alternatives against each other in one process, so that what disturbs one disturbs all.

Every round runs every alternative once, in a rotating order, after a warm-up; a ratio is the median over the rounds of
the two times of one round. With one CPU thread the time is this process's CPU time, which other processes do not
lengthen; with several threads, which wait for each other, it is wall time; on a GPU the time between two device events.
"""

__all__ = ["Timing", "figure", "interleave", "keep_freed_memory", "main", "print_table", "write_csv"]

import argparse
import contextlib
import csv
import ctypes
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from panther.errors import MissingExtraError, require_extra

RESULTS = Path(__file__).parent / "results"
_MIN_SAMPLE_S = 2e-3
_SLOW_S = 0.5
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one figure a round."""

    samples: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle of the samples."""
        return statistics.median(self.samples)

    def ratio_to(self, other: "Timing") -> float:
        """How many times faster this is than ``other``: the median of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.samples, other.samples, strict=True))


def interleave(
    alternatives: Mapping[str, Callable[[], object]],
    *,
    device: str = "cpu",
    budget_s: float = 10.0,
    min_rounds: int = 7,
) -> dict[str, Timing]:
    """Time every alternative in every round.

    Args:
        alternatives: Functions by name; each call is one unit of work.
        device: ``"cpu"`` or ``"cuda"``.
        budget_s: Stop after this long, but not before ``min_rounds``.
        min_rounds: Least number of rounds.

    Returns:
        A timing by name.
    """
    measure = _cuda_time if device == "cuda" else _cpu_time if torch.get_num_threads() == 1 else _wall_time
    repeats = {}
    for name, function in alternatives.items():
        once = measure(function, 1)
        if once < _SLOW_S:  # what is slower is warm after one call
            function()
            once = measure(function, 1)
        repeats[name] = max(1, min(1000, round(_MIN_SAMPLE_S / max(once, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in alternatives}
    names = list(alternatives)
    start = time.monotonic()
    rounds = 0
    while rounds < min_rounds or (time.monotonic() - start < budget_s and rounds < 101):
        for name in names:
            samples[name].append(measure(alternatives[name], repeats[name]))
        names.append(names.pop(0))
        rounds += 1
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def main(run: Callable[[str, float, bool], None], description: str | None, *, threads: int, budget_s: float) -> None:
    """Run a subject with the arguments of the command line, torch and the BLAS of NumPy and scipy on equal threads.

    Args:
        run: Takes the device, the seconds a case, and whether to run quickly and write nothing.
        description: Of the subject.
        threads: Default number of CPU threads.
        budget_s: Default seconds a case.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=threads, help="CPU threads; one makes CPU time a clean measure")
    parser.add_argument("--budget", type=float, default=budget_s, help="seconds a case, some rounds at least")
    parser.add_argument("--quick", action="store_true", help="small cases, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(MissingExtraError):
            require_extra("sklearn.utils.extmath", "bench")  # loads scipy's BLAS too, which is to be limited
            stack.enter_context(require_extra("threadpoolctl", "bench").threadpool_limits(options.threads))
        run(options.device, options.budget, options.quick)


def figure(value: float) -> float:
    """Round to three significant digits."""
    return round(value, 2 - math.floor(math.log10(value)))


def _cpu_time(function: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        function()
    return (time.process_time() - start) / repeats


def _wall_time(function: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def _cuda_time(function: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, as CUDA's allocator does; otherwise page faults time the kernel, not the code.

    Returns:
        Whether this C library took the request.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def write_csv(subject: str, rows: Sequence[Mapping[str, Any]], *, device: str) -> Path:
    """Write rows with the hardware, versions and commit they were measured on; returns the file."""
    stamp = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{subject}-{device if device == 'cuda' else f'cpu-threads-{torch.get_num_threads()}'}.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *stamp], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **stamp} for row in rows)
    return path


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under aligned headings."""
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{model}, {os.cpu_count()} cores"

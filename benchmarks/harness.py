"""Time alternatives against each other in one process, so that what disturbs one disturbs all.

Every round runs every alternative once, in a rotating order, after a warm-up; a ratio is the median over the rounds of
the two times of one round. With one CPU thread the time is this process's CPU time, which other processes do not
lengthen; with several threads, which wait for each other, it is wall time; on a GPU the time between two device events.
"""

__all__ = [
    "Timing",
    "commit",
    "figure",
    "interleave",
    "keep_freed_memory",
    "main",
    "print_table",
    "read_csv",
    "started_module",
    "test_support",
    "write_csv",
]

import argparse
import contextlib
import csv
import functools
import importlib
import itertools
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import hardware
from panther.errors import MissingExtraError, require_extra

ROOT = Path(__file__).resolve().parents[1]  # of the repository
# A run of pr.compress is timed as the first of its machine, which measures the speed of layers.
os.environ.setdefault("PANTHER_SPEEDS", "off")
RESULTS = ROOT / "benchmarks" / "results"
_MIN_SAMPLE_S = 2e-3
_SLOW_S = 0.5


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one figure a round."""

    samples: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Return the median of the samples."""
        return statistics.median(self.samples)

    def ratio_to(self, other: "Timing") -> float:
        """Return how many times faster this is than ``other``: the median of the rounds' ratios."""
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
        budget_s: Stop after this many seconds, but not before ``min_rounds``; 0 is one round of one call each.
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
        repeats[name] = max(1, min(1000, round(_MIN_SAMPLE_S / max(once, 1e-7)))) if budget_s else 1
    samples: dict[str, list[float]] = {name: [] for name in alternatives}
    names = list(alternatives)
    start = time.monotonic()
    rounds = 0
    while rounds < (min_rounds if budget_s else 1) or (time.monotonic() - start < budget_s and rounds < 101):
        for name in names:
            samples[name].append(measure(alternatives[name], repeats[name]))
        names.append(names.pop(0))
        rounds += 1
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def main(
    run: Callable[[str, float, bool], None],
    description: str | None,
    *,
    threads: int | Sequence[int],
    budget_s: float,
    memory: Sequence[str] = tuple(hardware.MEMORY),
) -> None:
    """Run a subject with the arguments of the command line, torch and the BLAS of NumPy and scipy on equal threads.

    Every number of threads and every setting of the allocator is a process of its own, because an allocator reads its
    settings when a process starts. Where the environment sets the allocator already, its settings alone are used.

    Args:
        run: Takes the device, the seconds a case (0 with ``--quick``), and whether to run quickly and write nothing.
        description: Of the subject.
        threads: Default numbers of CPU threads.
        budget_s: Default seconds a case.
        memory: Default settings of the allocator, keys of ``hardware.MEMORY``.
    """
    numbers = [threads] if isinstance(threads, int) else list(threads)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--threads", type=int, nargs="+", default=numbers, help="CPU threads; one makes CPU time a clean measure"
    )
    parser.add_argument(
        "--memory", nargs="+", default=list(memory), choices=list(hardware.MEMORY), help="settings of the allocator"
    )
    parser.add_argument("--budget", type=float, default=budget_s, help="seconds a case, some rounds at least")
    parser.add_argument("--quick", action="store_true", help="small cases, once each, nothing written")
    options = parser.parse_args()
    own = hardware.memory()
    settable = options.device == "cpu" and own in hardware.MEMORY and platform.libc_ver()[0] == "glibc"
    settings = options.memory[: 1 if options.quick else None] if settable else [own]
    if len(options.threads) > 1 or settings != [own]:
        inherited = {key: value for key, value in os.environ.items() if key not in hardware.MEMORY["kept"]}
        for number, setting in itertools.product(options.threads, settings):
            command = [sys.executable, "-m", started_module(), "--device", options.device]
            command += ["--budget", str(options.budget)]
            command += ["--threads", str(number), *(["--memory", setting] if setting in hardware.MEMORY else [])]
            environment = inherited | hardware.MEMORY.get(setting, {})
            subprocess.run([*command, *["--quick"] * options.quick], env=environment, check=True)
        return
    torch.set_num_threads(options.threads[0])
    print(", ".join(f"{key} {value}" for key, value in hardware.stamp().items() if value != ""), flush=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(MissingExtraError):
            require_extra("sklearn.utils.extmath", "bench")  # loads scipy's BLAS too, which is to be limited
            stack.enter_context(require_extra("threadpoolctl", "bench").threadpool_limits(options.threads[0]))
        run(options.device, 0.0 if options.quick else options.budget, options.quick)


def started_module() -> str:
    """Return the dotted name of the module that ``python -m`` runs."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        raise RuntimeError("start benchmarks as modules: python -m benchmarks.FOLDER.NAME")
    return spec.name


def figure(value: float) -> float:
    """Round to three significant digits."""
    return round(value, 2 - math.floor(math.log10(value))) if value else 0.0


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


def test_support(name: str) -> Any:
    """Import a module of tests/support, which tests import by its name alone."""
    folder = str(ROOT / "tests" / "support")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def keep_freed_memory() -> None:
    """Start this program again with an allocator that keeps freed memory, unless the environment sets the allocator.

    Without that, page faults time the kernel and not the code. Call it before anything else: it does not return if it
    starts the program again.
    """
    if hardware.memory() == "default" and platform.libc_ver()[0] == "glibc":
        os.execve(sys.executable, sys.orig_argv, os.environ | hardware.MEMORY["kept"])


def write_csv(subject: str, rows: Sequence[Mapping[str, Any]], *, device: str) -> Path:
    """Write rows with the hardware, versions and commit they were measured on; returns the file.

    Each CPU has a file of its own for each number of threads. Rows of that file that were measured with other settings
    of the allocator stay.
    """
    stamp: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit()}
    stamp |= hardware.stamp() if device == "cpu" else {"device": torch.cuda.get_device_name()}
    stamp |= {"torch": torch.__version__, "python": platform.python_version()}
    RESULTS.mkdir(exist_ok=True)
    place = f"cpu-{hardware.cpu_slug()}-threads-{torch.get_num_threads()}" if device == "cpu" else device
    path = RESULTS / f"{subject}-{place}.csv"
    others = [row for row in read_csv(path) if row.get("memory") != stamp.get("memory")] if path.exists() else []
    written = [*({**row, **stamp} for row in rows), *others]
    written.sort(key=lambda row: row.get("memory", ""))  # "default" first; stable
    with open(path, "w", newline="", encoding="utf-8") as file:
        columns = {**dict.fromkeys([*rows[0], *stamp]), **{key: None for row in others for key in row if row[key]}}
        writer = csv.DictWriter(file, list(columns), lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(written)
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of results."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows under aligned headings."""
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


@functools.cache  # before anything is written: the results themselves make the tree dirty
def commit() -> str:
    """Return the commit that is measured, with ``-dirty`` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"

"""What one process of the GPU suite does: measure the cases of a section until its time is up."""

__all__ = ["DEVICE_LOST", "PROBLEMS", "CaseInProgress", "remaining_cases", "run_section", "work"]

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from panther.kernels import selection

from benchmarks.gpu.correctness import LEFT_OUT, correctness_checks
from benchmarks.gpu.host import host_rows
from benchmarks.gpu.kernels import attention_problems, hadamard_problems, sparse_problems
from benchmarks.gpu.layers import sklinear_problems
from benchmarks.gpu.quantized import quantized_problems
from benchmarks.gpu.report import TIME_IS_UP, Recorder, read_rows, stamp
from benchmarks.gpu.roofline import ceilings
from benchmarks.gpu.timing import DeviceLostError, Problem, Timer, check_device, measure

PROBLEMS = {
    "sklinear": sklinear_problems,
    "quantized": quantized_problems,
    "attention": attention_problems,
    "hadamard": hadamard_problems,
    "sparse": sparse_problems,
}
DEVICE_LOST = 3  # The exit code of a process after which only a new process can use the device.
CEILINGS = "gpu_ceilings.json"
_KEYS = ("section", "case", "dtype", "precision", "direction")
_HOST_DTYPES = (torch.bfloat16, torch.float32)
_LAST_HOST_MODE = "forward and backward"

Cases = Iterable[tuple[Mapping[str, Any], Callable[[], Any]]]


class CaseInProgress:
    """The file that names the case in progress, for a process that ends in the middle of it."""

    def __init__(self, folder: Path, share: int = 0) -> None:
        self._path = folder / f"gpu_case_in_progress_{share}.json"

    def write(self, facts: Mapping[str, Any]) -> None:
        """Name the case that begins."""
        self._path.write_text(json.dumps({key: facts.get(key, "") for key in _KEYS}), encoding="utf-8")

    def take(self) -> dict[str, str]:
        """Return the columns of the case that was not completed, if there is one, and forget it."""
        try:
            facts: dict[str, str] = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            facts = {}
        self._path.unlink(missing_ok=True)
        return facts

    @staticmethod
    def take_all(folder: Path) -> list[dict[str, str]]:
        """Return the columns of the cases that all processes of a section did not complete, and forget them."""
        shares = [int(path.stem.rpartition("_")[2]) for path in folder.glob("gpu_case_in_progress_*.json")]
        return [facts for share in shares if (facts := CaseInProgress(folder, share).take())]


def work(options: argparse.Namespace) -> int:
    """Run one section in this process; returns the exit code."""
    device = "cpu" if options.dry_run else "cuda"
    if options.dry_run:
        torch.set_num_threads(1)
    recorder = Recorder(options.out / "gpu_suite.csv", stamp(device, options.commit))
    deadline = options.deadline or time.time() + 60
    if options.section == "roofline":
        return _measure_ceilings(recorder, device)
    if options.section == "host":
        return _measure_host(recorder, device, deadline)
    if options.section == "correctness":
        return _check_correctness(recorder, device, deadline, options.share, options.shares)
    timer = Timer(device, 0.02 if options.dry_run else 0.3)
    path = options.out / CEILINGS
    bounds = json.loads(path.read_text()) if path.exists() else ceilings(device, tiny=options.dry_run)
    cases = PROBLEMS[options.section](device, tiny=options.dry_run)
    return run_section(options.section, cases, recorder, timer, bounds, deadline)


def remaining_cases(
    section: str, rows: Sequence[Mapping[str, str]], device: str, share: int = 0, shares: int = 1
) -> list[dict[str, Any]]:
    """Return the columns of the cases of a section, or of one process's share of the checks, that have no row."""
    if section in ("tests", "roofline"):
        done = any(row["section"] == section for row in rows)
        return [] if done else [{"section": section, "case": section}]
    if section == "host":
        dtypes = {row["dtype"] for row in rows if row["section"] == "host" and row["direction"] == _LAST_HOST_MODE}
        skipped = any(row["section"] == "host" and row["status"] == "skipped" for row in rows)
        names = [str(dtype).removeprefix("torch.") for dtype in _HOST_DTYPES]
        return [
            {"section": "host", "case": "host", "dtype": name} for name in names if name not in dtypes and not skipped
        ]
    if section == "correctness":
        cases: Cases = correctness_checks(device, share, shares)
    else:
        cases = PROBLEMS[section](device, tiny=device == "cpu")
    done_keys = _done(rows)
    return [{"section": section, **facts} for facts, _ in cases if _key({"section": section, **facts}) not in done_keys]


def run_section(
    section: str, cases: Cases, recorder: Recorder, timer: Timer, bounds: dict[str, float], deadline: float
) -> int:
    """Measure case after case and record what happens to each, until the time is up; returns the exit code.

    A case that has rows already is left out, so that a section can be taken up again.
    """

    def rows_of(build: Callable[[], Problem]) -> Iterator[dict[str, Any]]:
        return measure(build(), timer, bounds)

    return _run_cases(section, cases, recorder, timer.device, deadline, rows_of)


def _run_cases(
    section: str,
    cases: Cases,
    recorder: Recorder,
    device: str,
    deadline: float,
    rows_of: Callable[[Callable[[], Any]], Iterator[dict[str, Any]]],
    share: int = 0,
) -> int:
    in_progress = CaseInProgress(recorder.path.parent, share)
    done = _done(read_rows(recorder.path))
    for facts, build in cases:
        common = {"section": section, **facts}
        if _key(common) in done:
            continue
        if time.time() > deadline:
            recorder.add({**common, "status": "skipped", "note": TIME_IS_UP})
            continue
        in_progress.write(common)
        try:
            for row in rows_of(build):
                recorder.add({**common, **row})
        except DeviceLostError as error:
            recorder.add({**common, "status": "failed", "note": f"the device is lost: {error}"})
            in_progress.take()
            return DEVICE_LOST
        except Exception as error:  # The other cases are still measured.
            recorder.add({**common, "status": "failed", "note": f"{type(error).__name__}: {error}"[:300]})
            try:
                check_device(device)
            except DeviceLostError:
                in_progress.take()
                return DEVICE_LOST
        in_progress.take()
        if device == "cuda":
            torch.cuda.empty_cache()  # The memory of captured graphs.
    return 0


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row.get(key, "") for key in _KEYS)


def _done(rows: Sequence[Mapping[str, str]]) -> set[tuple[str, ...]]:
    return {_key(row) for row in rows}


def _check_correctness(recorder: Recorder, device: str, deadline: float, share: int, shares: int) -> int:
    """Record the error of each check; on a GPU the Triton kernels are demanded, so that nothing else is checked."""
    if device == "cuda":
        os.environ["PANTHER_KERNELS"] = "triton"
        selection.backend.cache_clear()

    def rows_of(run: Callable[[], float]) -> Iterator[dict[str, Any]]:
        yield {"status": "passed", "max_rel_error": f"{run():.2e}"}

    def cases() -> Iterator[tuple[Mapping[str, Any], Callable[[], Any]]]:
        yield from correctness_checks(device, share, shares)

    code = _run_cases("correctness", cases(), recorder, device, deadline, rows_of, share)
    left_out = {"section": "correctness", "case": "left out", "status": "skipped", "note": LEFT_OUT}
    if code == 0 and share == 0 and _key(left_out) not in _done(read_rows(recorder.path)):
        recorder.add(left_out)
    return code


def _measure_ceilings(recorder: Recorder, device: str) -> int:
    rates = ceilings(device, tiny=device == "cpu")
    (recorder.path.parent / CEILINGS).write_text(json.dumps(rates))
    units = {"copy": (1e12, "TB/s, read and written"), "launch_us": (1, "us"), "graph_launch_us": (1, "us")}
    for name, value in rates.items():
        scale, unit = units.get(name, (1e12, "TFLOP/s"))
        note = f"{value / scale:.4g} {unit}"
        recorder.add({"section": "roofline", "case": name, "status": "measured", "note": note})
    return 0


def _measure_host(recorder: Recorder, device: str, deadline: float) -> int:
    """Record the time on the host of calls of layers; in a rehearsal their kernels do nothing."""
    if device == "cpu":
        if importlib.util.find_spec("triton") is None:
            recorder.add({"section": "host", "case": "host", "status": "skipped", "note": "Triton is not installed"})
            return 0
        from benchmarks.gpu import stub  # The import sets environment variables.

        stub.install()
    calls = 3 if device == "cpu" else 300
    done = _done(read_rows(recorder.path))
    dtypes = {facts["dtype"] for facts in remaining_cases("host", read_rows(recorder.path), device)}
    for dtype in (dtype for dtype in _HOST_DTYPES if str(dtype).removeprefix("torch.") in dtypes):
        if time.time() > deadline:
            facts = {"case": "host", "dtype": str(dtype).removeprefix("torch."), "mode": "host"}
            recorder.add({"section": "host", **facts, "status": "skipped", "note": TIME_IS_UP})
            continue
        for row in host_rows(device, (dtype,), calls):
            facts = {"section": "host", "case": row["case"], "dtype": row["dtype"], "direction": row["mode"]}
            note = f"{row['x dense']} times the dense one" if row["x dense"] else ""
            if _key(facts) not in done:
                recorder.add({**facts, "mode": "host", "status": "measured", "time_us": row["host_us"], "note": note})
    return 0

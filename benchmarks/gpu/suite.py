"""Everything there is to do where a GPU is at hand, in one call of under eight minutes.

    python -m benchmarks.gpu_suite [--out DIR] [--budget-s 420] [--dry-run]

Runs the tests marked ``gpu``, measures the card's ceilings, then Panther's layers and kernels against torch. Every row
is in ``DIR/gpu_suite.csv`` before the next is measured; ``DIR/gpu_suite.md`` says which aims are reached. Each section
runs in a process of its own: what breaks the device, or never ends, costs no other section, and one that broke the
device is taken up again at its next case. ``--dry-run`` rehearses all of it on the CPU, at tiny sizes, without tests.
"""

__all__ = ["SECTIONS", "main", "run_section"]

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.host import host_rows
from benchmarks.gpu.kernels import attention_problems, hadamard_problems, sparse_problems, windowed_problems
from benchmarks.gpu.layers import sklinear_problems
from benchmarks.gpu.quantized import quantized_problems
from benchmarks.gpu.report import Recorder, markdown, read_rows, stamp
from benchmarks.gpu.roofline import ceilings
from benchmarks.gpu.timing import DeviceLostError, Problem, Timer, check_device, measure
from benchmarks.harness import RESULTS, ROOT, commit

TESTS = ("tests/kernels", "tests/sketch", "tests/nn", "tests/linalg")
# Share of the whole time at whose end a section must be over; what one leaves goes to the next.
SECTIONS = {
    "tests": 0.4,
    "roofline": 0.45,
    "host": 0.48,
    "sklinear": 0.66,
    "quantized": 0.75,
    "attention": 0.83,
    "windowed": 0.9,
    "hadamard": 0.95,
    "sparse": 1.0,
}
_PROBLEMS = {
    "sklinear": sklinear_problems,
    "quantized": quantized_problems,
    "attention": attention_problems,
    "windowed": windowed_problems,
    "hadamard": hadamard_problems,
    "sparse": sparse_problems,
}
_LOST = 3  # exit code of a section whose device must be had anew
_GRACE_S = 15.0  # for the case that a section is in when its time is up
_TEST_PROCESSES = 8
_CEILINGS = "gpu_ceilings.json"

Cases = Iterable[tuple[dict[str, Any], Callable[[], Problem]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every section, or, in the processes this starts, one; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for CSV and Markdown")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds for everything")
    parser.add_argument("--dry-run", action="store_true", help="rehearse on the CPU with tiny sizes")
    parser.add_argument("--commit", default=None, help="what is measured, where the checkout has no git history")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--section", choices=[*_PROBLEMS, "roofline", "host"], help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "torch finds no GPU here, so there is nothing to measure: --dry-run rehearses on the CPU", file=sys.stderr
        )
        return 2
    return _work(options) if options.section else _suite(options)


def _suite(options: argparse.Namespace) -> int:
    start = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    table, page = options.out / "gpu_suite.csv", options.out / "gpu_suite.md"
    for left in (table, options.out / _CEILINGS):  # of an earlier run, of another card perhaps
        left.unlink(missing_ok=True)
    options.commit = options.commit or commit()
    stamped = stamp("cpu" if options.dry_run else "cuda", options.commit)
    print(", ".join(f"{name} {value}" for name, value in stamped.items()), flush=True)
    recorder = Recorder(table, stamped)
    for section in (name for name in SECTIONS if name in options.sections):
        deadline = start + SECTIONS[section] * options.budget_s
        try:
            if section == "tests":
                _run_tests(recorder, options, deadline)
            else:
                _run_in_process(section, recorder, options, deadline)
        except Exception as error:  # whatever befalls a section, the next one is to run
            recorder.add({"section": section, "case": "section", "status": "failed", "note": repr(error)[:300]})
        page.write_text(markdown(read_rows(table), stamped, options.dry_run), encoding="utf-8")
    aims = page.read_text(encoding="utf-8").partition("## Tests")[0]
    print(f"\n{aims}\nwritten to {table} and {page} in {time.time() - start:.0f} s")
    return 1 if any(row["section"] == "tests" and row["status"] == "failed" for row in read_rows(table)) else 0


def _run_tests(recorder: Recorder, options: argparse.Namespace, deadline: float) -> None:
    if options.dry_run:
        recorder.add({"section": "tests", "case": "gpu", "status": "skipped", "note": "a rehearsal runs none"})
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *TESTS]
    if importlib.util.find_spec("xdist"):  # compiling is most of the time, and it is the host's
        command += ["-n", str(min(_TEST_PROCESSES, os.cpu_count() or 1))]
    log = options.out / "gpu_tests.log"
    with open(log, "w", encoding="utf-8") as file:
        # A session of its own, so that workers end with it and do not go on beneath what is measured next.
        run = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = "passed" if run.wait(max(1.0, deadline - time.time())) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            status = "out of time"
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            recorder.add({"section": "tests", "case": "gpu", "status": "failed", "note": line[:300]})
    last = lines[-1].strip("= ") if lines else "no output"
    recorder.add({"section": "tests", "case": "gpu", "status": status, "note": f"{status}: {last}"})


def _run_in_process(section: str, recorder: Recorder, options: argparse.Namespace, deadline: float) -> None:
    """Run a section in a process of its own, begun again after a case that broke the device."""
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--section", section, "--deadline", str(deadline)]
    command += ["--out", str(options.out), "--commit", options.commit, *(["--dry-run"] if options.dry_run else [])]
    while True:
        done_before = len(read_rows(recorder.path))
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=max(1.0, deadline + _GRACE_S - time.time())).returncode
        except subprocess.TimeoutExpired:
            recorder.add({"section": section, "case": "section", "status": "failed", "note": "it did not end in time"})
            return
        if code == 0:
            return
        if code != _LOST or len(read_rows(recorder.path)) == done_before:
            note = f"its process ended with exit code {code}"
            recorder.add({"section": section, "case": "section", "status": "failed", "note": note})
            return


def _work(options: argparse.Namespace) -> int:
    """Run one section in this process."""
    device = "cpu" if options.dry_run else "cuda"
    if options.dry_run:
        torch.set_num_threads(1)
    recorder = Recorder(options.out / "gpu_suite.csv", stamp(device, options.commit or commit()))
    card = options.out / _CEILINGS
    if options.section == "roofline":
        found = ceilings(device, tiny=options.dry_run)
        card.write_text(json.dumps(found))
        units = {"copy": (1e12, "TB/s, read and written"), "launch_us": (1, "us"), "graph_launch_us": (1, "us")}
        for name, value in found.items():
            scale, unit = units.get(name, (1e12, "TFLOP/s"))
            note = f"{value / scale:.4g} {unit}"
            recorder.add({"section": "roofline", "case": name, "status": "measured", "note": note})
        return 0
    if options.section == "host":
        return _measure_host(recorder, options)
    timer = Timer(device, 0.02 if options.dry_run else 0.3)
    cases = _PROBLEMS[options.section](device, tiny=options.dry_run)
    bounds = json.loads(card.read_text()) if card.exists() else ceilings(device, tiny=options.dry_run)
    return run_section(options.section, cases, recorder, timer, bounds, options.deadline or time.time() + 60)


def _measure_host(recorder: Recorder, options: argparse.Namespace) -> int:
    """Record the time on the host of calls of layers; in a rehearsal their kernels do nothing."""
    if options.dry_run:
        if importlib.util.find_spec("triton") is None:
            recorder.add({"section": "host", "case": "host", "status": "skipped", "note": "Triton is not installed"})
            return 0
        from benchmarks.gpu import stub  # here, because the import sets environment variables

        stub.install()
    device, calls = ("cpu", 3) if options.dry_run else ("cuda", 300)
    for row in host_rows(device, (torch.bfloat16, torch.float32), calls):
        facts = {"case": row["case"], "dtype": row["dtype"], "direction": row["mode"], "mode": "host"}
        note = f"{row['x dense']} times the dense one" if row["x dense"] else ""
        recorder.add({"section": "host", **facts, "status": "measured", "time_us": row["host_us"], "note": note})
        if options.deadline and time.time() > options.deadline:
            note = "the time for this section is up"
            recorder.add({"section": "host", "case": "further cases", "status": "skipped", "note": note})
            break
    return 0


def run_section(
    section: str, cases: Cases, recorder: Recorder, timer: Timer, bounds: dict[str, float], deadline: float
) -> int:
    """Measure case after case and record what happens to each, until the time is up; returns the exit code.

    A case that has rows already is left out, so that a section can be taken up again.
    """
    keys = ("section", "case", "dtype", "precision", "direction")
    done = {tuple(row[key] for key in keys) for row in read_rows(recorder.path)}
    for facts, build in cases:
        common = {"section": section, **facts}
        if tuple(common.get(key, "") for key in keys) in done:
            continue
        if time.time() > deadline:
            recorder.add({**common, "status": "skipped", "note": "the time for this section is up"})
            continue
        try:
            for row in measure(build(), timer, bounds):
                recorder.add({**common, **row})
        except DeviceLostError as error:
            recorder.add({**common, "status": "failed", "note": f"the device is lost: {error}"})
            return _LOST
        except Exception as error:  # the other cases are to run
            recorder.add({**common, "status": "failed", "note": f"{type(error).__name__}: {error}"[:300]})
            try:
                check_device(timer.device)
            except DeviceLostError:
                return _LOST
        if timer.device == "cuda":
            torch.cuda.empty_cache()  # what graphs held
    return 0

"""Everything there is to do where a GPU is at hand, in one call of under eight minutes.

    python -m benchmarks.gpu_suite [--out DIR] [--budget-s 420] [--dry-run]

Checks every kernel against float64, measures the card's ceilings, then Panther's layers and kernels against torch, and
runs the tests marked ``gpu`` in the time that is left. Every row is in ``DIR/gpu_suite.csv`` before the next is
measured. ``DIR/gpu_suite.md`` says which aims are reached and which predictions are contradicted, and
``DIR/gpu_suite.rst`` is the same as a page of the documentation. A second call with the same folder continues where the
first stopped. Each section runs in a process of its own: what breaks the device, or never ends, costs one case.
``--dry-run`` rehearses all of it on the CPU, at tiny sizes, without tests.
"""

__all__ = ["SECTIONS", "main", "slowdown"]

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu.report import (
    TIME_IS_UP,
    Recorder,
    continue_table,
    document,
    markdown,
    read_rows,
    sources_digest,
    stamp,
)
from benchmarks.gpu.worker import CEILINGS, DEVICE_LOST, PROBLEMS, CaseInProgress, remaining_cases, work
from benchmarks.harness import RESULTS, ROOT, commit

TESTS = ("tests/kernels", "tests/sketch", "tests/nn", "tests/linalg")
# The weight of each section. A section gets its share, among the sections that are left, of the time that is left.
SECTIONS = {
    "correctness": 120,
    "roofline": 15,
    "sklinear": 100,
    "quantized": 40,
    "attention": 40,
    "host": 20,
    "hadamard": 15,
    "sparse": 15,
    "tests": 30,
}
_GRACE_S = 20.0  # For the case in progress when the time of its section is up; longer on a busy machine.
_LONGEST_GRACES = 10
_LONGEST_OVERRUN_S = 40.0  # Past the budget of the whole call, on a GPU; with the default budget, before 8 minutes.
_START_S = 4.0  # A process is not started for less time than this.
_PERIOD_S = 0.25
_MOST_PROCESSES = 8
_TEST_PACKAGES = ("pytest", "pytest_timeout", "hypothesis")  # imported by conftest.py


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every section, or, in the processes this starts, one; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and the pages")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds for everything")
    parser.add_argument("--dry-run", action="store_true", help="rehearse on the CPU with tiny sizes")
    parser.add_argument("--commit", default=None, help="what is measured, where the checkout has no git history")
    parser.add_argument("--processes", type=int, default=None, help="processes for the checks, a core each; up to 8")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--section", choices=[*PROBLEMS, "correctness", "roofline", "host"], help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--shares", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "torch finds no GPU here, so there is nothing to measure: --dry-run rehearses on the CPU", file=sys.stderr
        )
        return 2
    options.commit = options.commit or _commit()
    return work(options) if options.section else _suite(options)


def _commit() -> str:
    """Return the commit, with a digest of the sources where the commit does not identify them."""
    described = commit()
    return f"{described}-{sources_digest()}" if described == "unknown" or described.endswith("-dirty") else described


def _suite(options: argparse.Namespace) -> int:
    start = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    table, pages = options.out / "gpu_suite.csv", (options.out / "gpu_suite.md", options.out / "gpu_suite.rst")
    stamped = stamp("cpu" if options.dry_run else "cuda", options.commit)
    print(", ".join(f"{name} {value}" for name, value in stamped.items()), flush=True)
    if not continue_table(table, stamped, CaseInProgress.take_all(options.out)):
        (options.out / CEILINGS).unlink(missing_ok=True)
    recorder = Recorder(table, stamped)
    end = start + options.budget_s
    sections = [name for name in SECTIONS if name in options.sections]
    for i, section in enumerate(sections):
        share = SECTIONS[section] / sum(SECTIONS[name] for name in sections[i:])
        deadline = time.time() + share * max(0.0, end - time.time())
        try:
            if not remaining_cases(section, read_rows(table), "cpu" if options.dry_run else "cuda"):
                print(f"{section} is complete", flush=True)
            elif section == "tests":
                _run_tests(recorder, options, deadline)
            elif section == "correctness":
                shares = options.processes or _num_processes()
                with ThreadPoolExecutor(shares) as threads:  # Each thread waits for a process.
                    for outcome in [
                        threads.submit(_run_in_process, section, recorder, options, deadline, end, share, shares)
                        for share in range(shares)
                    ]:
                        outcome.result()
            else:
                _run_in_process(section, recorder, options, deadline, end)
        except Exception as error:  # The next section runs, whatever happens to this one.
            recorder.add({"section": section, "case": "section", "status": "failed", "note": repr(error)[:300]})
        for page, render in zip(pages, (markdown, document), strict=True):
            page.write_text(render(read_rows(table), stamped, options.dry_run), encoding="utf-8")
    summary = pages[0].read_text(encoding="utf-8").partition("## Correctness")[0]
    print(f"\n{summary}\nwritten to {table}, {pages[0]} and {pages[1]} in {time.time() - start:.0f} s")
    checked = (row for row in read_rows(table) if row["section"] in ("correctness", "tests"))
    return 1 if any(row["status"] == "failed" for row in checked) else 0


def _run_tests(recorder: Recorder, options: argparse.Namespace, deadline: float) -> None:
    skipped = {"section": "tests", "case": "gpu", "status": "skipped"}
    absent_packages = [name for name in _TEST_PACKAGES if importlib.util.find_spec(name) is None]
    if options.dry_run:
        recorder.add({**skipped, "note": "a rehearsal runs none"})
        return
    if absent_packages:
        note = f"{', '.join(absent_packages)} not installed here: the section correctness is all that was checked"
        recorder.add({**skipped, "note": note})
        return
    if deadline - time.time() < _START_S:
        recorder.add({**skipped, "note": TIME_IS_UP})
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *TESTS]
    if importlib.util.find_spec("xdist"):  # Most of the time is compilation, on the host.
        command += ["-n", str(options.processes or _num_processes())]
    log = options.out / "gpu_tests.log"
    with open(log, "w", encoding="utf-8") as file:
        code = _run(command, deadline, stdout=file)
    status = "out of time" if code is None else "passed" if code == 0 else "failed"
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            recorder.add({"section": "tests", "case": "gpu", "status": "failed", "note": line[:300]})
    last = lines[-1].strip("= ") if lines else "no output"
    recorder.add({"section": "tests", "case": "gpu", "status": status, "note": f"{status}: {last}"})


def _num_processes() -> int:
    """Return how many processes compile kernels at a time."""
    return min(_MOST_PROCESSES, _num_cores())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_in_process(
    section: str,
    recorder: Recorder,
    options: argparse.Namespace,
    deadline: float,
    end: float,
    share: int = 0,
    shares: int = 1,
) -> None:
    """Run a section, or a share of the checks, in a process, which is started again after a case that ended it.

    The process checks the deadline before each case and records what it skips. What it could not record, because it
    was ended or never started, is recorded here.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--section", section, "--deadline", str(deadline)]
    command += ["--out", str(options.out), "--commit", options.commit, *(["--dry-run"] if options.dry_run else [])]
    command += ["--share", str(share), "--shares", str(shares)]
    in_progress = CaseInProgress(options.out, share)
    latest = float("inf") if options.dry_run else end + _LONGEST_OVERRUN_S
    while deadline - time.time() >= _START_S:
        done_before = len(read_rows(recorder.path))
        code = _run(command, deadline, grace_s=_GRACE_S, latest=latest)
        if code == 0:
            return
        note = "it did not end in time" if code is None else f"its process ended with exit code {code}"
        if interrupted := in_progress.take():
            recorder.add({**interrupted, "status": "failed", "note": note})
        elif code != DEVICE_LOST or len(read_rows(recorder.path)) == done_before:
            recorder.add({"section": section, "case": "section", "status": "failed", "note": note})
            return
    device = "cpu" if options.dry_run else "cuda"
    for facts in remaining_cases(section, read_rows(recorder.path), device, share, shares):
        recorder.add({**facts, "status": "skipped", "note": TIME_IS_UP})


def _run(
    command: Sequence[str],
    deadline: float,
    *,
    grace_s: float = 0.0,
    latest: float = float("inf"),
    stdout: object = None,
) -> int | None:
    """Return the exit code of a command, or None if it was ended.

    The command is ended, with the processes that it started, ``grace_s`` seconds after the deadline, or after the time
    ``latest``. Seconds of a busy machine count as less, by ``slowdown``.
    """
    # In a session of its own, so that its workers end with it and do not disturb what is measured next.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.STDOUT if stdout else None,
        start_new_session=True,  # type: ignore[call-overload]
    ) as process:
        try:
            counted_s, previous_s = 0.0, time.time()
            while counted_s <= grace_s:
                try:
                    code: int = process.wait(_PERIOD_S)
                    return code
                except subprocess.TimeoutExpired:
                    now = time.time()
                    if now > latest:
                        return None
                    if now > deadline:
                        counted_s += (now - max(previous_s, deadline)) / slowdown()
                    previous_s = now
            return None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def slowdown() -> float:
    """Return by how much other programs slow this one: the load for each core, from 1 to ten."""
    load = os.getloadavg()[0]
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The threads that are ready now, because the average of a minute rises slowly.
        load = max(load, float(Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].partition("/")[0]))
    return min(float(_LONGEST_GRACES), max(1.0, load / _num_cores()))

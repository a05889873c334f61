"""The benchmarks run, and their harness adds up; how fast anything is, is not a test's affair."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness

    yield harness
    sys.modules.pop("harness")


def test_every_subject_runs():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--budget", "0.01"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heading = next(line for line in done.stdout.splitlines() if "nn.Linear" in line)
    assert all(column in heading for column in ("time_us", "x nn.Linear", "x optimum", "stored_bytes", "rms_error"))


def test_every_alternative_runs_in_every_round(harness):
    calls = []
    alternatives = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = harness.interleave(alternatives, budget_s=0, min_rounds=3)
    assert list(timings) == ["a", "b", "c"]
    assert {len(timing.samples) for timing in timings.values()} == {3}
    starts = [name for name, before in zip(calls[1:], calls, strict=False) if name != before]
    assert set(starts[-8:]) == {"a", "b", "c"}


def test_ratios_are_paired_by_round(harness):
    """A disturbed round counts once, not as two different medians."""
    quick, slow = harness.Timing((1.0, 10.0, 1.0)), harness.Timing((2.0, 20.0, 2.0))
    assert quick.ratio_to(slow) == 2
    assert slow.ratio_to(quick) == 0.5
    assert quick.median_s == 1


def test_csv_carries_hardware_versions_and_commit(harness, monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    path = harness.write_csv("subject", [{"layer": "a", "time_us": 1.5}], device="cpu")
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert row["layer"] == "a"
    assert all(row[key] for key in ("date", "commit", "device", "threads", "torch", "python"))

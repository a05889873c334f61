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


@pytest.mark.tool
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
    (layers,) = (part for part in done.stdout.split("== ") if part.startswith("bench_sklinear"))
    heading = next(line for line in layers.splitlines() if "nn.Linear" in line)
    assert all(column in heading for column in ("time_us", "x nn.Linear", "x optimum", "stored_bytes", "rms_error"))


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import distributed_bytes

    yield distributed_bytes
    sys.modules.pop("distributed_bytes")


@pytest.mark.distributed
def test_a_sharded_pair_sends_the_sketch_and_not_the_width(counting):
    rows = counting.tensor_parallel_bytes(counting.Sizes(width=4096, sketch_size=64, batch=256))
    sent = {(row["layer"], row["stage"]): (row["bytes"], row["formula"]) for row in rows}
    assert sent == {
        ("SKLinear", "forward"): (131_072, 131_072),
        ("SKLinear", "backward"): (131_072, 131_072),
        ("nn.Linear", "forward"): (4_194_304, 4_194_304),
        ("nn.Linear", "backward"): (4_194_304, 4_194_304),
    }


@pytest.mark.distributed
def test_data_parallel_bytes_shrink_as_the_parameters_do(counting):
    sizes = counting.Sizes(width=512, sketch_size=8, batch=4)
    rows = counting.data_parallel_bytes(sizes)
    assert all(row["bytes"] == row["formula"] for row in rows)
    sent = {(row["case"], row["layer"]): row["bytes"] for row in rows}
    numbers = {kind: sum(p.numel() for p in sizes.layer(kind).parameters()) for kind in ("SKLinear", "nn.Linear")}
    for strategy in ("ddp", "replicate", "fsdp"):
        sketched, dense = (sent[f"data parallel, {strategy}", kind] for kind in numbers)
        assert sketched * numbers["nn.Linear"] == dense * numbers["SKLinear"]
    assert sent["sync_sketches", "8 SKLinear"] - sent["sync_sketches", "1 SKLinear"] == 7 * 8  # a seed a layer


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

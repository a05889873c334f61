"""The benchmarks run, and their harness adds up; how fast anything is, is not a test's affair."""

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
    for name in ("figures", "harness", "hardware"):
        sys.modules.pop(name, None)


@pytest.mark.tool
def test_every_subject_runs():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--budget", "0.01"],
        capture_output=True,
        text=True,
        timeout=600,
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


@pytest.fixture
def results(harness, monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD", "GLIBC_TUNABLES"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "results"


def test_csv_carries_hardware_settings_versions_and_commit(harness, results):
    path = harness.write_csv("subject", [{"layer": "a", "time_us": 1.5}], device="cpu")
    (row,) = harness.read_csv(path)
    assert row["layer"] == "a"
    assert row["memory"] == "default"
    names = ("date", "commit", "device", "instructions", "cores", "threads", "allocator", "huge_pages")
    assert all(row[key] for key in (*names, "torch", "python"))


def test_results_of_other_allocator_settings_and_other_cpus_stay(harness, results, monkeypatch):
    harness.write_csv("subject", [{"layer": "a", "old": 1}], device="cpu")
    for key, value in harness.hardware.MEMORY["kept"].items():
        monkeypatch.setenv(key, value)
    harness.write_csv("subject", [{"layer": "b"}, {"layer": "c"}], device="cpu")
    path = harness.write_csv("subject", [{"layer": "d"}], device="cpu")
    assert [(row["layer"], row["old"], row["memory"]) for row in harness.read_csv(path)] == [
        ("a", "1", "default"),
        ("d", "", "kept"),
    ]
    monkeypatch.setattr(harness.hardware, "cpu_name", lambda: "Another(R) CPU @ 2.90GHz")
    another = harness.write_csv("subject", [{"layer": "e"}], device="cpu")
    assert len(harness.read_csv(path)) == 2
    assert [row["device"] for row in harness.read_csv(another)] == ["Another(R) CPU @ 2.90GHz"]


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("AMD EPYC", "amd-epyc"),
        ("AMD Ryzen 7 5800X 8-Core Processor", "amd-ryzen-7-5800x"),
        ("Intel(R) Xeon(R) Processor @ 2.90GHz", "intel-xeon-2.90ghz"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c-2.70ghz"),
        ("Apple M2", "apple-m2"),
    ],
)
def test_a_file_name_tells_the_cpu(harness, name, slug):
    assert harness.hardware.cpu_slug(name) == slug


def test_settings_of_an_allocator_are_named(harness, monkeypatch):
    for key in [key for key in os.environ if key.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "THP_"))]:
        monkeypatch.delenv(key)
    assert harness.hardware.memory() == "default"
    monkeypatch.setenv("LD_PRELOAD", "/somewhere/libjemalloc.so.2")
    assert harness.hardware.memory() == "LD_PRELOAD=libjemalloc.so.2"  # no folders of one machine in the results


def test_figures_have_a_row_for_each_cpu(harness, results, monkeypatch):
    import figures

    monkeypatch.setattr(figures, "RESULTS", results)
    harness.write_csv("subject", [{"layer": "a"}], device="cpu")
    monkeypatch.setattr(harness.hardware, "cpu_name", lambda: "Another")
    for settings in ({}, harness.hardware.MEMORY["kept"]):
        for key, value in settings.items():
            monkeypatch.setenv(key, value)
        harness.write_csv("subject", [{"layer": "c" if settings else "b"}], device="cpu")
    found = figures.by_cpu("subject", harness.torch.get_num_threads()).values()
    # Of the second CPU those with the default settings.
    assert sorted([row["layer"] for row in rows] for rows in found) == [["a"], ["b"]]


def test_rows_that_the_last_cpu_lacks_are_those_of_another(harness, results, monkeypatch):
    import figures

    monkeypatch.setattr(figures, "RESULTS", results)
    harness.write_csv("subject", [{"layer": name, "ms": 1} for name in ("a", "b")], device="cpu")
    monkeypatch.setattr(harness.hardware, "cpu_name", lambda: "Another")
    harness.write_csv("subject", [{"layer": name, "ms": 2} for name in ("c", "b", "d")], device="cpu")
    cpu, rows = figures.merged("subject", harness.torch.get_num_threads(), ("layer",))
    assert cpu == "Another"
    assert [(row["layer"], row["ms"]) for row in rows] == [("c", "2"), ("b", "2"), ("d", "2"), ("a", "1")]

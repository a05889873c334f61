"""The harness of the benchmarks adds up, and its results say what they were measured on."""

import os

import pytest


@pytest.fixture
def harness():
    from benchmarks import harness

    return harness


def test_every_alternative_runs_in_every_round(harness):
    calls = []
    alternatives = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = harness.interleave(alternatives, budget_s=1e-9, min_rounds=3)
    assert list(timings) == ["a", "b", "c"]
    assert {len(timing.samples) for timing in timings.values()} == {3}
    starts = [name for name, previous in zip(calls[1:], calls, strict=False) if name != previous]
    assert set(starts[-8:]) == {"a", "b", "c"}
    timings = harness.interleave(alternatives, budget_s=0)
    assert {len(timing.samples) for timing in timings.values()} == {1}


def test_ratios_are_paired_by_round(harness):
    """A disturbed round counts once, not as two different medians."""
    quick, slow = harness.Timing((1.0, 10.0, 1.0)), harness.Timing((2.0, 20.0, 2.0))
    assert quick.ratio_to(slow) == 2
    assert slow.ratio_to(quick) == 0.5


@pytest.fixture
def results(harness, monkeypatch, tmp_path):
    from benchmarks.figures import layout

    for module in (harness, layout):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    for key in [key for key in os.environ if key.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "THP_"))]:
        monkeypatch.delenv(key)


def test_rows_say_what_they_were_measured_on(harness, results):
    (row,) = harness.read_csv(harness.write_csv("subject", [{"layer": "a", "time_us": 1.5}], device="cpu"))
    names = ("date", "commit", "device", "instructions", "cores", "threads", "allocator", "huge_pages")
    assert all(row[key] for key in (*names, "torch", "python"))
    assert (row["layer"], row["memory"]) == ("a", "default")


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
    other_path = harness.write_csv("subject", [{"layer": "e"}], device="cpu")
    assert other_path.name == f"subject-cpu-another-2.90ghz-threads-{harness.torch.get_num_threads()}.csv"
    assert len(harness.read_csv(path)) == 2


def test_no_folder_of_a_machine_is_in_the_results(harness, results, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/somewhere/libjemalloc.so.2")
    assert harness.hardware.memory() == "LD_PRELOAD=libjemalloc.so.2"


def test_figures_take_the_default_allocator_and_complete_the_last_cpu(harness, results, monkeypatch):
    from benchmarks.figures import layout

    harness.write_csv("subject", [{"layer": name, "ms": 1} for name in ("a", "b")], device="cpu")
    monkeypatch.setattr(harness.hardware, "cpu_name", lambda: "Another")
    harness.write_csv("subject", [{"layer": name, "ms": 2} for name in ("c", "b", "d")], device="cpu")
    for key, value in harness.hardware.MEMORY["kept"].items():
        monkeypatch.setenv(key, value)
    harness.write_csv("subject", [{"layer": "b", "ms": 3}], device="cpu")
    threads = harness.torch.get_num_threads()
    rows_by_cpu = layout.by_cpu("subject", threads)
    assert [row["layer"] for row in rows_by_cpu["Another"]] == ["c", "b", "d"]
    cpu, rows = layout.merged("subject", threads, ("layer",))
    assert cpu == "Another"
    assert [(row["layer"], row["ms"]) for row in rows] == [("c", "2"), ("b", "2"), ("d", "2"), ("a", "1")]

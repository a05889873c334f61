"""The GPU suite runs end to end on the CPU, keeps what it has measured, and survives what fails."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.tool
ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise OSError("the suite must not need a network")
socket.socket.connect = socket.getaddrinfo = refuse
"""


@pytest.fixture
def suite(monkeypatch):
    """The suite's modules, imported as its scripts import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    import gpu_suite

    yield gpu_suite
    for name in set(sys.modules) - before:
        if name.startswith(("gpu_", "harness")):
            del sys.modules[name]


@pytest.fixture
def recorder(suite, tmp_path):
    return suite.Recorder(tmp_path / "gpu_suite.csv", suite.stamp("cpu", "abc"))


def run(*arguments, tmp_path, timeout=240):
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_suite", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_rehearsal_goes_through_every_section(tmp_path):
    done = run("--dry-run", "--out", tmp_path / "out", "--commit", "abc", tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "out/gpu_suite.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    measured = {"sklinear", "quantized", "attention", "windowed", "hadamard", "sparse"}
    assert {row["section"] for row in rows} == {"tests", "roofline", *measured}
    assert [row for row in rows if row["status"] == "failed"] == []
    assert all(row["commit"] == "abc" and row["torch"] and row["date"] and row["card"] for row in rows)
    timed = [row for row in rows if row["time_us"]]
    assert {row["alternative"] for row in timed} >= {"nn.Linear", "SKLinear", "optimum", "SDPA", "panther", "torch CSR"}
    assert {row["direction"] for row in timed if row["section"] == "sklinear"} == {"forward", "forward+backward"}
    for row in timed:
        assert float(row["time_us"]) > 0
        assert float(row["x_baseline"]) > 0
        if row["max_rel_error"]:
            assert float(row["max_rel_error"]) < (3e-2 if row["dtype"] == "bfloat16" else 1e-4), row
    page = (tmp_path / "out/gpu_suite.md").read_text()
    assert "rehearsal" in page
    assert all(title in page for title in ("## Aims", "## SKLinear", "## Causal linear attention"))


def test_what_the_time_does_not_allow_is_skipped_and_said(tmp_path):
    done = run(
        "--dry-run", "--budget-s", 0, "--sections", "hadamard", "--out", tmp_path, "--commit", "a", tmp_path=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "gpu_suite.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert {(row["status"], row["note"]) for row in rows} == {("skipped", "the time for this section is up")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_sentence(tmp_path):
    done = run("--out", tmp_path / "out", tmp_path=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "no GPU" in done.stderr
    assert not (tmp_path / "out").exists()


BOUNDS = {"copy": 1e9, "bfloat16": 1e9, "float32": 1e9, "tf32": 1e9}


def problem(suite, broken=None):
    """Two ways to double a number, and one that fails."""
    from gpu_timing import Alternative, Problem

    x = torch.ones(8)
    ways = {
        "base": Alternative(lambda: x + x, 64, 8, lambda: [2 * x.double()]),
        "wrong": Alternative(lambda: 3 * x, 64, 8, lambda: [2 * x.double()]),
        "missing": "there is none",
    }
    if broken:
        ways["broken"] = Alternative(broken, 64, 8)
    return Problem(ways, "base", "float32")


def fail(*_):
    raise RuntimeError("this one fails\nat length")


def rows_of(suite, recorder):
    return suite.read_rows(recorder.path)


def test_an_alternative_that_fails_leaves_the_others(suite, recorder):
    timer = suite.Timer("cpu", 0.01)
    assert suite.run_section(
        "s", [({"case": "a"}, lambda: problem(suite, fail))], recorder, timer, BOUNDS, time.time() + 60
    ) == 0  # fmt: skip
    rows = {row["alternative"]: row for row in rows_of(suite, recorder) if row["mode"] != "graph"}
    assert rows["base"]["status"] == "measured"
    assert rows["base"]["max_rel_error"] == "0.0"
    assert rows["wrong"]["max_rel_error"] == "0.5"
    assert rows["missing"]["note"] == "there is none"
    assert rows["broken"]["status"] == "failed"
    assert rows["broken"]["note"] == "RuntimeError: this one fails"
    assert float(rows["base"]["roofline_us"]) == pytest.approx(0.064)


def test_a_case_that_fails_leaves_the_others_and_none_is_measured_twice(suite, recorder):
    built = []

    def good():
        built.append(1)
        return problem(suite)

    cases = [({"case": "bad"}, fail), ({"case": "good"}, good)]
    for _ in range(2):
        assert suite.run_section("s", cases, recorder, suite.Timer("cpu", 0.01), BOUNDS, time.time() + 60) == 0
    assert built == [1]
    assert [row["status"] for row in rows_of(suite, recorder) if row["case"] == "bad"] == ["failed"]


def test_a_lost_device_ends_the_process_and_the_section_is_taken_up_again(suite, recorder, monkeypatch, tmp_path):
    def lose():
        raise suite.DeviceLostError("an illegal address")

    cases = [({"case": "loses"}, lose), ({"case": "good"}, lambda: problem(suite))]
    codes = []

    def process(command, **_):
        timer = suite.Timer("cpu", 0.01)
        codes.append(suite.run_section("sparse", cases, recorder, timer, BOUNDS, time.time() + 60))
        return subprocess.CompletedProcess(command, codes[-1])

    monkeypatch.setattr(suite.subprocess, "run", process)
    options = suite.argparse.Namespace(out=tmp_path, commit="a", dry_run=True)
    suite._run_in_process("sparse", recorder, options, time.time() + 60)
    assert codes == [3, 0]
    status = [(row["case"], row["status"]) for row in rows_of(suite, recorder) if row["mode"] != "graph"]
    assert status[0] == ("loses", "failed")
    assert ("good", "measured") in status


@pytest.mark.parametrize(
    ("outcome", "said"), [(-11, "exit code -11"), (3, "exit code 3"), ("hangs", "did not end in time")]
)
def test_a_process_that_dies_or_hangs_costs_its_section_alone(suite, recorder, monkeypatch, tmp_path, outcome, said):
    def process(command, timeout, **_):
        if outcome == "hangs":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, outcome)

    monkeypatch.setattr(suite.subprocess, "run", process)
    options = suite.argparse.Namespace(out=tmp_path, commit="a", dry_run=True)
    suite._run_in_process("sparse", recorder, options, time.time() + 60)
    (row,) = rows_of(suite, recorder)
    assert row["status"] == "failed"
    assert said in row["note"]


def test_every_aim_is_a_case_that_the_suite_measures(suite):
    """An aim whose case is renamed would silently count as not measured."""
    import gpu_report

    names = {
        section: {(facts["case"], facts.get("direction", "")) for facts, _ in problems("cpu")}
        for section, problems in suite._PROBLEMS.items()
    }
    for aim in gpu_report.AIMS:
        assert (aim.case, aim.direction) in names[aim.section], aim


def test_aims_are_reached_missed_or_not_measured(suite):
    import gpu_report

    aim = gpu_report.Aim("s", "c", "a", "graph", "forward", "of_roofline", 0.8)
    row = {
        "section": "s", "case": "c", "alternative": "a", "mode": "graph", "direction": "forward", "dtype": "bfloat16",
        "status": "measured", "of_roofline": "0.81", "note": "",
    }  # fmt: skip
    assert gpu_report.verdict(aim, [row]) == ("0.81", "reached")
    assert gpu_report.verdict(aim, [row | {"of_roofline": "0.79"}]) == ("0.79", "missed")
    assert gpu_report.verdict(aim, [row | {"dtype": "float32"}]) == ("", "not measured")
    failed = row | {"status": "failed", "of_roofline": "", "note": "why"}
    assert gpu_report.verdict(aim, [failed]) == ("", "not measured: why")

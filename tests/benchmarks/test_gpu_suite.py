"""The GPU suite runs end to end on the CPU, keeps what it has measured, and survives what fails."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import waits

pytestmark = pytest.mark.tool
ROOT = Path(__file__).parents[2]
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise OSError("the suite must not need a network")
socket.socket.connect = socket.getaddrinfo = refuse
"""
BOUNDS = {"copy": 1e9, "bfloat16": 1e9, "float32": 1e9, "tf32": 1e9}


@pytest.fixture
def suite():
    from benchmarks.gpu import suite

    return suite


@pytest.fixture
def recorder(suite, tmp_path):
    return suite.Recorder(tmp_path / "gpu_suite.csv", suite.stamp("cpu", "abc"))


def read_rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rehearsal_of_two_sections_in_their_processes(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    command = [sys.executable, "-m", "benchmarks.gpu_suite", "--dry-run", "--out", tmp_path / "out", "--commit", "abc"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    waits.run([*command, "--sections", "tests", "roofline", "host", "hadamard"], cwd=ROOT, env=environment, check=True)
    rows = read_rows(tmp_path / "out/gpu_suite.csv")
    assert {row["section"] for row in rows} == {"tests", "roofline", "host", "hadamard"}
    assert [row for row in rows if row["status"] == "failed"] == []
    assert all(row["commit"] == "abc" and row["torch"] and row["date"] and row["card"] for row in rows)
    page = (tmp_path / "out/gpu_suite.md").read_text()
    assert all(title in page for title in ("rehearsal", "## Aims", "## Tests"))


@pytest.mark.usefixtures("one_thread")
def test_every_section_measures_what_it_compares(suite, tmp_path):
    for section in suite._PROBLEMS:
        assert suite.main(["--dry-run", "--out", str(tmp_path), "--commit", "abc", "--section", section]) == 0
    rows = read_rows(tmp_path / "gpu_suite.csv")
    assert {row["section"] for row in rows} == set(suite._PROBLEMS)
    assert [row for row in rows if row["status"] == "failed"] == []
    timed = [row for row in rows if row["time_us"]]
    assert {row["alternative"] for row in timed} >= {"nn.Linear", "SKLinear", "optimum", "SDPA", "panther", "torch CSR"}
    assert {row["direction"] for row in timed if row["section"] == "sklinear"} == {"forward", "forward+backward"}
    for row in timed:
        assert float(row["x_baseline"]) > 0
        if row["max_rel_error"]:
            assert float(row["max_rel_error"]) < (3e-2 if row["dtype"] == "bfloat16" else 1e-4), row
    page = suite.markdown(rows, suite.stamp("cpu", "abc"), True)
    assert all(title in page for title in ("## SKLinear", "## Causal linear attention"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_sentence(suite, tmp_path, capsys):
    assert suite.main(["--out", str(tmp_path / "out")]) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert "no GPU" in message
    assert not (tmp_path / "out").exists()


def problem():
    """Two ways to double a number, one that there is not, and one that fails."""
    from benchmarks.gpu.timing import Alternative, Problem

    x = torch.ones(8)
    ways = {
        "base": Alternative(lambda: x + x, 64, 8, lambda: [2 * x.double()]),
        "wrong": Alternative(lambda: 3 * x, 64, 8, lambda: [2 * x.double()]),
        "missing": "there is none",
        "broken": Alternative(fail, 64, 8),
    }
    return Problem(ways, "base", "float32")


def fail(*_):
    raise RuntimeError("this one fails\nat length")


def run_cases(suite, recorder, cases, seconds=60):
    return suite.run_section("sparse", cases, recorder, suite.Timer("cpu", 0.01), BOUNDS, time.time() + seconds)


def test_what_fails_leaves_the_rest_and_no_case_is_measured_twice(suite, recorder):
    built = []

    def good():
        built.append(1)
        return problem()

    cases = [({"case": "bad"}, fail), ({"case": "good"}, good)]
    assert [run_cases(suite, recorder, cases) for _ in range(2)] == [0, 0]
    assert built == [1]
    rows = [row for row in read_rows(recorder.path) if row["mode"] != "graph"]
    assert [row["status"] for row in rows if row["case"] == "bad"] == ["failed"]
    alternatives = {row["alternative"]: row for row in rows if row["case"] == "good"}
    assert alternatives["base"]["status"] == "measured"
    assert alternatives["base"]["max_rel_error"] == "0.0"
    assert float(alternatives["base"]["roofline_us"]) == pytest.approx(0.064)
    assert alternatives["wrong"]["max_rel_error"] == "0.5"
    assert alternatives["missing"]["note"] == "there is none"
    assert (alternatives["broken"]["status"], alternatives["broken"]["note"]) == (
        "failed",
        "RuntimeError: this one fails",
    )


def test_a_case_after_the_time_is_up_is_skipped(suite, recorder):
    assert run_cases(suite, recorder, [({"case": "late"}, problem)], seconds=-1) == 0
    (row,) = read_rows(recorder.path)
    assert (row["status"], row["note"]) == ("skipped", "the time for this section is up")


def run_in_process(suite, recorder, monkeypatch, tmp_path, process):
    """Run a section whose process is replaced by a function."""
    monkeypatch.setattr(suite.subprocess, "run", process)
    options = suite.argparse.Namespace(out=tmp_path, commit="a", dry_run=True)
    suite._run_in_process("sparse", recorder, options, time.time() + 60)
    return read_rows(recorder.path)


def test_after_a_lost_device_the_section_continues_in_a_new_process(suite, recorder, monkeypatch, tmp_path):
    def lose():
        raise suite.DeviceLostError("an illegal address")

    codes = []

    def process(command, **_):
        codes.append(run_cases(suite, recorder, [({"case": "loses"}, lose), ({"case": "good"}, problem)]))
        return subprocess.CompletedProcess(command, codes[-1])

    rows = run_in_process(suite, recorder, monkeypatch, tmp_path, process)
    assert codes == [3, 0]
    statuses = [(row["case"], row["status"]) for row in rows]
    assert statuses[0] == ("loses", "failed")
    assert ("good", "measured") in statuses


@pytest.mark.parametrize(
    ("outcome", "note"), [(-11, "exit code -11"), (3, "exit code 3"), ("hangs", "did not end in time")]
)
def test_a_process_that_dies_or_hangs_costs_its_section_alone(suite, recorder, monkeypatch, tmp_path, outcome, note):
    def process(command, timeout, **_):
        if outcome == "hangs":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, outcome)

    (row,) = run_in_process(suite, recorder, monkeypatch, tmp_path, process)
    assert row["status"] == "failed"
    assert note in row["note"]


def test_every_aim_is_a_case_that_the_suite_measures(suite):
    """An aim whose case is renamed would silently count as not measured."""
    from benchmarks.gpu import report

    names = {
        section: {(facts["case"], facts.get("direction", "")) for facts, _ in problems("cpu")}
        for section, problems in suite._PROBLEMS.items()
    }
    assert [aim for aim in report.AIMS if (aim.case, aim.direction) not in names[aim.section]] == []


def test_aims_are_reached_missed_or_not_measured():
    from benchmarks.gpu.report import Aim, verdict

    aim = Aim("s", "c", "a", "graph", "forward", "of_roofline", 0.8)
    row = {
        "section": "s", "case": "c", "alternative": "a", "mode": "graph", "direction": "forward", "dtype": "bfloat16",
        "status": "measured", "of_roofline": "0.81", "note": "",
    }  # fmt: skip
    assert verdict(aim, [row]) == ("0.81", "reached")
    assert verdict(aim, [row | {"of_roofline": "0.79"}]) == ("0.79", "missed")
    assert verdict(aim, [row | {"dtype": "float32"}]) == ("", "not measured")
    failed = row | {"status": "failed", "of_roofline": "", "note": "why"}
    assert verdict(aim, [failed]) == ("", "not measured: why")

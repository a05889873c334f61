"""The GPU suite runs end to end on the CPU, keeps what it has measured, and survives what fails."""

import csv
import os
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
def worker():
    from benchmarks.gpu import worker

    return worker


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
    command += ["--sections", "tests", "roofline", "host", "hadamard"]
    waits.run(command, cwd=ROOT, env=environment, check=True)
    rows = read_rows(tmp_path / "out/gpu_suite.csv")
    assert {row["section"] for row in rows} == {"tests", "roofline", "host", "hadamard"}
    assert [row for row in rows if row["status"] == "failed"] == []
    assert all(row["commit"] == "abc" and row["torch"] and row["date"] and row["card"] for row in rows)
    page = (tmp_path / "out/gpu_suite.md").read_text()
    assert all(title in page for title in ("rehearsal", "## Aims", "## Predictions", "## Tests"))
    again = waits.run(command, cwd=ROOT, env=environment, check=True)
    assert "hadamard is complete" in again.stdout
    assert read_rows(tmp_path / "out/gpu_suite.csv") == rows


@pytest.mark.usefixtures("one_thread")
def test_every_section_measures_what_it_compares(suite, tmp_path):
    for section in suite.PROBLEMS:
        assert suite.main(["--dry-run", "--out", str(tmp_path), "--commit", "abc", "--section", section]) == 0
    rows = read_rows(tmp_path / "gpu_suite.csv")
    assert {row["section"] for row in rows} == set(suite.PROBLEMS)
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


def run_cases(worker, recorder, cases, seconds=60):
    return worker.run_section("sparse", cases, recorder, worker.Timer("cpu", 0.01), BOUNDS, time.time() + seconds)


def test_what_fails_leaves_the_rest_and_no_case_is_measured_twice(worker, recorder):
    built = []

    def good():
        built.append(1)
        return problem()

    cases = [({"case": "bad"}, fail), ({"case": "good"}, good)]
    assert [run_cases(worker, recorder, cases) for _ in range(2)] == [0, 0]
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


def run_in_process(suite, recorder, monkeypatch, tmp_path, process, seconds=60):
    """Run a section whose process is replaced by a function."""
    monkeypatch.setattr(suite, "_run", process)
    options = suite.argparse.Namespace(out=tmp_path, commit="a", dry_run=True)
    suite._run_in_process("sparse", recorder, options, time.time() + seconds, time.time() + seconds)
    return read_rows(recorder.path)


def test_after_a_lost_device_the_section_continues_in_a_new_process(suite, worker, recorder, monkeypatch, tmp_path):
    def lose():
        raise worker.DeviceLostError("an illegal address")

    codes = []

    def process(command, deadline, **_):
        codes.append(run_cases(worker, recorder, [({"case": "loses"}, lose), ({"case": "good"}, problem)]))
        return codes[-1]

    rows = run_in_process(suite, recorder, monkeypatch, tmp_path, process)
    assert codes == [3, 0]
    statuses = [(row["case"], row["status"]) for row in rows]
    assert statuses[0] == ("loses", "failed")
    assert ("good", "measured") in statuses


def test_a_second_call_repeats_what_was_not_measured_alone(suite, recorder):
    measured = {"section": "sparse", "case": "a", "status": "measured"}
    recorder.add(measured)
    recorder.add({"section": "sparse", "case": "late", "status": "skipped", "note": suite.TIME_IS_UP})
    recorder.add({"section": "sparse", "case": "section", "status": "failed", "note": "exit code 1"})
    recorder.add({"section": "sparse", "case": "half", "status": "measured"})
    later = recorder.stamped | {"date": "2030-01-01"}
    unfinished = [{"section": "sparse", "case": "half", "dtype": "", "precision": "", "direction": ""}]
    assert suite.continue_table(recorder.path, later, unfinished)
    assert [row["case"] for row in read_rows(recorder.path)] == ["a"]


@pytest.mark.parametrize("column", ["card", "torch", "triton", "commit"])
def test_the_table_of_another_card_version_or_commit_is_kept_beside(suite, recorder, column):
    recorder.add({"section": "sparse", "case": "a", "status": "measured"})
    rows = read_rows(recorder.path)
    assert not suite.continue_table(recorder.path, recorder.stamped | {column: "another"}, [])
    assert not recorder.path.exists()
    assert read_rows(recorder.path.with_name("gpu_suite-earlier-1.csv")) == rows


@pytest.mark.usefixtures("one_thread")
def test_the_checks_cover_every_kernel_dtype_and_direction(suite, tmp_path):
    assert suite.main(["--dry-run", "--out", str(tmp_path), "--commit", "abc", "--section", "correctness"]) == 0
    *rows, left_out = read_rows(tmp_path / "gpu_suite.csv")
    assert left_out["note"].endswith("cover them")
    assert {row["status"] for row in rows} == {"passed"}
    modules = {path.stem for path in (ROOT / "kernels/_triton").glob("[a-z]*.py")}
    covered = {(row["case"].partition(":")[0], row["dtype"], row["direction"]) for row in rows}
    dtypes = ("bfloat16", "float16", "float32")
    modules -= {"sketched_gradients"}  # The backward pass of the sketched product runs these kernels.
    assert covered >= {(module, dtype, "forward") for module in modules for dtype in dtypes}
    without_backward = {"quantized", "quantized_few_rows", "signs"}
    assert covered >= {(module, dtype, "backward") for module in modules - without_backward for dtype in dtypes}


def test_a_wrong_kernel_fails_its_check():
    from benchmarks.gpu.correctness import Check, run_check

    check = Check("k", "c", lambda x: 1.1 * x, lambda x: x, lambda dtype: [torch.ones(3, dtype=dtype)], "", 1)
    for backward in (False, True):
        with pytest.raises(ArithmeticError, match=r"relative RMS error is 1\.00e-01"):
            run_check(check, torch.float32, backward)


def test_every_aim_is_a_case_that_the_suite_measures(suite):
    """An aim whose case is renamed would silently count as not measured."""
    from benchmarks.gpu import report

    names = {
        section: {(facts["case"], facts.get("direction", "")) for facts, _ in problems("cpu")}
        for section, problems in suite.PROBLEMS.items()
    }
    assert [aim for aim in report.AIMS if (aim.case, aim.direction) not in names[aim.section]] == []

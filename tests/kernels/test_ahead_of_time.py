"""Every kernel compiles for GPUs that are not there, without spills, within their shared memory.

In processes of their own: here, kernels may be interpreted.
"""

import csv
import os
import sys
from pathlib import Path

import pytest
import waits

pytestmark = pytest.mark.tool
ROOT = Path(__file__).parents[2]
TOOL = "benchmarks.gpu.kernel_resources"
SUMMARY = ROOT / "benchmarks/results/kernel_resources_summary.csv"


def run(*command, limit_s=280):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return waits.run([sys.executable, *command], limit_s, cwd=ROOT, env=environment)


def test_every_kernel_compiles_for_one_chip():
    done = run("-m", TOOL, "--quick")
    assert done.returncode == 0, done.stderr
    assert " 0 violations" in done.stdout


def test_the_table_in_the_guide_names_the_kernels_there_are():
    """It is written by ``python -m benchmarks.gpu.kernel_resources --write``, after a change of kernels."""
    done = run("-c", f"import {TOOL} as tool; print(*tool.kernels())")
    assert done.returncode == 0, done.stderr
    with open(SUMMARY, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["kernel"] for row in rows} == set(done.stdout.split())
    assert {row["chip"] for row in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert {row["spills"] for row in rows if row["chip"] != "sm_100"} == {"0"}

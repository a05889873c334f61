"""Every kernel compiles for GPUs that are not there, without spills, within their shared memory; and the check bites.

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

# Kernels that break a rule each, in the tool's own hands. Arguments: the chip, the limit on its shared memory, cases.
BAD = """
import sys
from dataclasses import replace
import benchmarks.gpu.kernel_resources as tool
import torch, triton
import triton.language as tl
from benchmarks.gpu.kernel_cases import Case, meta

@triton.jit
def _spilling_kernel(x, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(x + i, a / tl.sum(a))  # 512 numbers a thread, or more, wait for the sum

@triton.jit
def _scalar_product_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    b = tl.load(y + i[:, None] * N + i[None, :])
    tl.store(x + i[:, None] * N + i[None, :], tl.dot(a, b, input_precision="ieee"))

@triton.jit
def _wrong_kernel(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.arange(0, 2 * N))

@triton.jit
def _shared_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    b = tl.load(y + i[:, None] * N + i[None, :])
    tl.store(x + i[:, None] * N + i[None, :], tl.dot(a, b).to(x.dtype.element_ty))

def two(t, n=128):
    return meta(n, n, dtype=t), meta(n, n, dtype=t)

CASES = [
    Case("spilling", lambda t: _spilling_kernel[(1,)](meta(32768, dtype=t), N=32768, num_warps=1), (torch.float32,)),
    Case("scalar", lambda t: _scalar_product_kernel[(1,)](*two(t), N=16, num_warps=4), (torch.float32,)),
    Case("wrong", lambda t: _wrong_kernel[(1,)](meta(16, dtype=t), N=16), (torch.float32,)),
    Case("shared", lambda t: _shared_kernel[(1,)](*two(t), N=128, num_warps=4), (torch.bfloat16,)),
]
"""
PRINT = """
chip = next(target for target in tool.TARGETS if target.name == sys.argv[1])
chip = replace(chip, shared_limit=int(sys.argv[2]))
for case in (case for case in CASES if case.name in sys.argv[3:]):
    for variant in tool.compile_case(case, case.dtypes[0], "highest", chip):
        print(case.name, *tool.violations(variant), sep=" | ")
"""


def run(*command, limit_s=280):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return waits.run([sys.executable, *command], limit_s, cwd=ROOT, env=environment)


def test_every_kernel_compiles_for_one_chip():
    done = run("-m", TOOL, "--quick")
    assert done.returncode == 0, done.stderr
    assert " 0 violations" in done.stdout


def bad(tmp_path, *arguments):
    script = tmp_path / "bad.py"
    script.write_text(BAD + PRINT)
    done = run(script, *arguments)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" | ", 1) if " | " in line else (line, "") for line in done.stdout.splitlines())


def test_spills_missing_tensor_cores_and_errors_are_found(tmp_path):
    found = bad(tmp_path, "sm_90", 232448, "spilling", "scalar", "wrong", "shared")
    assert "spills registers" in found["spilling"]
    assert "no instruction of the matrix units" in found["scalar"]
    assert "does not compile" in found["wrong"]
    assert found["shared"] == ""


def test_too_much_shared_memory_is_found(tmp_path):
    assert "bytes of shared memory, and there are 1024" in bad(tmp_path, "sm_80", 1024, "shared")["shared"]


def test_spills_are_found_on_amd(tmp_path):
    found = bad(tmp_path, "gfx942", 65536, "spilling", "shared")
    assert "spills registers" in found["spilling"]
    assert found["shared"] == ""


def test_the_table_in_the_guide_names_the_kernels_there_are():
    """It is written by ``python -m benchmarks.gpu.kernel_resources --write``, after a change of kernels."""
    done = run("-c", f"import {TOOL} as tool; print(*tool.kernels())")
    assert done.returncode == 0, done.stderr
    with open(SUMMARY, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["kernel"] for row in rows} == set(done.stdout.split())
    assert {row["chip"] for row in rows} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert {row["spills"] for row in rows if row["chip"] != "sm_100"} == {"0"}

"""Run numerical tests under several instruction sets and numbers of threads: ``make test-isa``.

MKL, ATen and oneDNN choose their code by the processor, and each choice rounds and adds in another order: a tolerance
that holds on one machine may fail on the next. Their variables make a newer processor run the code of older ones (MKL
obeys its own on Intel's processors only). ``PANTHER_TOLERANCE_MARGIN`` divides the bound of factorisations, because
they must keep a factor of 4 to it. A setting that the processor cannot run, where ATen would end with an illegal
instruction, is left out, and a line says so. Two settings run side by side; the last line of the output is the sum.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shards import ROOT, _counts

SETS = {
    "SSE4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX-512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512", "ATEN_CPU_CAPABILITY": "avx512"},
}
# All numerical tests, under the setting that differs most from a new processor.
FOLDERS = ["tests/linalg", "tests/sketch", "tests/nn", "tests/kernels"]
ALL_UNDER = ("SSE4.2", 1)
# Elsewhere those that compare rounded numbers with a bound, at the lowest level: factorisations, products with
# sketches, and layers. Left out everywhere are property tests, whose inputs the deterministic ones cover, and
# torch.compile, whose code does not depend on these variables.
FILES = [
    *(f"tests/linalg/test_{name}.py" for name in ("orthogonal", "contract", "qb", "svd", "eigh", "cqrrpt", "lstsq")),
    *(f"tests/nn/test_{name}.py" for name in ("linear", "conv", "functional")),
    "tests/sketch/test_operators.py",
    "tests/kernels/test_sketched.py",
]
SELECTION = ["-m", "not (fuzz or slow or tool or torture or extra or gpu)", "-k", "not compile and not export"]
_TIMEOUT_S = 900


def main():
    begun = time.monotonic()
    sets = _runnable()
    settings = [(name, threads) for threads in (1, 2) for name in sets]
    with ThreadPoolExecutor(2) as pool:
        counts = sum(pool.map(lambda setting: _run(*setting), settings), Counter())
    words = [f"{counts[word]} {word}" for word in ("passed", "failed", "skipped", "errors")]
    print(f"{', '.join(words)} in {time.monotonic() - begun:.0f} s")
    return 1 if counts["failed"] + counts["errors"] else 0


def _runnable():
    # In a process of its own, because the variable, where it is set, decides instead of the processor.
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    command = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    highest = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    lacking = {"AVX2": {"AVX-512"}, "DEFAULT": {"AVX2", "AVX-512"}, "NO AVX": {"AVX2", "AVX-512"}}.get(highest, set())
    for name in sorted(lacking):
        print(f"{name}: left out, because ATen finds at most {highest} on this processor", flush=True)
    return [name for name in SETS if name not in lacking]


def _run(name, threads):
    # Passive: threads that wait would otherwise spin, on cores that the setting beside this one needs.
    variables = SETS[name] | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    variables["PANTHER_TOLERANCE_MARGIN"] = "4"
    files = FOLDERS if (name, threads) == ALL_UNDER else FILES
    command = [str(Path(sys.executable).parent / "pytest"), *files, *SELECTION, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )
    counts = _counts(done.stdout)
    if done.returncode and not counts["failed"] + counts["errors"]:
        counts["errors"] += 1  # it ended before its summary
    if done.returncode:
        print(done.stdout)
    print(f"{name} with {threads} thread(s): {dict(counts)}", flush=True)
    return counts


if __name__ == "__main__":
    sys.exit(main())

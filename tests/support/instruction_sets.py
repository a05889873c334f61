"""Numerical tests under several instruction sets and numbers of threads: the part ``isa`` of ``make verify``.

MKL, ATen and oneDNN choose their code by the processor, and each choice rounds and adds in another order: a tolerance
that holds on one machine may fail on the next. Their variables make a newer processor run the code of older ones (MKL
obeys its own on Intel's processors only). ``PANTHER_TOLERANCE_MARGIN`` divides the bound of factorisations, because
they must keep a factor of 4 to it. A setting that the processor cannot run, where ATen would end with an illegal
instruction, is left out, and so is the one that ``make test`` runs already: the newest set with one thread.
"""

from pathlib import Path

SETS = {
    "SSE4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX-512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512", "ATEN_CPU_CAPABILITY": "avx512"},
}
# The setting that differs most from a new processor runs all numerical tests.
FOLDERS = ("tests/linalg", "tests/sketch", "tests/nn", "tests/kernels")
# The other settings run the tests that compare rounded numbers with a bound, at the lowest level: factorisations,
# products with sketches, and layers. Property tests, whose inputs the deterministic tests cover, and torch.compile,
# whose code does not depend on these variables, do not run.
FILES = [
    *(f"tests/linalg/test_{name}.py" for name in ("orthogonal", "contract", "qb", "svd", "eigh", "cqrrpt", "lstsq")),
    *(f"tests/nn/test_{name}.py" for name in ("linear", "conv", "functional")),
    "tests/sketch/test_operators.py",
    "tests/kernels/test_sketched.py",
]


def instruction_set_variables(flags=None):
    """Return the name of each setting, its environment variables, and whether all numerical tests run under it.

    Args:
        flags: The processor's flags, as in /proc/cpuinfo; this processor's by default.
    """
    if flags is None:
        cpuinfo = Path("/proc/cpuinfo")
        flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    names = ["SSE4.2"] + ["AVX2"] * ("avx2" in flags) + ["AVX-512"] * ("avx512f" in flags and "avx512dq" in flags)
    settings = []
    for threads in (1, 2):
        for name in names:
            if (name, threads) == (names[-1], 1) and len(names) > 1:
                continue  # make test
            # Passive: threads that wait would otherwise spin, on cores that the command beside this one needs.
            variables = SETS[name] | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
            variables["PANTHER_TOLERANCE_MARGIN"] = "4"
            settings.append((f"{name} {threads}", variables, (name, threads) == ("SSE4.2", 1)))
    return settings

"""Run the tests of ``make test-engines-slow`` and write their outcomes to benchmarks/results, with the versions.

``engine_results.py [ARGUMENTS]``: the arguments are pytest's; with any, nothing is written.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
# By name: other tests need libraries for being collected that this environment does not have.
FILES = ["tests/cli/test_slurm.py", "tests/integrations/test_horovod.py", "panther/integrations/horovod.py"]


def main(arguments):
    with tempfile.TemporaryDirectory(prefix="panther-engines-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-m",
            "engine_slow",
            "--timeout",
            "900",
            f"--junitxml={report}",
        ]
        code = subprocess.run([*command, *(arguments or FILES)], cwd=ROOT).returncode
        if not arguments:
            sys.path.insert(0, str(ROOT))
            harness = importlib.import_module("benchmarks.harness")
            importlib.import_module("torch").set_num_threads(1)
            print(f"written to {harness.write_csv('engines-slow', list(_rows(report)), device='cpu')}")
    return code


def _rows(report):
    for case in ElementTree.parse(report).iter("testcase"):
        failed = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = case.get("classname", "").rpartition(".")[2]
        yield {
            "file": name,
            "test": case.get("name"),
            "outcome": failed[0] if failed else "passed",
            "seconds": round(float(case.get("time", 0)), 1),
            "engine": _slurm() if "slurm" in name else _horovod(),
        }


def _slurm():
    try:
        return subprocess.run(["slurmd", "-V"], capture_output=True, text=True, timeout=60).stdout.strip()
    except FileNotFoundError:
        return ""


def _horovod():
    try:
        return f"horovod {version('horovod')}"
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main(sys.argv[1:]))

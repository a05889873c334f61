"""Run the tests of ``make test-engines-slow`` and write their outcomes to benchmarks/results, with the versions.

``engine_results.py SUBJECT [ARGUMENTS]``: the subject is the name of the results, a key of ``FILES``. The arguments are
pytest's; with any, nothing is written. Properties that a test records are columns.
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
FILES = {
    "engines-slow": [
        "tests/cli/test_slurm.py",
        "tests/integrations/test_horovod.py",
        "panther/integrations/horovod.py",
    ],
    "engines-slow-llama-cpp": ["tests/integrations/test_gguf.py"],
}
PACKAGES = {"test_horovod": "horovod", "horovod": "horovod", "test_gguf": "xllamacpp"}


def main(subject, arguments):
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
            "-o",
            "junit_family=xunit1",
        ]
        code = subprocess.run([*command, *(arguments or FILES[subject])], cwd=ROOT).returncode
        if not arguments:
            sys.path.insert(0, str(ROOT))
            harness = importlib.import_module("benchmarks.harness")
            importlib.import_module("torch").set_num_threads(1)
            print(f"written to {harness.write_csv(subject, list(_rows(report)), device='cpu')}")
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
            "engine": _slurm() if name == "test_slurm" else _engine(PACKAGES[name]),
            **{entry.get("name"): entry.get("value") for entry in case.iter("property")},
        }


def _slurm():
    try:
        return subprocess.run(["slurmd", "-V"], capture_output=True, text=True, timeout=60).stdout.strip()
    except FileNotFoundError:
        return ""


def _engine(package):
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main(sys.argv[1], sys.argv[2:]))

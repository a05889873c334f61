"""Run the tests of ``make test`` on other versions of torch: ``versions.py oldest newest``.

The argument NAME stands for the environment ``.venv-NAME``, which the Makefile makes. The results are written to
``versions.csv``, a line for each environment, which the page about the installation shows.
"""

import csv
import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "versions.csv"
COLUMNS = ("versions", "date", "passed", "failed", "skipped")


def installed_versions(environment):
    """Return the versions that decide about the results, such as ``torch 2.11.0, triton 3.6.0``."""
    code = (
        "import platform; from importlib.metadata import version;"
        "print(*(f'{name} {version(name)}' for name in ('torch', 'triton', 'numpy')),"
        "f'Python {platform.python_version()}', sep=', ')"
    )
    run = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def counts_in(line):
    """Return the numbers of tests that passed, failed and were skipped, from the last line of checks.py."""
    numbers = re.fullmatch(r"(\d+) passed, (\d+) failed, (\d+) skipped", line)
    if numbers is None:
        raise ValueError(f"the tests ended without a summary, with {line!r}")
    return [int(number) for number in numbers.groups()]


def run_tests(environment):
    """Run the tests in an environment, show their output, and return the counts."""
    command = [environment / "bin" / "python", ROOT / "tests" / "support" / "checks.py", "test"]
    command += ["--environment", environment.name]
    line = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
    return counts_in(line.strip())


def with_row(rows, name, row):
    """Return the rows with ``row`` in the place of the row of the same environment, or at the end."""
    rows = {old[0].partition(":")[0]: old for old in rows}
    return list((rows | {name: row}).values())


def main(names):
    """Run the tests in each environment and write the results; return 1 if a test failed."""
    has_failed = False
    for name in names:
        environment = ROOT / f".venv-{name}"
        counts = run_tests(environment)
        row = [f"{name}: {installed_versions(environment)}", datetime.date.today().isoformat(), *map(str, counts)]
        rows = list(csv.reader(RESULTS.read_text().splitlines()))[1:] if RESULTS.exists() else []
        with RESULTS.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *with_row(rows, name, row)])
        has_failed |= counts[1] > 0
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

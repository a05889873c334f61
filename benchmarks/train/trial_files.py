"""Files under kills, damage and several writers, by `make torture`.

1,000 kills of a process that saves, 1,000 damaged files of each format, and 300 saves of three processes to one folder.
The trials are those of tests/support/file_survival.py. The exit status is 1 if a model was lost, loaded wrong or torn.
"""

__all__ = ["run"]

import argparse
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import print_table, test_support, write_csv
from panther.errors import PerformanceWarning

survival = test_support("file_survival")
EXPECTED = {
    "the old model", "a new model", "refused", "loaded right", "whole models loaded", "files left over",
    "processes that failed", "torn or failed loads",
}  # fmt: skip
FAULTS = {"files left over", "processes that failed", "torn or failed loads"}


def run(number: int, saves: int) -> list[dict[str, Any]]:
    """Run the trials; return a row for each outcome of each."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="panther-files-") as name:
        folder = Path(name)
        trials = {f"damaged {kind}": partial(_damage, folder, kind, number) for kind in survival.FORMATS}
        trials["killed saves"] = partial(survival.survive_kills, _made(folder / "kills"), number, seed=1)
        trials["saves at once"] = partial(survival.save_at_once, _made(folder / "saves"), saves, processes=3)
        for trial, start in trials.items():
            rows += [{"trial": trial, "outcome": outcome, "number": count} for outcome, count in start().items()]
            print_table([row for row in rows if row["trial"] == trial])
    return rows


def _damage(folder: Path, kind: str, number: int) -> Any:
    return survival.damage_files(folder / kind.replace(" ", "-"), kind, number, seed=1)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="kills, and damaged files of each format")
    parser.add_argument("--saves", type=int, default=300, help="saves to one folder at the same time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PerformanceWarning)  # the model is small, and a save is to be short
    results = run(options.number, options.saves)
    if (options.number, options.saves) == (1000, 300):
        print(f"written to {write_csv('file-survival', results, device='cpu')}")
    faults = [row for row in results if row["outcome"] not in EXPECTED or (row["outcome"] in FAULTS and row["number"])]
    sys.exit(1 if faults else 0)

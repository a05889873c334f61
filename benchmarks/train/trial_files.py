"""Files under kills, damage and several writers, by `make torture`.

1,000 kills of a process that saves, 1,000 damaged files of each format, and 300 saves of three processes to one folder.
The trials are those of tests/support/file_survival.py. The exit status is 1 if a model was lost, loaded wrong or torn.
With ``--plain`` 1,000 files of torch.save and as many of safetensors are damaged, and a process that saves by
torch.save is killed 200 times, in place and with a rename. These files may be lost or loaded wrong.

Each trial runs in parts with seeds of their own. With ``--progress FILE`` the counts are written to a file after each
part, and a run that was interrupted continues after its last complete part.
"""

__all__ = ["run", "run_plain"]

import argparse
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import print_table, test_support, write_csv
from panther.errors import PerformanceWarning
from panther.files import write_json

survival = test_support("file_survival")
FAULTLESS = {
    "the old model", "a new model", "kills in the middle of a save", "refused", "loaded right", "whole models loaded",
}  # fmt: skip
PARTS = 10


def run(number: int, saves: int, progress: Path | None = None) -> list[dict[str, Any]]:
    """Run the trials, continue those of an earlier run, and return a row for each outcome of each trial."""
    trials: dict[str, tuple[Callable[..., dict[str, int]], int]] = {
        f"damaged {kind}": (partial(survival.damage_files, name=kind), number) for kind in survival.FORMATS
    }
    trials["killed saves"] = survival.survive_kills, number
    trials["saves at once"] = lambda folder, number, seed: survival.save_at_once(folder, number, processes=3), saves
    sizes = {"number": number, "saves": saves}
    record: dict[str, Any] = {**sizes, "parts": {}}
    if progress is not None and progress.exists():
        record = json.loads(progress.read_text())
        if {key: record[key] for key in sizes} != sizes:
            raise SystemExit(f"{progress} is of a run of other sizes: give another file")
    for trial, (start, count) in trials.items():
        counts = record["parts"].setdefault(trial, [])
        for part in range(len(counts), PARTS):
            size = count * (part + 1) // PARTS - count * part // PARTS
            with tempfile.TemporaryDirectory(prefix="panther-files-") as folder:
                counts.append(start(Path(folder, "part"), number=size, seed=part + 1))
            if progress is not None:
                write_json(progress, record)
        print_table(_rows(trial, counts))
    return [row for trial, counts in record["parts"].items() for row in _rows(trial, counts)]


def run_plain(number: int) -> list[dict[str, Any]]:
    """Damage and kill files that are written without Panther, and return a row for each outcome of each trial."""
    trials: dict[str, Callable[[Path], dict[str, int]]] = {
        f"damaged {kind}": partial(survival.damage_files, name=kind, number=number, seed=1)
        for kind in survival.PLAIN_FORMATS
    }
    for name, save in (("in place", survival.save_in_place), ("with a rename", survival.save_and_rename)):
        trials[f"killed torch.save, {name}"] = partial(
            survival.survive_kills, number=number // 5, seed=1, save=save, load=survival.torch_values, files=1
        )
    rows = []
    for trial, start in trials.items():
        with tempfile.TemporaryDirectory(prefix="panther-files-") as folder:
            # The damage makes its folder, and the saves need one.
            rows += _rows(trial, [start(Path(folder, "part") if trial.startswith("damaged") else Path(folder))])
    return rows


def _rows(trial: str, counts: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Return the sums over the parts of a trial, a row for each outcome."""
    sums: Counter[str] = Counter()
    for part in counts:
        sums.update(part)
    return [{"trial": trial, "outcome": outcome, "number": number} for outcome, number in sums.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="kills, and damaged files of each format")
    parser.add_argument("--saves", type=int, default=300, help="saves to one folder at the same time")
    parser.add_argument("--plain", action="store_true", help="files that are written without Panther")
    parser.add_argument("--progress", type=Path, help="a file that keeps the counts of the parts that have ended")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PerformanceWarning)  # the model is small, and a save is to be short
    if options.plain:
        plain = run_plain(options.number)
        print_table(plain)
        if options.number == 1000:
            print(f"written to {write_csv('file-survival-plain', plain, device='cpu')}")
        sys.exit(0)
    results = run(options.number, options.saves, options.progress)
    if (options.number, options.saves) == (1000, 300):
        print(f"written to {write_csv('file-survival', results, device='cpu')}")
    sys.exit(1 if any(row["number"] for row in results if row["outcome"] not in FAULTLESS) else 0)

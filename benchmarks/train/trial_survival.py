"""Training runs of two workers, each ended by SIGKILL somewhere and started again: 100 of them, by `make torture`.

Each is a run of tests/support/survival.py: 24 steps of DDP with a checkpoint every second step, of which two are kept,
written while training continues. The victim is a worker or all processes of the run. A trial that ends before its
moment comes has not been killed; others take its place. One that is killed when its last checkpoint is there has no
step left.

``--layouts`` runs 20 kills for each of six layouts instead, ten with SketchedAdamW and ten with MuonAdamW.
"""

__all__ = ["run", "run_layouts"]

import argparse
import math
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import figure, print_table, test_support, write_csv
from panther.errors import PerformanceWarning

survival = test_support("survival")
ADAMW_WITH_DDP = survival.Run()


def run(wanted: int, trained: Any = ADAMW_WITH_DDP, seed: int = 0) -> list[dict[str, Any]]:
    """Run trials of a run until so many were killed; return a row for each."""
    rows: list[dict[str, Any]] = []
    killed = 0
    with tempfile.TemporaryDirectory(prefix="panther-survival-") as folder:
        whole = Path(folder) / "whole"
        whole.mkdir()
        expected, seconds = survival.run_in_group(whole, None, run=trained)
        if expected is None:
            raise RuntimeError("the run that nobody disturbs does not end")
        for trial in survival.trials(2 * wanted, seed):
            outcome = survival.survive(Path(folder) / str(trial.seed), trial, expected, seconds, trained)
            rows.append({"layout": trained.layout, "optimizer": trained.optimizer} | _row(outcome))
            print_table(rows[-1:])
            killed += rows[-1]["killed"]
            if killed == wanted:
                return rows
    raise RuntimeError(f"only {killed} of {len(rows)} runs were killed")


def run_layouts() -> list[dict[str, Any]]:
    """Run the trials of all layouts with both optimizers."""
    runs = [survival.Run(layout, name) for layout in survival.LAYOUTS for name in ("SketchedAdamW", "MuonAdamW")]
    return [row for number, trained in enumerate(runs) for row in run(10, trained, seed=1 + number)]


def _row(outcome: Any) -> dict[str, Any]:
    trial = outcome.trial
    return {
        "trial": trial.seed,
        "moment": trial.moment,
        "victim": trial.victim,
        "rank": trial.rank,
        "fraction": round(trial.fraction, 3),
        "killed": int(outcome.killed),
        "identical": int(outcome.identical),
        "unreadable": outcome.unreadable,
        "lost": int(outcome.lost),
        "first_step_s": None if math.isnan(outcome.first_step_s) else figure(outcome.first_step_s),
    }


def _summary(rows: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    """Count what became of those that were killed, by the values of a column."""
    found = []
    for value in (*dict.fromkeys(row[column] for row in rows), "all"):
        here = [row for row in rows if row["killed"] and value in (row[column], "all")]
        if here:
            seconds = [row["first_step_s"] for row in here if row["first_step_s"] is not None]
            found.append(
                {
                    column: value,
                    "killed": len(here),
                    "worker": sum(row["victim"] == "worker" for row in here),
                    "identical": sum(row["identical"] for row in here),
                    "unreadable": sum(row["unreadable"] for row in here),
                    "lost": sum(row["lost"] for row in here),
                    "with steps left": len(seconds),
                    "first step, median s": figure(statistics.median(seconds)) if seconds else None,
                    "worst s": max(seconds, default=None),
                }
            )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="how many to kill; only 100 are written down")
    parser.add_argument("--layouts", action="store_true", help="kill runs of six layouts with two optimizers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PerformanceWarning)  # the model is small, and a run is to be short
    results = run_layouts() if options.layouts else run(options.runs)
    print_table(_summary(results, "layout" if options.layouts else "moment"))
    if options.layouts or options.runs == 100:
        subject = "survival-layouts" if options.layouts else "survival"
        print(f"written to {write_csv(subject, results, device='cpu')}")
    sound = all(row["identical"] and not row["unreadable"] and not row["lost"] for row in results)
    sys.exit(0 if sound else 1)

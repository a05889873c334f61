"""Measure the Trainer on one process and on two, over gloo: its overhead, messages, checkpoints and restarts.

Times are of one machine, whose cores the processes share with whatever else runs: of steps, only ratios of what ran in
turns mean anything.
"""

__all__ = ["run"]

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, figure, main, print_table, write_csv
from benchmarks.train.messages import SENT_ALONE, message_rows
from benchmarks.train.restart import train
from benchmarks.train.steps import MEASURED, QUICK, checkpoint_rows, overhead_rows
from panther.distributed import launch

_MODELS = {
    "demo, sketched": ("sketched", 512, 8),
    "demo, dense": ("dense", 512, 8),
    "dense, 2048 wide": ("dense", 2048, 8),
}
_RESTARTS = 10


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Time, print the tables, and write the CSVs; restarts do not depend on the budget."""
    if device != "cpu":
        print("processes over gloo are measured on CPUs only")
        return
    rounds = 2 if quick else max(10, int(2 * budget_s))
    cases = (
        [(QUICK, 2, True)] if quick else [(case, n, log) for case in MEASURED for n in (1, 2) for log in (False, True)]
    )
    overheads = [row for case, n, log in cases for row in overhead_rows(case, n, logging=log, rounds=rounds)]
    _show("train-overhead", overheads, quick)
    alone = [(QUICK, "bf16 hook")] if quick else [(case, sent) for sent in SENT_ALONE for case in ("1 ms", "5 ms")]
    _show("train-messages", [row for case, sent in alone for row in message_rows(case, sent, rounds)], quick)
    starters = ("launch, fork",) if quick else ("launch, spawn", "panther launch")
    models = {"demo, sketched": ("sketched", 64, 2)} if quick else _MODELS
    _show("train-checkpoint", checkpoint_rows(models, 1 if quick else 20), quick)
    _show("train-restart", [_restarts(by, 1 if quick else _RESTARTS) for by in starters], quick)


def _restarts(by: str, count: int) -> dict[str, Any]:
    """Return the seconds from the kill of a worker to the first step of the processes that replace it."""
    seconds = []
    for _ in range(count):
        with tempfile.TemporaryDirectory() as folder:
            if by == "panther launch":
                command = (sys.executable, "-m", "panther", "launch", "--nproc-per-node", "2", "--max-restarts", "1")
                subprocess.run(
                    [*command, "--module", "benchmarks.train.restart", folder],
                    check=True,
                    capture_output=True,
                    cwd=ROOT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            else:
                launch(train, folder, nproc=2, max_restarts=1, start_method=by.rpartition(" ")[2])
            begun = float(Path(folder, "kill").read_text(encoding="utf-8"))
            first, step = Path(folder, "first-step").read_text(encoding="utf-8").split()
            if int(step) <= 5:
                raise RuntimeError(
                    f"it continued with step {step}, although there was a checkpoint of step 10 at least"
                )
            seconds.append(float(first) - begun)
    row = {"started by": by, "restarts": count}
    return row | {"median_s": figure(statistics.median(seconds)), "worst_s": figure(max(seconds))}


def _show(subject: str, rows: list[dict[str, Any]], quick: bool) -> None:
    print_table(rows)
    if not quick:
        print(f"written to {write_csv(subject, rows, device='cpu')}")


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=20.0, memory=["default"])

"""Seconds from a fault of a training run to its next step, by kind of fault; about ten minutes on two cores.

The runs are those of tests/support/faults.py: two forked workers of ``launch``, or the processes of two launchers of
``panther launch``, each a node. A launcher that is killed is started again at once, as a supervisor does.
"""

__all__ = ["run"]

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, and else that of every forked process does

from benchmarks.harness import figure, print_table, test_support, write_csv
from panther.errors import PerformanceWarning

faults = test_support("faults")
TIMEOUT_S, GRACE_PERIOD_S = 10.0, 15.0
LIMIT_S = 30.0


def run(names: list[str], repetitions: int) -> list[dict[str, Any]]:
    """Cause each fault several times; return a row for each."""
    rows: list[dict[str, Any]] = []
    for name in names:
        for repetition in range(repetitions):
            with tempfile.TemporaryDirectory(prefix="panther-faults-") as folder:
                begun, load = time.monotonic(), os.getloadavg()[0]
                if name in faults.FAULTS:
                    seconds = faults.recover(Path(folder), name, timeout_s=TIMEOUT_S, grace_period_s=GRACE_PERIOD_S)
                else:
                    seconds = faults.recover_nodes(Path(folder), timeout_s=TIMEOUT_S)
                rows.append(
                    {
                        "fault": name,
                        "repetition": repetition,
                        "next_step_s": figure(seconds),
                        "whole_run_s": figure(time.monotonic() - begun),
                        "load": figure(load),
                    }
                )
            print_table(rows[-1:])
    return rows


def _summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and the maximum of the seconds for each fault."""
    table = []
    for name in dict.fromkeys(row["fault"] for row in rows):
        seconds = [row["next_step_s"] for row in rows if row["fault"] == name]
        table.append(
            {
                "fault": name,
                "runs": len(seconds),
                "next step, median s": figure(statistics.median(seconds)),
                "worst s": max(seconds),
            }
        )
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--faults", nargs="*", help="only these, which are not written down")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PerformanceWarning)  # the model is small, and a run is to be short
    every = [*faults.FAULTS, faults.NODE_FAULT]
    results = run(options.faults or every, options.repetitions)
    print_table(_summary(results))
    if not options.faults:
        print(f"written to {write_csv('faults', results, device='cpu')}")
    sys.exit(0 if all(row["next_step_s"] < LIMIT_S for row in results) else 1)

"""Measure sketched layers on two processes, over gloo: bytes sent, overhead of Panther's wrappers, and weak scaling.

Bytes are counted, and exact. Times are of one machine, whose cores the two processes share with whatever else runs:
only ratios of what ran in turns mean anything, and with two cores scaling ends at two processes.
"""

__all__ = ["run"]

from pathlib import Path
from typing import Any

from benchmarks.distributed.bytes_sent import Sizes, data_parallel_bytes, tensor_parallel_bytes
from benchmarks.distributed.steps import OVERHEADS, overhead_rows, scaling_rows
from benchmarks.harness import main, print_table, write_csv

_WIDTH, _BATCH = 1024, 128  # of the models whose steps are timed
_SCALING = [(1024, 16, 32), (1024, 16, 256), (2048, 32, 32), (2048, 32, 256)]  # width, sketch size, batch a process


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Count, time, print the tables, and write the CSVs."""
    if device != "cpu":
        print("two processes over gloo are measured on CPUs only")
        return
    sizes = Sizes(width=256, sketch_size=4, batch=8) if quick else Sizes()
    _show("distributed-bytes", tensor_parallel_bytes(sizes) + data_parallel_bytes(sizes), quick)
    width, batch = (64, 8) if quick else (_WIDTH, _BATCH)
    overheads = [row for case in OVERHEADS for row in overhead_rows(case, width, batch, budget_s)]
    _show("distributed-overhead", overheads, quick)
    shapes = [(64, 1, 8)] if quick else _SCALING
    _show("distributed-scaling", [row for shape in shapes for row in scaling_rows(*shape, budget_s)], quick)


def _show(subject: str, rows: list[dict[str, Any]], quick: bool) -> None:
    print_table(rows)
    if not quick:
        path: Path = write_csv(subject, rows, device="cpu")
        print(f"written to {path}")


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=30.0, memory=["default"])

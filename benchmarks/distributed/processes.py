"""Count what a step costs on one, two, four and eight processes: CPU time of all of them, and bytes of each.

Under DDP each process has a batch of its own. All numbers of processes are measured in one group of eight, in turns, so
that what else runs on the machine disturbs all of them alike. Processes that have no part in a turn wait and count
nothing. CPU time is the sum over the processes that take part. Where processes share a core the time on a clock says
nothing, because they wait for each other.
"""

__all__ = ["KINDS", "PROCESSES", "process_rows", "run"]

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.distributed.steps import Step, in_turns
from benchmarks.harness import figure, main, print_table, write_csv
from panther.distributed import CommunicationCounter, data_parallel, launch
from panther.nn import SKLinear

KINDS = ("SKLinear", "pair of nn.Linear", "nn.Linear")
PROCESSES = (1, 2, 4, 8)
_LAYERS = 4


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure, print the table, and write the CSV."""
    if device != "cpu":
        print("processes over gloo are measured on CPUs only")
        return
    width, sketch_size, batch = (64, 1, 8) if quick else (1024, 16, 128)
    rows = process_rows(width, sketch_size, batch, budget_s)
    print_table(rows)
    if not quick:
        print(f"written to {write_csv('distributed-processes', rows, device='cpu')}")


def process_rows(width: int, sketch_size: int, batch: int, budget_s: float) -> list[dict[str, Any]]:
    """Return a row for each kind of layer and number of processes.

    ``cpu_ms`` is of all processes for one step, ``x 1 process`` the CPU time a sample as a multiple of that of one
    process, and ``bytes`` what a process passes to collectives in a step.
    """
    results = launch(_measure, width, sketch_size, batch, budget_s, nproc=max(PROCESSES), start_method="fork")
    rows = []
    for kind in KINDS:
        for count in PROCESSES:
            cpu_s, alone_s = (_cpu_seconds(results[:n], kind, n) for n in (count, 1))
            rows.append(
                {
                    "layer": kind,
                    "width": width,
                    "batch a process": batch,
                    "processes": count,
                    "rounds": len(cpu_s),
                    "cpu_ms": figure(1e3 * statistics.median(cpu_s)),
                    "x 1 process": figure(
                        statistics.median(s / count / alone for s, alone in zip(cpu_s, alone_s, strict=True))
                    ),
                    "bytes": results[0][1][kind, count],
                }
            )
    return rows


def _cpu_seconds(results: list[Any], kind: str, count: int) -> list[float]:
    """Return the CPU seconds of a step over the processes that take part, by rounds."""
    by_rank = [samples[f"{kind} {count}"] for samples, _ in results]
    return [sum(cpu for _, cpu in of_round) for of_round in zip(*by_rank, strict=True)]


def _measure(width: int, sketch_size: int, batch: int, budget_s: float) -> tuple[dict[str, Any], dict[Any, int]]:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(batch, width)
    steps: dict[str, Step] = {}
    traffic: dict[Any, int] = {}
    for count in PROCESSES:
        group = dist.new_group(range(count))
        for kind in KINDS:
            step = _step(kind, width, sketch_size, x, group) if dist.get_rank() < count else _idle
            step()
            step()  # DDP arranges its buckets anew in the second step.
            with CommunicationCounter() as counter:
                step()
            traffic[kind, count] = counter.bytes
            steps[f"{kind} {count}"] = step
    return in_turns(steps, budget_s), traffic


def _step(kind: str, width: int, sketch_size: int, x: Tensor, group: Any) -> Step:
    """Return a function that takes a step of training."""
    torch.manual_seed(0)  # The processes have the same model.
    layers = [layer for _ in range(_LAYERS) for layer in (_layer(kind, width, sketch_size), nn.ReLU())]
    model = data_parallel(nn.Sequential(*layers), group)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()

    return step


def _layer(kind: str, width: int, sketch_size: int) -> nn.Module:
    if kind == "SKLinear":
        return SKLinear(width, width, sketch_size)
    if kind == "nn.Linear":
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, sketch_size, bias=False), nn.Linear(sketch_size, width))


def _idle() -> None:
    """Wait at the next barrier while other processes are measured."""


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=90.0, memory=["default"])

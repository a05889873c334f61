"""The advisor's predictions against training steps of real processes: time of a step, and peak memory of a rank.

The processes that train are measured by ClusterSpec.measure, before and after. Between, they train a transformer, dense
or sketched, with one layout after another in turns, on gloo with one thread a process. A time is the median over turns
of the slowest rank's, with a malloc that keeps what is freed, as the caching allocator of a GPU does: glibc's returns
tensors of 32 MiB to the system, which clears them when they are next used. Memory is the peak of the resident set in
other processes, less what they had before the model was made, with a malloc that returns what is freed.
"""

__all__ = ["BATCH", "LAYOUTS", "SIZES", "SKETCH", "SMALL", "chosen_plan", "plan_of", "run", "seconds_of"]

import ctypes
import gc
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import figure, main, print_table, write_csv
from panther.distributed import ClusterSpec, ModelStats, ParallelismPlan, launch, plan_parallelism
from panther.distributed.advisor.measured import plain_transformer
from panther.errors import PerformanceWarning
from panther.train.history import peak_memory

_SCHEDULES = ("gpipe", "1f1b", "interleaved")
LAYOUTS = {
    2: ("dp=2 ddp", "dp=2 fsdp", "tp=2", "pp=2 gpipe m=4", "pp=2 1f1b m=4", "pp=2 interleaved m=4"),
    4: ("dp=4 ddp", "dp=4 fsdp", "dp=2 replicate, tp=2", "dp=2 fsdp, tp=2", "tp=4", "dp=2 fsdp, pp=2 1f1b m=4"),
}
SIZES = {"hidden": 256, "layers": 6, "heads": 4, "ffn": 1024, "vocab": 4096, "sequence": 64}
SMALL = {"hidden": 32, "layers": 4, "heads": 4, "ffn": 64, "vocab": 64, "sequence": 8}
BATCH, SKETCH = 32, 16
_WARM_UP, _FEWEST = 2, 4
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # M_... in glibc's malloc.h


def run(device: str, budget_s: float, quick: bool = False) -> None:
    """Measure, predict, train, print the table, and write the CSV."""
    if device != "cpu":
        print("processes over gloo are measured on CPUs only")
        return
    if quick:
        quick_layouts = ("dp=2 fsdp", "pp=2 1f1b m=4")
        print_table(rows_of(2, quick_layouts, {**SMALL, "sketch": 2}, budget_s, repetitions=1, start_method="fork"))
        return
    rows = []
    for world, layouts in LAYOUTS.items():
        for sketch in (None, SKETCH):
            rows += rows_of(world, layouts, {**SIZES, "sketch": sketch}, budget_s)
            print_table(rows)
    print(f"written to {write_csv('advisor', rows, device=device)}")


def rows_of(
    world: int,
    layouts: Sequence[str],
    sizes: dict[str, Any],
    budget_s: float,
    repetitions: int = 10,
    start_method: str = "spawn",
) -> list[dict[str, Any]]:
    """Train a model with each layout, and return measured beside predicted figures."""
    stats = ModelStats.transformer(**sizes)
    chosen = chosen_plan(stats, world, layouts)
    arguments = chosen, sizes, budget_s, repetitions
    cluster, seconds, minima = launch(seconds_of, *arguments, nproc=world, start_method=start_method)[0]
    memory = launch(_memory, chosen, sizes, nproc=world, start_method=start_method)  # by rank and layout
    # A small model can fit into memory that the process has freed before.
    peaks = [max(1.0, *ranks) for ranks in zip(*memory, strict=True)]
    predictions = {str(option.layout): option.estimate for option in plan_of(stats, cluster).options}
    return [
        {
            "processes": world,
            "model": "dense" if sizes["sketch"] is None else f"sketched R={sizes['sketch']}",
            "layout": layout,
            "step_ms": figure(1e3 * measured),
            "predicted_ms": figure(1e3 * predictions[layout].step_seconds),
            "time_ratio": figure(predictions[layout].step_seconds / measured),
            "fastest_ms": figure(1e3 * fastest),
            "fastest_ratio": figure(predictions[layout].step_seconds / fastest),
            "peak_mb": figure(peak / 1e6),
            "predicted_mb": figure(predictions[layout].memory.total / 1e6),
            "memory_ratio": figure(predictions[layout].memory.total / peak),
            **{f"{part}_ms": round(1e3 * value, 2) for part, value in predictions[layout].seconds.items()},
        }
        for layout, measured, fastest, peak in zip(layouts, seconds, minima, peaks, strict=True)
    ]


def chosen_plan(stats: ModelStats, world: int, layouts: Sequence[str]) -> ParallelismPlan:
    """Return a plan of these layouts, to apply; its figures are those of a guessed cluster."""
    guess = plan_of(stats, ClusterSpec.preset("cpu", world))
    names = [str(option.layout) for option in guess.options]
    options = tuple(guess.options[names.index(layout)] for layout in layouts)
    return ParallelismPlan(options, guess.cluster, BATCH, "time", ())


def plan_of(stats: ModelStats, cluster: ClusterSpec) -> ParallelismPlan:
    """Plan for the batch of this benchmark."""
    return plan_parallelism(stats, cluster, batch=BATCH, schedules=_SCHEDULES)


class _Trainer:
    """A rank's model, optimizer and samples."""

    def __init__(self, plan: ParallelismPlan, place: int, sizes: dict[str, Any]) -> None:
        warnings.simplefilter("ignore", PerformanceWarning)
        layout = plan.options[place].layout
        torch.manual_seed(0)
        model = plain_transformer(*(sizes[name] for name in ("hidden", "layers", "heads", "ffn", "vocab", "sketch")))
        self.built = plan.apply(model, place)
        self.is_pipeline = layout.pp > 1
        self.optimizer = torch.optim.Adam((self.built.model if self.is_pipeline else self.built).parameters())
        samples = BATCH // (layout.dp * layout.replicate)
        self.tokens = torch.randint(sizes["vocab"], (samples, sizes["sequence"]))

    def step(self) -> None:
        if self.is_pipeline:
            self.built.train_step((self.tokens, self.tokens), self.optimizer, _loss)
            return
        self.optimizer.zero_grad()
        _loss(self.built(self.tokens), self.tokens).backward()
        self.optimizer.step()


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def seconds_of(
    plan: ParallelismPlan, sizes: dict[str, Any], budget_s: float, repetitions: int = 10
) -> tuple[ClusterSpec, list[float], list[float]]:
    """Return the speeds of the ranks, and the median and least seconds a step of each of the plan's options.

    Every rank calls it.
    """
    _set_malloc({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1})  # keeps what is freed
    cluster = ClusterSpec.measure(repetitions=repetitions)
    trainers = [_Trainer(plan, place, sizes) for place in range(len(plan.options))]
    times: list[list[float]] = [[] for _ in trainers]
    end, going, turns = time.monotonic() + budget_s * len(trainers), torch.ones(1), 0
    while going:
        for trainer, taken in zip(trainers, times, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            trainer.step()
            taken.append(time.perf_counter() - begin)
        turns += 1
        going = torch.tensor([float(turns < _WARM_UP + _FEWEST or time.monotonic() < end)])
        dist.broadcast(going, 0)
    slowest = torch.tensor(times)[:, _WARM_UP:]
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # Speeds drift with what else the machine does: the mean of those before and after the steps.
    after = ClusterSpec.measure(repetitions=repetitions) if repetitions > 1 else cluster
    steps = slowest.tolist()
    return _mean(cluster, after), [statistics.median(row) for row in steps], [min(row) for row in steps]


def _mean(first: ClusterSpec, second: ClusterSpec) -> ClusterSpec:
    fields = (
        "peak_flops_fp32",
        "memory_bandwidth",
        "optimizer_bandwidth",
        "operation_seconds",
        "overlap",
    )
    pairs = zip(first.collectives, second.collectives, strict=True)
    return replace(
        first,
        collectives=tuple((name, (a + c) / 2, (b + d) / 2) for (name, a, b), (_, c, d) in pairs),
        **{name: (getattr(first, name) + getattr(second, name)) / 2 for name in fields},
    )


def _memory(plan: ParallelismPlan, sizes: dict[str, Any]) -> list[float]:
    _set_malloc({_MMAP_THRESHOLD: 2**16, _TRIM_THRESHOLD: 2**16})  # large blocks are mapped, and freed at once
    peaks = []
    for place in range(len(plan.options)):
        # What the first operations of a process load is not the model's.
        _Trainer(plan, place, {**SMALL, "sketch": sizes["sketch"] and 2}).step()
        gc.collect()
        first_bytes = _resident()
        trainer = _Trainer(plan, place, sizes)
        for _ in range(2):
            trainer.step()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        for _ in range(2):
            trainer.step()
        peaks.append(float((peak_memory() or 0) - first_bytes))
        del trainer
        gc.collect()
    return peaks


def _set_malloc(parameters: dict[int, int]) -> None:
    libc = ctypes.CDLL(None)
    for parameter, value in parameters.items():
        libc.mallopt(parameter, value)


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


if __name__ == "__main__":
    main(run, __doc__, threads=1, budget_s=4.0, memory=["default"])

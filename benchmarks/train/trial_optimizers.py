"""Optimizers with small states beside AdamW: loss at equal steps, at equal time and at equal memory of the states.

The tasks are those of optimizer_tasks.py, the methods those of optimizer_methods.py. For each task, width and method:

1. The time of a step is measured in turns with AdamW's, and the peak of the memory of a step in a process of its own.
2. The learning rate is chosen on one half of the held-out data with one seed, in steps of 2, and the sweep continues
   while the best rate is at its end. At this rate two more seeds are trained. The reported loss is that of the other
   half.
3. Three seeds are trained again at this rate, for as many steps as fit into the time of AdamW's. A method of one seed
   is only swept.

Peak memory is what parameters, gradients, activations and states take together. Methods of equal memory are those
whose states take about a quarter of the memory of AdamW's. Each row that is measured is appended to a file in the
cache, ``--progress FILE``, and a trial that was interrupted continues after the last row of the file: remove it to
measure all rows again. Tasks that run at the same time (``--tasks``) may share the file.
"""

__all__ = ["Progress", "Run", "Trial", "main", "planned", "run", "summary", "train"]

import argparse
import functools
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import (
    ROOT,
    commit,
    figure,
    interleave,
    keep_freed_memory,
    print_table,
    started_module,
    write_csv,
)
from benchmarks.train.optimizer_methods import BASELINE, METHODS, Method, state_sizes
from benchmarks.train.optimizer_tasks import TASKS, OptimizerTask
from panther.errors import MissingExtraError

_EXPECTED_RATES = 4  # of a sweep, for the plan
_STEPS_OF_MEMORY = 3
_TIMING_S = 6.0  # seconds in which steps are timed
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        equal: ``"steps"`` or ``"time"``: what is the same as in AdamW's training.
        lr: Peak learning rate, after a warm-up over a twentieth of the steps; a cosine takes it down to a hundredth.
        seed: Seed of the network and of the batches.
        steps: Number of steps.
    """

    equal: str
    lr: float
    seed: int
    steps: int


class Progress:
    """Rows that have been measured, in a file with a line for each, or in memory.

    Args:
        path: The file; None keeps the rows in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.rows: list[Row] = []
        self._path = path
        if path is not None and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            complete = [line for line in lines if line.endswith("\n")]  # a kill may have torn the last line
            self.rows = [json.loads(line) for line in complete]
            if complete != lines:
                path.write_text("".join(complete), encoding="utf-8")

    def measure(self, case: Row, measurement: Callable[[], Row]) -> Row:
        """Return the row of a case, after measuring it if there is none yet."""
        row = next((row for row in self.rows if case.items() <= row.items()), None)
        if row is None:
            row = case | measurement() | {"row_commit": commit()}
            self.rows.append(row)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print_table([row])
        return row


def _take_step(task: OptimizerTask, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, seed: int) -> bool:
    """Take a step, and return whether the loss was finite."""
    loss = task.loss(model, task.batch(step, seed))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return math.isfinite(loss.item())


def _stepper(task: OptimizerTask, method: Method) -> Callable[[], object]:
    """Return a function that takes a step of a new network."""
    torch.manual_seed(0)
    model = method.build(task)
    return functools.partial(_take_step, task, model, method.optimizer(task, model, 1e-4), 0, 0)


def train(task: OptimizerTask, method: Method, settings: Run) -> Row:
    """Train once, and return losses, the sizes of the states, and CPU seconds; a diverged loss is infinite."""
    torch.manual_seed(settings.seed)
    model = method.build(task)
    optimizer = method.optimizer(task, model, settings.lr)
    steps, warm_up = settings.steps, max(1, settings.steps // 20)

    def rate(step: int) -> float:
        progress = max(0, step - warm_up) / max(1, steps - warm_up)
        return min((step + 1) / warm_up, 0.505 + 0.495 * math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    start, is_finite = time.process_time(), True
    for step in range(steps):
        is_finite = _take_step(task, model, optimizer, step, settings.seed)
        if not is_finite:
            break
        schedule.step()
    train_s = time.process_time() - start
    losses = task.evaluate(model) if is_finite else {}
    numbers, bytes_ = state_sizes(optimizer)
    return {
        **{name: round(value, 5) if math.isfinite(value := losses.get(name, math.inf)) else math.inf
           for name in ("chosen_by", "loss")},
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_numbers": numbers,
        "state_mb": figure(bytes_ / 1e6),
        "train_s": figure(train_s),
    }  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One method on one task.

    Attributes:
        task: The task.
        method: The method.
        progress: Where the rows go.
        baseline: The method whose time is the measure.
        quick: Whether times and memory are measured in one step.
    """

    task: OptimizerTask
    method: Method
    progress: Progress
    baseline: Method = METHODS[BASELINE]
    quick: bool = False

    @property
    def case(self) -> Row:
        """Return the columns that name the method and the task."""
        return {"task": self.task.name, "width": self.task.width, "method": self.method.name}

    def run(self) -> None:
        """Measure all rows of the method."""
        speed = self.progress.measure(self.case | {"equal": "speed"}, self._measure_step)
        lr = self._sweep()
        if self.method.rate_of:
            self._train("steps", self._best_rate_of(self.method.rate_of), self.method.seeds[0], self.task.steps)
        if len(self.method.seeds) == 1:
            return  # a sweep alone
        for seed in self.method.seeds[1:]:
            self._train("steps", lr, seed, self.task.steps)
        if self.method.name != self.baseline.name:
            for seed in self.method.seeds:
                self._train("time", lr, seed, max(1, round(self.task.steps / speed["x_adamw"])))

    def _train(self, equal: str, lr: float, seed: int, steps: int) -> float:
        settings = Run(equal, lr, seed, steps)
        row = self.progress.measure(self.case | asdict(settings), lambda: train(self.task, self.method, settings))
        return float(row["chosen_by"])

    def _sweep(self) -> float:
        """Return the learning rate with the least loss on the half to choose by, with the first seed."""
        losses: dict[float, float] = {}
        rates: Sequence[float] = self.method.rates(self.task)
        while True:
            for lr in rates:
                losses[lr] = self._train("steps", lr, self.method.seeds[0], self.task.steps)
            best = min(losses, key=lambda lr: losses[lr])
            if len(losses) >= self.method.most_rates or min(losses) < best < max(losses):
                return best
            rates = [figure(best / 2 if best == min(losses) else 2 * best)]

    def _best_rate_of(self, method: str) -> float:
        case = self.case | {"method": method, "equal": "steps", "seed": self.method.seeds[0]}
        rows = [row for row in self.progress.rows if case.items() <= row.items()]
        return float(min(rows, key=lambda row: row["chosen_by"])["lr"])

    def _measure_step(self) -> Row:
        """Time steps in turns with the baseline's, and measure the peak of memory in a process of its own."""
        steps = {
            "baseline": _stepper(self.task, self.baseline),
            "again": _stepper(self.task, self.baseline),
            "method": _stepper(self.task, self.method),
        }
        timings = interleave(steps, budget_s=0 if self.quick else _TIMING_S)
        reference = timings["baseline"]
        return {
            "step_ms": figure(1e3 * timings["method"].median_s),
            "x_adamw": round(1 / timings["method"].ratio_to(reference), 3),
            "x_again": round(1 / timings["again"].ratio_to(reference), 3),
            "peak_mb": None if self.quick else self._peak_mb(),
        }

    def _peak_mb(self) -> float:
        command = [sys.executable, "-m", started_module(), "--tasks", self.task.name]
        command += ["--width", str(self.task.width), "--peak-memory-of", self.method.name]
        # Blocks above this size go back to the system as soon as they are freed.
        allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        environment = os.environ | allocator
        process = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return float(process.stdout.splitlines()[-1])


def _peak_memory_mb(task: OptimizerTask, method: Method) -> float:
    """Return by how much the memory of this process grows at most while a network is made and trained."""
    growth = 0
    for _ in range(2):  # the first time loads and compiles code
        gc.collect()
        first_kib = _memory_kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present
        torch.manual_seed(0)
        model = method.build(task)
        optimizer = method.optimizer(task, model, 1e-4)
        for step in range(_STEPS_OF_MEMORY):
            _take_step(task, model, optimizer, step, 0)
        growth = _memory_kib("VmHWM") - first_kib
        del model, optimizer
    return figure(growth * 1024 / 1e6)


def _memory_kib(field: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(f"{field}:"))


def _widths_of(name: str, widths: Sequence[int]) -> Sequence[int]:
    """Return the widths of a task that are asked for: any, unless the task's network has a width of its own."""
    _, own_widths = TASKS[name]
    return [width for width in widths if len(own_widths) > 1 or width in own_widths] if widths else own_widths


def run(
    task_names: Sequence[str],
    methods: Sequence[Method],
    progress: Progress,
    *,
    baseline: Method = METHODS[BASELINE],
    widths: Sequence[int] = (),
    quick: bool = False,
) -> Iterator[OptimizerTask]:
    """Measure the methods on the tasks, and yield a task after each method."""
    for name in task_names:
        build, _ = TASKS[name]
        for width in _widths_of(name, widths):
            task = build(48 if quick else width, quick)
            for method in [method for method in methods if method.name not in task.excluded]:
                try:
                    Trial(task, method, progress, baseline, quick).run()
                except MissingExtraError as error:
                    print(error)
                yield task
            if quick:
                break


def planned(
    task_names: Sequence[str], methods: Sequence[Method], baseline: Method, widths: Sequence[int] = ()
) -> Iterator[Row]:
    """Yield a row for each task and width: the number of runs, and CPU hours from the time of the baseline's step."""
    for name in task_names:
        build, _ = TASKS[name]
        for width in _widths_of(name, widths):
            task = build(width, False)
            runs = sum(
                min(_EXPECTED_RATES, method.most_rates) + (2 * len(method.seeds) - 1 if len(method.seeds) > 1 else 0)
                for method in methods
                if method.name not in task.excluded
            )
            step = _stepper(task, baseline)
            step_s = interleave({"step": step}, budget_s=1e-9, min_rounds=3)["step"].median_s
            hours = runs * task.steps * step_s / 3600
            yield {"task": name, "width": width, "runs": runs, "step_s": figure(step_s), "cpu_hours": figure(hours)}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each method that has all its seeds, with the mean loss at equal steps and at equal time."""
    table = []
    for case in dict.fromkeys((row["task"], row["width"], row["method"]) for row in rows):
        of_case = [row for row in rows if (row["task"], row["width"], row["method"]) == case]
        losses: dict[str, list[float]] = {}
        for equal in ("steps", "time"):
            by_rate: dict[float, list[float]] = {}
            for row in of_case:
                if row["equal"] == equal:
                    by_rate.setdefault(row["lr"], []).append(row["loss"])
            losses[equal] = max(by_rate.values(), key=len, default=[])  # of a sweep, one rate has all the seeds
        if len(losses["steps"]) < 2:
            continue
        speed = next((row for row in of_case if row["equal"] == "speed"), {})
        table.append(
            dict(zip(("task", "width", "method"), case, strict=True))
            | {f"loss_{equal}": round(statistics.mean(x), 4) if x else "" for equal, x in losses.items()}
            | {"spread": round(max(losses["steps"]) - min(losses["steps"]), 4)}
            | {"state_mb": next(row["state_mb"] for row in of_case if row["equal"] == "steps")}
            | {name: speed.get(name, "") for name in ("peak_mb", "x_adamw")}
        )
    return table


def _write(subject: str, task: OptimizerTask, rows: Sequence[Row]) -> None:
    """Write the runs and the times of a task, in a file each."""
    of_task = [row for row in rows if (row["task"], row["width"]) == (task.name, task.width)]
    for suffix, is_speed in (("", False), ("-speed", True)):
        table = [row for row in of_task if (row["equal"] == "speed") is is_speed]
        if table:
            write_csv(f"{subject}-{task.name}-{task.width}{suffix}", table, device="cpu")


def main(
    methods: Mapping[str, Method],
    task_names: Sequence[str],
    subject: str,
    description: str,
    *,
    baseline: str = BASELINE,
    widths: Sequence[int] = (),
) -> None:
    """Measure the tasks and methods that the command line selects.

    Args:
        methods: All methods, by name.
        task_names: Names of all tasks.
        subject: Beginning of the names of the files of results.
        description: Description of the program.
        baseline: Name of the method whose time is the measure.
        widths: Widths of the tasks; empty means those of the tasks.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", choices=list(task_names), nargs="+", default=list(task_names))
    parser.add_argument("--width", type=int, nargs="+", default=widths, help="widths of the tasks; all is the default")
    parser.add_argument("--methods", choices=list(methods), nargs="+", default=list(methods))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "panther" / "trials"
    parser.add_argument("--progress", type=Path, default=cache / f"{subject}.jsonl", help="rows that are not run again")
    parser.add_argument("--plan", action="store_true", help="only print the number of runs and their CPU time")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--peak-memory-of", choices=list(methods), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_memory_of:
        build, (width, *_) = TASKS[options.tasks[0]]
        print(_peak_memory_mb(build((options.width or (width,))[0], False), methods[options.peak_memory_of]))
        return
    keep_freed_memory()
    selected = [methods[name] for name in options.methods]
    if not options.quick:
        plan = list(planned(options.tasks, selected, methods[baseline], options.width))
        print_table(plan)
        print(f"{sum(row['cpu_hours'] for row in plan):.1f} CPU hours, less the rows of an earlier run", flush=True)
    if options.plan:
        return
    progress = Progress(None if options.quick else options.progress)
    measured_tasks = run(
        options.tasks, selected, progress, baseline=methods[baseline], widths=options.width, quick=options.quick
    )
    for task in measured_tasks:
        if not options.quick:
            _write(subject, task, progress.rows)
    print_table(summary(progress.rows))


if __name__ == "__main__":
    main(METHODS, list(TASKS), "optimizers", __doc__ or "")

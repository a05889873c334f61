"""Networks trained from scratch with sketched, low-rank and dense layers, at equal bytes, flops and time.

For each task, form (scratch_forms.py) and optimizer the learning rate is the best of a sweep in steps of 2, by one half
of the held-out data and the first seed; while the best one is at an end of the sweep, the sweep goes on there. The two
larger networks, which are there for reference, choose between the rate of the smaller one of their kind and half of it.
At the rate chosen every seed is trained, and the loss on the other half is reported. Then each form but the sketched
one is trained again at its rate, for as many steps as take the CPU time of the sketched one's. What is measured is
written after each form; nothing is read back, so that a task that was interrupted is run again by ``--task``.
"""

__all__ = ["run"]

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness import figure, keep_freed_memory, print_table, write_csv
from benchmarks.train.scratch_forms import (
    EQUAL_BYTES,
    FORMS,
    OPTIMIZERS,
    Form,
    build,
    linear_flops,
    optimizer_of,
    stored_bytes,
)
from benchmarks.train.scratch_tasks import Task, image_tasks, text_task

SEEDS = (0, 1, 2)
POINTS = 5  # of a curve
MOST_RATES = 4  # of a sweep
TASKS = ("perceptron", "vision", "text")


@dataclass(frozen=True)
class Result:
    """One run: what was measured at its end, and its curve."""

    figures: dict[str, float]
    cpu_s: float  # of the steps, without the evaluations
    gradient_bytes: int
    optimizer_bytes: int
    curve: tuple[dict[str, float], ...]


def train(task: Task, model: nn.Module, optimizer_name: str, lr: float, seed: int, steps: int) -> Result:
    """Train with a warm-up over a twentieth of the steps and a cosine down to a hundredth of the rate."""
    optimizer = optimizer_of(task, model, optimizer_name, lr)
    warm_up = max(1, steps // 20)

    def rate(step: int) -> float:
        down = math.cos(math.pi * max(0, step - warm_up) / max(1, steps - warm_up))
        return min((step + 1) / warm_up, 0.505 + 0.495 * down)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    marks = {round(steps * (i + 1) / POINTS) for i in range(POINTS)}
    cpu_s, curve, gradient_bytes, figures = 0.0, [], 0, {}
    for step in range(1, steps + 1):
        inputs, targets = task.batch(step, seed)
        start = time.process_time()
        loss = functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        cpu_s += time.process_time() - start
        if step in marks:
            gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            figures = task.evaluate(model, all_halves=step == steps)
            curve.append(
                {"step": step, "cpu_s": cpu_s, "gradient_mb": step * gradient_bytes / 1e6, "loss": figures["loss"]}
            )
    kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    return Result(figures, cpu_s, gradient_bytes, kept, tuple(curve))


def run(task: Task, optimizer: str, size: str) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield for each form a row for each run, those of the sweep too, and a row for each point of their curves."""
    reference_s = 0.0
    chosen: dict[str, float] = {}
    for form in FORMS if size != "short" else FORMS[:EQUAL_BYTES]:
        if optimizer not in form.optimizers:
            continue
        trial = _Trial(task, form, optimizer, [], [])
        rates: Sequence[float] = task.rates[optimizer]
        if form.smaller is not None:
            rates = (chosen[form.smaller] / 2, chosen[form.smaller])
        lr = trial.sweep(rates if size == "full" else rates[1:2], extend=size == "full" and form.smaller is None)
        chosen[form.name] = lr
        seeds = SEEDS[:1] if size == "quick" else SEEDS
        for seed in seeds[1:]:
            trial.train(lr, seed, "steps")
        used_s = statistics.median(row["cpu_s"] for row in trial.rows if row["lr"] == lr)
        reference_s = reference_s or used_s
        if form.at_equal_time and form is not FORMS[0] and size != "short":
            for seed in seeds:
                trial.train(lr, seed, "time", max(1, round(task.steps * reference_s / used_s)))
        yield trial.rows, trial.curves


@dataclass(frozen=True)
class _Trial:
    """One form of one task under one optimizer, and where its rows go."""

    task: Task
    form: Form
    optimizer: str
    rows: list[dict[str, Any]]
    curves: list[dict[str, Any]]

    def sweep(self, rates: Sequence[float], extend: bool) -> float:
        """Return the rate of the least loss on the half to choose by, with the first seed."""
        found = {lr: self.train(lr, SEEDS[0], "steps") for lr in rates}
        best = min(found, key=lambda lr: found[lr])
        while extend and len(found) < MOST_RATES and best in (min(found), max(found)):
            further = best / 2 if best == min(found) else best * 2
            found[further] = self.train(further, SEEDS[0], "steps")
            best = min(found, key=lambda lr: found[lr])
        return best

    def train(self, lr: float, seed: int, equal: str, steps: int | None = None) -> float:
        """Train once, add a row and a curve, and return the loss on the half to choose by."""
        model = build(self.task, self.form, seed)
        result = train(self.task, model, self.optimizer, lr, seed, steps or self.task.steps)
        case = {"task": self.task.name, "optimizer": self.optimizer, "form": self.form.name}
        run_ = {"equal": equal, "lr": lr, "seed": seed, "steps": steps or self.task.steps}
        sizes = {
            "stored_bytes": stored_bytes(model),
            "linear_flops": linear_flops(self.task, model),
            "gradient_bytes": result.gradient_bytes,
            "optimizer_bytes": result.optimizer_bytes,
        }
        measured = {name: round(value, 4) for name, value in result.figures.items()}
        self.rows.append(case | run_ | sizes | measured | {"cpu_s": figure(result.cpu_s)})
        self.curves.extend(case | run_ | point for point in result.curve)
        print_table(self.rows[-1:])
        return result.figures["chosen_by"]


def main() -> None:
    """Run the tasks and optimizers asked for, and write the results of each task as soon as they are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small models and few steps, nothing written")
    sizes.add_argument(
        "--short", action="store_true", help="no sweep, and only the forms of equal bytes, for equal steps"
    )
    parser.add_argument("--task", choices=TASKS, help="one alone; all is the default")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="one alone; all is the default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    tasks = dict(zip(TASKS, [*image_tasks(options.quick), text_task(options.quick)], strict=True))
    size = "quick" if options.quick else "short" if options.short else "full"
    for task in tasks.values() if options.task is None else [tasks[options.task]]:
        rows: list[dict[str, Any]] = []
        curves: list[dict[str, Any]] = []
        for optimizer in [options.optimizer] if options.optimizer else OPTIMIZERS:
            for new_rows, new_curves in run(task, optimizer, size):
                rows, curves = rows + new_rows, curves + new_curves
                if not options.quick:  # as soon as they are there: a task takes a quarter of an hour
                    subject = f"scratch-{task.name.replace(', ', '-').lower()}"
                    for name, table in ((subject, rows), (f"{subject}-curves", curves)):
                        print(f"written to {write_csv(name, table, device='cpu')}", flush=True)
        print_table(summary(rows))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each form at its best rate: the mean loss over the seeds, the least and the largest."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[key] for key in ("task", "optimizer", "form", "equal", "lr")), []).append(row)
    most = max(map(len, cases.values()))  # of the rates of a sweep only the chosen one has every seed
    return [
        dict(zip(("task", "optimizer", "form", "equal", "lr"), case, strict=True))
        | {"stored_bytes": found[0]["stored_bytes"], "steps": found[0]["steps"]}
        | {"loss": figure(statistics.mean(row["loss"] for row in found))}
        | {"least": min(row["loss"] for row in found), "largest": max(row["loss"] for row in found)}
        | {"accuracy": figure(statistics.mean(row["accuracy"] for row in found))}
        | {"cpu_s": figure(statistics.median(row["cpu_s"] for row in found))}
        for case, found in cases.items()
        if len(found) == most
    ]


if __name__ == "__main__":
    main()

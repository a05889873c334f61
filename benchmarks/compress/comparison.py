"""Code that the trials of pr.compress share: the methods, their comparison on one trained model, and the table.

Every method compresses its own copy of the model to the same kept fraction of the layers' numbers, from the same
unlabelled batches. Beside them stand a dense model of as many numbers, trained from scratch for as many steps, and, at
``BOUND_AT``, what the same ranks can reach: the factors trained further on the task itself, with labels, to be held
against the original trained as much further, since that gains too.
"""

__all__ = ["BOUND_AT", "BUDGETS", "METHODS", "Task", "compare", "distance", "main", "stored_bytes"]

import argparse
import copy
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import panther as pr
from benchmarks.harness import figure, keep_freed_memory, print_table, write_csv
from panther.errors import PerformanceWarning
from panther.nn.sketch_record import plain_state

BUDGETS = (0.75, 0.5, 0.25)
BOUND_AT = 0.5
METHODS: dict[str, dict[str, Any]] = {
    "random": {"method": "random", "allocate": "uniform"},
    "svd": {"method": "svd", "allocate": "uniform"},
    "activation": {"method": "activation", "allocate": "uniform"},
    "two_sided, uniform": {"method": "two_sided", "allocate": "uniform"},
    "two_sided": {"method": "two_sided", "allocate": "global"},
}
HEALED = "two_sided + heal"
_BESIDE_WEIGHTS = ("bias", "sketch_seed")  # of a layer's state: not counted by a budget


@dataclass(frozen=True)
class Task:
    """A trained model and what can be done with it.

    Attributes:
        original: The model.
        train_s: CPU seconds that its training took.
        calibration: Unlabelled batches.
        evaluate: Figures of a model on held-out data, ``loss`` among them.
        twin: A dense model of as many numbers as the original has when a fraction of its layers' is kept, trained from
            scratch for as many steps; and the CPU seconds of that.
        train_on: Trains a model further in place, with labels.
        heal_steps: Of healing.
    """

    original: nn.Module
    train_s: float
    calibration: list[Any]
    evaluate: Callable[[nn.Module], dict[str, float]]
    twin: Callable[[float], tuple[nn.Module, float]]
    train_on: Callable[[nn.Module], object]
    heal_steps: int


def compare(task: Task, budgets: Sequence[float] = BUDGETS, bound_at: float | None = BOUND_AT) -> list[dict[str, Any]]:
    """Compress by every method to every budget; return a row for each, and for the baselines."""
    rows: list[dict[str, Any]] = []
    names = _layers(task.original)
    dense_bytes = stored_bytes(task.original, names)
    original_loss = task.evaluate(task.original)["loss"]

    def add(budget: float, method: str, model: nn.Module, seconds: float, kept: float | None = None) -> None:
        figures = task.evaluate(model)
        kept = stored_bytes(model, names) / dense_bytes if kept is None else kept
        row = {"budget": budget, "method": method, "kept": round(kept, 4), "model_bytes": _model_bytes(model)}
        row |= {name: round(value, 4) for name, value in figures.items()}
        rows.append(row | {"gap": round(figures["loss"] - original_loss, 4), "cpu_s": figure(max(seconds, 1e-3))})
        print_table(rows[-1:])

    def compressed(budget: float, heal_steps: int = 0, **options: Any) -> tuple[nn.Module, float]:
        model = copy.deepcopy(task.original)
        heal = pr.HealConfig(max_steps=heal_steps) if heal_steps else None
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # small layers, and a question of size
            options = {"forms": ("dense", "low_rank"), "heal": heal, "seed": 0} | options
            report = pr.compress(model, budget=budget, calibration=task.calibration, **options)
        for note in report.notes:
            print(f"note: {note}")
        return model.eval(), time.process_time() - start

    add(1.0, "original", task.original, task.train_s)
    for budget in budgets:
        for name, options in METHODS.items():
            add(budget, name, *compressed(budget, **options))
        healed, seconds = compressed(budget, task.heal_steps, **METHODS["two_sided"])
        add(budget, HEALED, healed, seconds)
        add(budget, "dense twin", *task.twin(budget), kept=budget)
        if budget == bound_at:
            at_rank = compressed(budget, **METHODS["two_sided"])[0]
            for name, model, fraction in (
                ("two_sided", at_rank, None),
                ("original", copy.deepcopy(task.original), 1.0),
            ):
                for parameter in model.parameters():
                    parameter.requires_grad_(True)
                start = time.process_time()
                task.train_on(model.train())
                add(budget, f"{name}, trained on", model.eval(), time.process_time() - start, fraction)
    return rows


def stored_bytes(model: nn.Module, names: list[str]) -> int:
    """Return the bytes of the weights of the named layers as written to disk, in the factors they have by now."""
    state = model.state_dict()
    return sum(
        tensor.nbytes
        for name in names
        for key, tensor in state.items()
        if key.startswith(f"{name}.") and not key.endswith(_BESIDE_WEIGHTS)
    )


def distance(output: Tensor, original: Tensor) -> dict[str, float]:
    """Return a classifier's divergence from the original, in nats, and its logits' relative error; ``(n, classes)``."""
    log_p, log_q = functional.log_softmax(original, -1), functional.log_softmax(output, -1)
    kl = functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return {"kl": kl.item(), "rel_error": ((output - original).norm() / original.norm()).item()}


def main(run: Callable[[bool, Path | None], list[dict[str, Any]]], subject: str, description: str | None) -> None:
    """Run a trial with the arguments of the command line on one CPU thread."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "panther" / "trials"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cache", type=Path, default=cache, help="folder of the trained dense models")
    parser.add_argument("--quick", action="store_true", help="a small model and few steps, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows = run(options.quick, None if options.quick else options.cache)
    print_table(rows)
    if not options.quick:
        print(f"written to {write_csv(subject, rows, device='cpu')}")


def _layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that a budget counts: linear and convolutional, with a weight of their own."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and len(holders[id(module.weight)]) == 1
    ]


def _model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's distinct numbers as written to disk."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in plain_state(model).values()}.values())

"""Write the tables of small optimizer states: ``python -m benchmarks.figures.optimizers_table``, after the trials.

They go to files .inc of docs/benchmarks, one a subject: for each task and width, what each method reaches at
equal steps and at equal time, the memory of its states, and the time of a step. optimizers-summary.inc has the losses
of the main methods on all tasks, layers-summary.inc those of all kinds of layers, and layers-rates.inc what a kind of
layer loses at the rate of the dense network.
"""

__all__ = ["layers_table", "method_table", "rates_table", "summary_table"]

import csv
import io
import math
import statistics
from collections.abc import Sequence

from benchmarks.figures.frontier_table import cpu_name, short
from benchmarks.figures.layout import by_cpu
from benchmarks.harness import RESULTS, ROOT
from benchmarks.train.trial_layers import DENSE, FRACTIONS, KINDS, OTHER_OPTIMIZERS

PAGES = ROOT / "docs" / "benchmarks"
COLUMNS = ("", "Equal steps", "Seeds differ by", "Equal time", "States MB", "Peak MB", "Step")
UNITS = {"characters": "nats a character", "images": "nats an image", "encoder": "nats a gloss"}
SUBJECTS = ("optimizers", "default-optimizers", "activations", "layers", "places")
SUMMARIZED = "optimizers"
SWEPT = "layers"
MAIN_METHODS = ("AdamW", "channel, a quarter", "tensor, rank 1", "Muon", "AdamW, narrower", "Adafactor")
GENERATED = ".. Written by python -m benchmarks.figures.optimizers_table.\n\n"
Rows = list[dict[str, str]]


def method_table(name: str, runs: Rows, speeds: Rows) -> str:
    """Return what the methods reach on one task, from the results of its runs and of the times of a step."""
    by_method = {row["method"]: row for row in speeds}
    lines = []
    for method in dict.fromkeys(row["method"] for row in runs):
        of_method = [row for row in runs if row["method"] == method]
        losses, equal_time = (_best_losses(of_method, equal) for equal in ("steps", "time"))
        speed = by_method.get(method, {})
        lines.append(
            [
                method,
                f"{statistics.mean(losses):.3f}" if losses else "",
                f"{max(losses) - min(losses):.3f}" if len(losses) > 1 else "",
                f"{statistics.mean(equal_time):.3f}" if equal_time else "",
                short(of_method[0]["state_mb"]),
                short(speed["peak_mb"]) if speed.get("peak_mb") else "",
                f"{float(speed['x_adamw']):.2f}" if speed else "",
            ]
        )
    task, width = name.rsplit("-", 1)
    seeds = max(len(_best_losses([row for row in runs if row["method"] == line[0]], "steps")) for line in lines)
    title = (
        f"{task.capitalize()}, width {width}: {UNITS.get(task, 'nats a token')}, {seeds} seed{'s' if seeds > 1 else ''}"
    )
    return _csv_table(f"{title}, {cpu_name(runs[0]['device'])}", [COLUMNS, *lines])


def summary_table(tables: Sequence[tuple[str, Rows]]) -> str:
    """Return the mean losses of the main methods, at equal steps and at equal time, with a line for each task.

    Args:
        tables: The task and width, and the runs, of each table of :func:`method_table`.
    """
    lines = [
        [" ".join(name.rsplit("-", 1)), *(_mean_losses(runs, method) for method in MAIN_METHODS)]
        for name, runs in tables
    ]
    return _csv_table("Losses after equal steps / after equal time", [("", *MAIN_METHODS), *lines])


def layers_table(tables: Sequence[tuple[str, Rows]]) -> str:
    """Return the mean losses of all kinds of layers, at equal steps and at equal time, a line for each task and size.

    Args:
        tables: As for :func:`summary_table`.
    """
    kinds = ("narrower", *KINDS)
    lines = [
        [
            f"{' '.join(name.rsplit('-', 1))}, {size}",
            _mean_losses(runs, DENSE),
            *(_mean_losses(runs, f"{kind}, {size}") for kind in kinds),
        ]
        for name, runs in tables
        for size in FRACTIONS
    ]
    return _csv_table(
        "Losses after equal steps / after equal time, means of three seeds", [("", DENSE, *kinds), *lines]
    )


def _mean_losses(runs: Rows, method: str) -> str:
    of_method = [row for row in runs if row["method"] == method]
    losses = [_best_losses(of_method, equal) for equal in ("steps", "time")]
    return " / ".join(f"{statistics.mean(values):.3f}" for values in losses if values)


def rates_table(tables: Sequence[tuple[str, Rows]]) -> str:
    """Return what each kind of layer loses at the dense network's best rate, for the first seed.

    A cell has the loss at this rate less the loss at the layer's own best rate, which follows as a multiple of it.

    Args:
        tables: As for :func:`summary_table`.
    """
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for name, runs in tables:
        sweeps = {method: _sweep(runs, method) for method in dict.fromkeys(row["method"] for row in runs)}
        for method, sweep in sweeps.items():
            optimizer = _optimizer_of(method)
            layer = method.removesuffix(f", {optimizer}")
            dense_rate = _best_rate(sweeps.get(f"{DENSE}, {optimizer}", sweeps[DENSE]))  # layers state rates for AdamW
            best = _best_rate(sweep)
            lost = sweep[dense_rate][1] - sweep[best][1] if dense_rate in sweep else None
            times = f"×{2 ** round(math.log2(best / dense_rate)):g}"
            cell = times if lost is None else f"{lost:.3f} {times}"
            cells.setdefault((optimizer, layer), {})[name] = f"{best:g}" if layer == DENSE else cell
    parts = []
    for optimizer in ("", *OTHER_OPTIMIZERS):
        of_layer = {layer: row for (of, layer), row in cells.items() if of == optimizer}
        names = [
            name for name in dict.fromkeys(name for name, _ in tables) if any(name in row for row in of_layer.values())
        ]
        lines = [[layer, *(row.get(name, "") for name in names)] for layer, row in of_layer.items()]
        lines.sort(key=lambda line: line[0] != DENSE)
        if lines:
            head = ("", *(" ".join(name.rsplit("-", 1)) for name in names))
            parts.append(
                _csv_table(
                    f"{optimizer or 'AdamW'}: loss less the least, at the dense network's rate, ×best rate",
                    [head, *lines],
                )
            )
    return "".join(parts)


def _sweep(runs: Rows, method: str) -> dict[float, tuple[float, float]]:
    """Return the losses to choose by and to report, of the first seed after equal steps, by learning rate."""
    of_method = [row for row in runs if (row["method"], row["equal"], row["seed"]) == (method, "steps", "0")]
    return {float(row["lr"]): (float(row["chosen_by"]), float(row["loss"])) for row in of_method}


def _best_rate(sweep: dict[float, tuple[float, float]]) -> float:
    return min(sweep, key=lambda lr: sweep[lr])


def _optimizer_of(method: str) -> str:
    """Return the optimizer that a method of the trial of layers names; the empty string for AdamW at one rate."""
    return next((name for name in OTHER_OPTIMIZERS if method.endswith(f", {name}")), "")


def _csv_table(title: str, rows: Sequence[Sequence[str]]) -> str:
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    head = [f".. csv-table:: {title}", "   :header-rows: 1", ""]
    return "\n".join([*head, *(f"   {line}" for line in table.getvalue().splitlines())]) + "\n\n"


def _best_losses(runs: Rows, equal: str) -> list[float]:
    """Return the losses of the seeds at the learning rate of most seeds: after a sweep, only one has all of them."""
    losses: dict[str, list[float]] = {}
    for row in runs:
        if row["equal"] == equal:
            losses.setdefault(row["lr"], []).append(float(row["loss"]))
    return max(losses.values(), key=lambda values: (len(values), -min(values)), default=[])


def _subjects(subject: str) -> list[str]:
    """Return the tasks and widths that have results."""
    paths = sorted(RESULTS.glob(f"{subject}-*-speed-cpu-*-threads-1.csv"))
    names = [path.name.removeprefix(f"{subject}-").partition("-speed-cpu-")[0] for path in paths]
    return sorted(dict.fromkeys(names), key=lambda name: (name.rpartition("-")[0], int(name.rpartition("-")[2])))


def main() -> None:
    """Write the page of each subject that has results."""
    for subject in SUBJECTS:
        parts, tables = [GENERATED], []
        for name in _subjects(subject):
            found = [by_cpu(f"{subject}-{name}{suffix}", 1) for suffix in ("", "-speed")]
            for device, runs in found[0].items():
                main_runs = [row for row in runs if not _optimizer_of(row["method"])]
                parts.append(method_table(name, main_runs, found[1].get(device, [])))
                tables.append((name, runs))
        if len(parts) == 1:
            continue  # no results
        pages = {subject: "".join(parts)}
        if subject == SUMMARIZED:
            pages[f"{subject}-summary"] = GENERATED + summary_table(tables)
        if subject == SWEPT:
            pages[f"{subject}-summary"] = GENERATED + layers_table(tables)
            pages[f"{subject}-rates"] = GENERATED + rates_table(tables)
        for page, content in pages.items():
            path = PAGES / f"{page}.inc"
            path.write_text(content.rstrip("\n") + "\n", encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()

"""Draw training from scratch: ``python -m benchmarks.figures.scratch`` writes docs/_static/benchmarks/*.svg.

A figure for each task: the held-out loss against CPU seconds, against the bytes of gradients so far (what each process
of data parallelism sends), and at the end against the bytes stored. A colour is a form, a style of line an optimizer.
"""

__all__ = ["chosen", "draw_scratch"]

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.figures.layout import by_cpu, panel_grid, save, start
from benchmarks.harness import RESULTS
from panther.errors import require_extra

COLOURS = {
    "sketched": "C0",
    "sketched in part": "C9",
    "low rank": "C1",
    "low rank in part": "C8",
    "dense, narrower": "C2",
    "low rank, twice R": "C4",
    "dense": "C3",
}
STYLES = {"AdamW": "--", "Muon": "-"}
Runs = dict[tuple[str, str], list[dict[str, str]]]  # by optimizer and form


def chosen(rows: list[dict[str, str]]) -> Runs:
    """Return the rows of runs over equal steps, at the rate that has every seed, by optimizer and form."""
    by_rate: dict[tuple[str, str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if row["equal"] == "steps":
            by_rate[row["optimizer"], row["form"], row["lr"]].append(row)
    best: Runs = {}
    for (optimizer, form, _), found in by_rate.items():
        best_rows = best.get((optimizer, form), [])
        if len({row["seed"] for row in found}) > len({row["seed"] for row in best_rows}):
            best[optimizer, form] = found
    return best


def draw_scratch(subject: str, threads: int = 1) -> Path:
    """Draw the figure of one task, from the CSV of its runs and that of their curves; a row for each CPU."""
    runs, curves = by_cpu(subject, threads), by_cpu(f"{subject}-curves", threads)
    figure, axes = panel_grid(3, len(runs))
    for rows, points, line in zip(runs.values(), curves.values(), axes, strict=True):
        _draw_curves(line, chosen(points))
        _draw_sizes(line[2], chosen(rows))
    return save(figure, axes, subject, {cpu: "held-out loss, nats" for cpu in runs})


def _draw_curves(axes: Any, curves: Runs) -> None:
    for (optimizer, form), points in curves.items():
        at: dict[int, list[dict[str, str]]] = defaultdict(list)
        for point in points:
            at[int(point["step"])].append(point)
        style = {"color": COLOURS[form], "linestyle": STYLES[optimizer]}
        losses = [_mean(found, "loss") for found in at.values()]
        for axis, column in zip(axes, ("cpu_s", "gradient_mb"), strict=False):
            axis.plot([_mean(found, column) for found in at.values()], losses, label=f"{form}, {optimizer}", **style)
    axes[0].set(xlabel="CPU seconds, one thread")
    axes[1].set(xlabel="gradients so far, MB", xscale="log")
    axes[1].xaxis.set_minor_formatter(require_extra("matplotlib.ticker", "bench").NullFormatter())
    for axis in axes:
        axis.grid(alpha=0.3)


def _draw_sizes(axis: Any, found: Runs) -> None:
    for (optimizer, form), rows in found.items():
        losses = [float(row["loss"]) for row in rows]
        middle = statistics.mean(losses)
        spread = [[middle - min(losses)], [max(losses) - middle]]
        style = {"color": COLOURS[form], "fillstyle": "full" if optimizer == "Muon" else "none"}
        axis.errorbar([float(rows[0]["stored_bytes"]) / 1e6], [middle], spread, fmt="o", **style)
    axis.set(xlabel="stored, MB")
    axis.set_xlim(0, 1.1 * axis.dataLim.x1)
    axis.set_title("at the end, with the range of the seeds", fontsize=10)


def _mean(rows: list[dict[str, str]], column: str) -> float:
    return statistics.mean(float(row[column]) for row in rows)


if __name__ == "__main__":
    start()
    for path in sorted(RESULTS.glob("scratch-*-cpu-*.csv")):
        if "-curves-" not in path.name:
            print(draw_scratch(path.name.partition("-cpu-")[0]))

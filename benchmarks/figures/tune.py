"""Draw the trials of pr.tune: ``python -m benchmarks.figures.tune`` writes docs/_static/benchmarks/tune.svg.

Metric against size, a panel for each task; a point for each trial, a line along the best of each method, and the calls
of pr.compress.
"""

__all__ = ["draw_tune"]

from pathlib import Path
from typing import Any

from benchmarks.figures.layout import by_cpu, panel_grid, save, start

COLOURS = {"tuned": "C0", "random": "C1", "uniform ranks": "C2", "uniform forms": "C4"}
TASKS = ("digits", "retrieval")


def draw_tune(threads: int = 1) -> Path:
    """Draw the figure from the CSVs of the trial; a row of panels for each CPU."""
    runs = {task: by_cpu(f"tune-{task}", threads) for task in TASKS}
    points = {task: by_cpu(f"tune-{task}-trials", threads) for task in TASKS}
    cpus = [cpu for cpu in runs["digits"] if cpu in runs["retrieval"]]
    figure, axes = panel_grid(len(TASKS), len(cpus))
    for cpu, line in zip(cpus, axes, strict=True):
        for task, axis in zip(TASKS, line, strict=True):
            _panel(axis, task, runs[task][cpu], points[task][cpu])
    return save(figure, axes, "tune", dict.fromkeys(cpus, "metric"))


def _panel(axis: Any, task: str, rows: list[dict[str, str]], points: list[dict[str, str]]) -> None:
    for method, colour in COLOURS.items():
        own = [point for point in points if point["method"] == method and point["metric"] not in ("", "nan")]
        sizes, metrics = ([float(point[key]) for point in own] for key in ("size_mb", "metric"))
        axis.plot(sizes, metrics, ".", color=colour, alpha=0.4)
        front: list[tuple[float, float]] = []
        for size, metric in sorted(zip(sizes, metrics, strict=True), key=lambda one: (one[0], -one[1])):
            if not front or metric > front[-1][1]:
                front.append((size, metric))
        axis.plot(
            [one[0] for one in front], [one[1] for one in front], drawstyle="steps-post", color=colour, label=method
        )
    calls = [row for row in rows if row["method"].startswith("compress")]
    axis.plot(
        [float(row["size_mb"]) for row in calls], [float(row["metric"]) for row in calls], "s", color="black",
        markersize=5, label="compress",
    )  # fmt: skip
    (unchanged,) = (row for row in rows if row["method"] == "unchanged")
    bound = 0.99 * float(unchanged["metric"])
    axis.axhline(bound, color="gray", linestyle="--", linewidth=1)
    axis.set(xscale="log", xlabel="MB of the layers", title=task)
    axis.set_ylim(bottom=bound - 0.1, top=float(unchanged["metric"]) + 0.01)
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    start()
    print(draw_tune())

"""Read results by CPU, and lay out figures with a row of panels for each."""

__all__ = ["OUTPUT", "WIDTH", "by_cpu", "merged", "panel_grid", "save", "start", "write"]

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, ROOT, read_csv
from panther.errors import require_extra

WIDTH = 6.6  # inches, of a page's text: wider figures are shrunk, and their text with them
SIDE_BY_SIDE = 2  # panels
OUTPUT = ROOT / "docs" / "_static" / "benchmarks"


def by_cpu(subject: str, threads: int) -> dict[str, list[dict[str, str]]]:
    """Return the rows of a subject by CPU, those with the default settings of the allocator if there are any."""
    found = {}
    for path in sorted(RESULTS.glob(f"{subject}-cpu-*-threads-{threads}.csv")):
        rows = read_csv(path)
        wanted = next((memory for memory in ("default", "kept") if any(row["memory"] == memory for row in rows)), "")
        rows = [row for row in rows if row["memory"] == wanted] if wanted else rows
        found[rows[0]["device"]] = rows
    return found


def merged(subject: str, threads: int, names: tuple[str, ...]) -> tuple[str, list[dict[str, str]]]:
    """Return the CPU that computed most rows last, and its rows, with those of others that it lacks after them.

    ``names`` are the columns by which a row is known; every row has its own CPU under ``device``.
    """
    found = by_cpu(subject, threads)
    order = sorted(found, key=lambda cpu: (max(row["date"] for row in found[cpu]), len(found[cpu])), reverse=True)
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for cpu in order:
        for row in found[cpu]:
            rows.setdefault(tuple(row[name] for name in names), row)
    return order[0], list(rows.values())


def panel_grid(columns: int, rows: int) -> tuple[Any, Any]:
    """Return a figure as wide as a page's text, and its axes, ``(rows, columns)``: two panels side by side."""
    pyplot = require_extra("matplotlib.pyplot", "bench")
    lines = -(-columns // SIDE_BY_SIDE)
    figure = pyplot.figure(figsize=(WIDTH, 2.9 * rows * lines + 0.7), layout="constrained")
    grid = figure.add_gridspec(rows * lines, SIDE_BY_SIDE)
    axes = np.empty((rows, columns), dtype=object)
    for row, column in np.ndindex(rows, columns):
        line, place = divmod(column, SIDE_BY_SIDE)
        axes[row, column] = figure.add_subplot(grid[row * lines + line, place])
    return figure, axes


def save(figure: Any, axes: Any, name: str, labels: dict[str, str]) -> Path:
    """Write the figure with one legend for all panels, that of the first; the labels are those of the rows, by CPU."""
    for (cpu, label), line in zip(labels.items(), axes, strict=True):
        for axis in line[::SIDE_BY_SIDE]:
            axis.set_ylabel("\n".join(part for part in (cpu, label) if part))
    handles, entries = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, entries, loc="outside lower center", ncols=min(len(entries), 3), frameon=False, fontsize=9)
    return write(figure, name)


def write(figure: Any, name: str) -> Path:
    """Write the figure as docs/_static/benchmarks/NAME.svg and close it."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    require_extra("matplotlib.pyplot", "bench").close(figure)
    return path


def start() -> None:
    """Prepare matplotlib to draw without a screen, so that the same figure is the same file."""
    matplotlib = require_extra("matplotlib", "bench")
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "panther"

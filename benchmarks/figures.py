"""Read results by CPU, and lay out figures with a row of panels for each."""

__all__ = ["OUTPUT", "by_cpu", "merged", "panel_grid", "save"]

from pathlib import Path
from typing import Any

from harness import RESULTS, read_csv

from panther.errors import require_extra

OUTPUT = Path(__file__).parents[1] / "docs" / "_static" / "benchmarks"


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
    """Return a figure and its axes, ``(rows, columns)``."""
    pyplot = require_extra("matplotlib.pyplot", "bench")
    size = (3.4 * columns + 0.6, 3.2 * rows + 0.4)
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def save(figure: Any, axes: Any, name: str, labels: dict[str, str]) -> Path:
    """Write the figure with one legend for all panels, that of the first; the labels are those of the rows, by CPU."""
    for (cpu, label), line in zip(labels.items(), axes, strict=True):
        line[0].set_ylabel("\n".join(text for text in (cpu, label) if text))
    handles, entries = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, entries, loc="outside lower center", ncols=min(len(entries), 4), frameon=False)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    require_extra("matplotlib.pyplot", "bench").close(figure)
    return path

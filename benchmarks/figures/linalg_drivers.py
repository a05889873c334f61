"""Draw and tabulate the drivers of linear algebra: ``python -m benchmarks.figures.linalg_drivers``.

The figure has a panel for each problem, with error against time; the table goes to docs/benchmarks/linalg-drivers.inc.
"""

__all__ = ["draw_drivers", "drivers_table"]

import csv
import io
import textwrap
from itertools import groupby
from pathlib import Path

from benchmarks.figures.layout import by_cpu, panel_grid, start, write
from benchmarks.harness import ROOT
from panther.errors import require_extra

PAGE = ROOT / "docs" / "benchmarks" / "linalg-drivers.inc"
_OURS, _OTHERS = ("#D55E00", "#E69F00", "#CC79A7"), ("#0072B2", "#009E73", "#000000", "#56B4E9")
_PANTHER = (
    "StreamingSVD", "randomized_svd", "randomized_eigh", "nystrom", "interpolative", "rp_cholesky", "pcg", "trace",
    "diag", "sketch_lstsq",
)  # fmt: skip
_SMALLEST = 1e-16  # errors below are drawn here


def _problems() -> list[list[dict[str, str]]]:
    (rows,) = by_cpu("linalg-drivers", 1).values()
    return [list(problem) for _, problem in groupby(rows, lambda row: row["problem"])]


def draw_drivers() -> Path:
    """Draw error against time, Panther's drivers as dots and the other ways as squares."""
    problems = _problems()
    figure, axes = panel_grid(len(problems), 1)
    figure.set_figheight(1.15 * figure.get_figheight())  # The legends need room between panels.
    ticker = require_extra("matplotlib.ticker", "bench")
    for rows, axis in zip(problems, axes[0], strict=True):
        colours = {True: iter(_OURS), False: iter(_OTHERS)}
        for row in rows:
            is_ours = row["method"].startswith(_PANTHER)
            axis.plot(
                float(row["time_ms"]),
                max(float(row["error"]), _SMALLEST),
                "o" if is_ours else "s",
                color=next(colours[is_ours]),
                label=row["method"],
                markersize=6,
            )
        axis.set(xscale="log", yscale="log", xlabel="time, ms", ylabel=rows[0]["measure"])
        axis.set_title("\n".join(textwrap.wrap(rows[0]["problem"], 40)), fontsize=9)
        axis.margins(x=0.15, y=0.15)
        axis.grid(alpha=0.3)
        # Below the panel, because a legend inside it would cover points.
        axis.legend(fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False)
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    return write(figure, "linalg-drivers")


def drivers_table() -> str:
    """Return the rows as a table."""
    table = io.StringIO()
    lines = csv.writer(table, lineterminator="\n")
    lines.writerow(["Problem", "Method", "Times ours", "Error"])
    for rows in _problems():
        for number, row in enumerate(rows):
            problem = "" if number else f"{row['problem']}: {row['measure']}"
            lines.writerow([problem, row["method"], row["x panther"], row["error"]])
    head = [".. csv-table::", "   :header-rows: 1", "   :class: lookup", "   :widths: 40 34 12 14", ""]
    return "\n".join([*head, *(f"   {line}" for line in table.getvalue().splitlines())]) + "\n"


if __name__ == "__main__":
    start()
    print(draw_drivers())
    PAGE.write_text(
        f".. Written by python -m benchmarks.figures.linalg_drivers.\n\n{drivers_table()}", encoding="utf-8"
    )
    print(PAGE)

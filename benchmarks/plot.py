"""Draw error against time from the results: ``python benchmarks/plot.py`` writes docs/_static/benchmarks/*.svg.

Methods of one family, the same code with another parameter, share a colour and are joined by a line.
"""

__all__ = ["draw"]

import csv
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from harness import RESULTS

from panther.errors import require_extra

OUTPUT = Path(__file__).parents[1] / "docs" / "_static" / "benchmarks"


@dataclass(frozen=True)
class Plot:
    """One figure: a panel for each combination of values of ``panels``, a point for each method.

    Attributes:
        subject: Of the CSV file.
        panels: Columns whose values tell the panels apart.
        method: Column that names the method; what follows a family's name is its parameter.
        error: Column of the ordinate.
        label: Of the ordinate.
        families: Beginnings of the methods' names that are drawn, with their label.
        offset: Subtracted from the error, where it is a ratio to the least possible one.
        floor: Smallest error that the file can tell from none.
        only: Columns and the values that rows must have.
        cases: Most panels, the first ones of the file.
        left_out: Methods that are not drawn.
    """

    subject: str
    panels: tuple[str, ...]
    method: str
    error: str
    label: str
    families: dict[str, str]
    offset: float = 0.0
    floor: float = 1e-16
    only: tuple[tuple[str, str], ...] = ()
    cases: int = 4
    left_out: tuple[str, ...] = ()


PLOTS = [
    Plot(
        "sketch",
        ("d", "dtype"),
        "sketch",
        "distortion_coherent",
        "distortion of coherent columns",
        {
            "dense product": "signs",
            "Gaussian": "Gaussian",
            "SJLT, vec_nnz 2": "SJLT, 2",
            "SJLT, vec_nnz 4": "SJLT, 4",
            "SJLT, vec_nnz 8": "SJLT, 8",
            "CountSketch": "CountSketch",
            "SRHT": "SRHT",
        },
        only=(("m", "65536"),),
    ),
    Plot(
        "randomized-svd",
        ("spectrum",),
        "method",
        "frobenius",
        "Frobenius error over the least, less 1",
        {"panther": "randomized_svd", "svd_lowrank": "torch.svd_lowrank", "sklearn": "scikit-learn"},
        offset=1.0,
        floor=1e-5,
        left_out=("panther n_iter=0",),  # it ran after scikit-learn, whose threads were still spinning
    ),
    Plot(
        "cqrrpt",
        ("m", "n"),
        "method",
        "orthogonality",
        "loss of orthogonality",
        {
            "panther": "cqrrpt, gamma from 1 to 3",
            "scipy pivoted": "scipy, pivoted",
            "torch unpivoted": "torch, unpivoted",
        },
        only=(("dtype", "float64"), ("n", "512")),
        cases=3,
    ),
    Plot(
        "lstsq",
        ("case",),
        "method",
        "distance",
        "distance of A x from the best",
        {
            "panther": "sketch_lstsq, by tol",
            "scipy gelsd": "scipy.linalg.lstsq",
            "torch gelsy": "torch.linalg.lstsq",
            "torch gels": "torch, gels",
            "scipy lsqr": "scipy LSQR",
        },
        cases=3,
    ),
]


def draw(plot: Plot, threads: int) -> Path:
    """Draw one figure from the results for so many threads; returns the file."""
    pyplot = require_extra("matplotlib.pyplot", "bench")
    NullFormatter = require_extra("matplotlib.ticker", "bench").NullFormatter
    with open(RESULTS / f"{plot.subject}-cpu-threads-{threads}.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in plot.only)]
    panels = list(dict.fromkeys(tuple(row[key] for key in plot.panels) for row in rows))[: plot.cases]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.4 * len(panels) + 0.6, 3.6), squeeze=False, layout="constrained"
    )
    for panel, axis in zip(panels, axes[0], strict=True):
        points = defaultdict(list)
        for row in rows:
            family = next((name for name in plot.families if row[plot.method].startswith(name)), None)
            if (
                family
                and row[plot.method] not in plot.left_out
                and row[plot.error]
                and tuple(row[key] for key in plot.panels) == panel
            ):
                points[family].append((float(row["time_ms"]), float(row[plot.error]) - plot.offset))
        for family, found in points.items():
            times, errors = zip(*sorted(found), strict=True)
            axis.plot(
                times, [max(error, plot.floor) for error in errors], "o-", label=plot.families[family], markersize=5
            )
        axis.set(xscale="log", yscale="log", xlabel="time, ms")
        axis.set_title(
            ", ".join(
                value if key == "case" else f"{key} {value}" for key, value in zip(plot.panels, panel, strict=True)
            ),
            fontsize=10,
        )
        axis.grid(alpha=0.3, which="both")
        axis.xaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].set_ylabel(plot.label)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{plot.subject}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    matplotlib = require_extra("matplotlib", "bench")
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "panther"  # the same figure is the same file
    for wanted in PLOTS:
        print(draw(wanted, int(sys.argv[1]) if len(sys.argv) > 1 else 2))

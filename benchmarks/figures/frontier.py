"""Draw compression: ``python -m benchmarks.figures.frontier`` writes docs/_static/benchmarks/frontier*.svg.

*frontier*: quality of the sentence encoder against bits a weight on the left, and against the fraction of the numbers
on the right, where layers stay in float32 and get faster. *frontier-models*: the same of the other models. Rows below
the lower end of a panel are left out.
"""

__all__ = ["BITS", "QUANTIZED", "draw_correlation", "draw_encoder", "draw_models", "pairs_ranked_differently"]

import math
from pathlib import Path
from typing import Any

from benchmarks.figures.layout import WIDTH, merged, start, write
from benchmarks.harness import RESULTS
from panther.errors import require_extra

Rows = list[dict[str, str]]
# Label and style of each method, the first drawn last; the colours are those of M. Okabe and K. Ito, which differ for
# everybody, and markers differ too.
QUANTIZED = {
    "panther + healing": ("pr.compress, then healed (distillation without labels)", "*", "#000000", "--"),
    "panther": ("pr.compress: the best form for every layer", "o", "#D55E00", "-"),
    "GPTQ": ("one width everywhere, with error feedback (GPTQ)", "s", "#0072B2", "-"),
    "nearest": ("one width everywhere, rounded to nearest", "v", "#666666", "-"),
    "low rank, int8": ("pr.compress: low rank only, by two factors", "^", "#E69F00", "-"),
    "SVD, int8": ("truncated SVD", "X", "#CC79A7", "-"),
}
LOW_RANK = {
    "pivot rows + healing": QUANTIZED["panther + healing"],
    "pivot rows": ("pr.compress: low rank only, by pivot rows", "D", "#009E73", "-"),
    "low rank": QUANTIZED["low rank, int8"],
    "SVD": QUANTIZED["SVD, int8"],
}
BITS = ("bits", "bits a weight (dense: 32)", (2.9, 8.4))
KEPT = ("kept", "fraction of the numbers (float32)", (0.2, 0.8))
PANELS: tuple[tuple[str, str, Any, tuple[str, str, tuple[float, float]], float], ...] = (
    ("encoder-3", "paraphrase-MiniLM-L3-v2:\nsimilarities", QUANTIZED, BITS, 0.85),
    ("encoder-3", "paraphrase-MiniLM-L3-v2:\nsimilarities", LOW_RANK, KEPT, 0.5),
    ("images", "EfficientNet-lite0:\nlogits on photographs", QUANTIZED, BITS, 0.5),
    ("images", "EfficientNet-lite0:\nlogits on photographs", LOW_RANK, KEPT, 0.3),
    ("smollm2", "SmolLM2-135M, rounded to 4 bits before:\ntext", LOW_RANK, KEPT, 0.0),
)
_TICKS = (2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)  # 1 in so many pairs


def draw_encoder(device: str, rows: Rows) -> Path:
    """Draw both panels of the sentence encoder."""
    figure, (left, right) = _panels(1, 2)
    draw_correlation(left, rows, QUANTIZED, BITS, 0.85)
    left.set_title("smaller: quantized forms", fontsize=10)
    left.set_ylabel("pairs ranked differently")
    draw_correlation(right, rows, LOW_RANK, KEPT, 0.5)
    right.set_title("faster: low rank in float32", fontsize=10)
    figure.suptitle(
        "all-MiniLM-L6-v2, its 36 linear layers compressed: of two pairs of held-out sentences,\n"
        "how often the more similar one is another than in the original model\n"
        f"(higher in the figure is better). {device}",
        fontsize=9,
    )
    return _save(figure, "frontier")


def draw_models(found: dict[str, Rows]) -> Path:
    """Draw the other models, a panel for each of their tables."""
    drawn = [panel for panel in PANELS if any(row["method"] in panel[2] for row in found.get(panel[0], []))]
    figure, axes = _panels(-(-len(drawn) // 2), 2)
    for axis, (name, title, styles, measure, lowest_score) in zip(axes, drawn, strict=False):
        axis.set_title(title, fontsize=10)
        if name == "smollm2":
            _draw_loss(axis, found[name], styles, measure)
        else:
            draw_correlation(axis, found[name], styles, measure, lowest_score)
            axis.set_ylabel("pairs ranked differently")
    for axis in axes[len(drawn) :]:
        axis.remove()
    return _save(figure, "frontier-models")


def _panels(rows: int, columns: int) -> tuple[Any, Any]:
    pyplot = require_extra("matplotlib.pyplot", "bench")
    size = (WIDTH, 3.1 * rows + 1.6)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return figure, axes.flatten()


def _draw_loss(axis: Any, rows: Rows, styles: Any, measure: tuple[str, str, tuple[float, float]]) -> None:
    column, label, _ = measure
    for method, (name, marker, colour, line) in reversed(styles.items()):
        points = sorted((float(row[column]), float(row["loss"])) for row in rows if row["method"] == method)
        if points:
            axis.plot(*zip(*points, strict=True), line, marker=marker, color=colour, label=name, markersize=6)
    (original,) = (float(row["loss"]) for row in rows if row["method"] == "original")
    axis.axhline(original, color="black", linestyle=":", label="the original model")
    axis.set(xlabel=label, ylabel="loss, nats a token (lower is better)")
    axis.grid(alpha=0.3)


def pairs_ranked_differently(correlation: float) -> float:
    """Return the share of pairs of scores that two models rank differently, from the correlation of their scores.

    It is arccos(r) / pi if the scores are normally distributed: Kendall's tau is then 2 / pi arcsin(r), and the share
    is (1 - tau) / 2.
    """
    return math.acos(correlation) / math.pi


def draw_correlation(
    axis: Any, rows: Rows, styles: Any, measure: tuple[str, str, tuple[float, float]], lowest_score: float
) -> None:
    """Draw correlations as the share of pairs that are ranked differently, on a logarithmic scale; fewer is higher."""
    column, label, limits = measure
    highest_share = pairs_ranked_differently(lowest_score)
    for method, (name, marker, colour, line) in reversed(styles.items()):
        points = sorted(
            (float(row[column]), pairs_ranked_differently(float(row["correlation"])))
            for row in rows
            if row["method"] == method
        )
        shown = [(x, share) for x, share in points if 0 < share < highest_share]
        if shown:
            axis.plot(*zip(*shown, strict=True), line, marker=marker, color=colour, label=name, markersize=6)
    axis.set_yscale("log")
    lowest_share = axis.get_ylim()[0] / 1.1
    axis.set_ylim(highest_share, lowest_share)  # upside down: better is higher
    ticker = require_extra("matplotlib.ticker", "bench")
    axis.yaxis.set_major_locator(
        ticker.FixedLocator([1 / pairs for pairs in _TICKS if lowest_share <= 1 / pairs <= highest_share])
    )
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda share, _: f"1 in {1 / share:.0f}"))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlim(*limits)
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)


def _save(figure: Any, name: str) -> Path:
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels[::-1], handles[::-1], strict=True))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    return write(figure, name)


if __name__ == "__main__":
    start()
    files = sorted({path.name.partition("-cpu-")[0] for path in RESULTS.glob("frontier-*-cpu-*.csv")})
    subjects = [name for name in files if "-speed" not in name]
    found = {name.removeprefix("frontier-"): merged(name, 1, ("method", "size")) for name in subjects}
    if "encoder" in found:
        print(draw_encoder(*found["encoder"]))
    others = {name: rows for name, (_, rows) in found.items() if name != "encoder"}
    if others:
        print(draw_models(others))

"""Draw the trial of compression: ``python benchmarks/plot_frontier.py`` writes docs/_static/benchmarks/frontier*.svg.

*frontier*: quality of the sentence encoder against bits a weight on the left, and against the fraction of the
parameters on the right, where layers stay in float32 and get faster. *frontier-models*: the same of the other models.
"""

__all__ = ["draw_encoder", "draw_models"]

from pathlib import Path
from typing import Any

from figures import OUTPUT, by_cpu
from harness import RESULTS

from panther.errors import require_extra

Rows = list[dict[str, str]]
QUANTIZED = {  # label and style of each method, the first drawn last
    "panther + healing": ("pr.compress, then healed: 500 steps of distillation", "*", "C3", "--"),
    "panther": ("pr.compress: the best form for every layer", "o", "C3", "-"),
    "GPTQ": ("one width everywhere, with error feedback (GPTQ)", "s", "C0", "-"),
    "nearest": ("one width everywhere, rounded to nearest", "v", "C7", "-"),
    "low rank, int8": ("pr.compress: low rank in 8 bits only", "^", "C1", "-"),
    "SVD, int8": ("truncated SVD in 8 bits", "x", "C5", "-"),
}
LOW_RANK = {
    "pivot rows + healing": ("pr.compress, then healed: 500 steps of distillation", "*", "C3", "--"),
    "pivot rows": ("pr.compress: low rank by pivot rows (interpolative)", "D", "C2", "-"),
    "low rank": ("pr.compress: low rank by two factors", "^", "C1", "-"),
    "SVD": ("truncated SVD", "x", "C5", "-"),
}


def draw_encoder(device: str, rows: Rows) -> Path:
    """Draw both panels of the sentence encoder."""
    figure, (left, right) = _panels(2)
    _draw_correlation(left, rows, QUANTIZED, "bits", "bits a weight, scales and factors included (dense: 32)", 0.85)
    left.set_xlim(2.9, 8.4)
    left.set_title("smaller: quantized forms", fontsize=10)
    left.set_ylabel("correlation with the original")
    _draw_correlation(right, rows, LOW_RANK, "kept", "fraction of the parameters (float32)", 0.5)
    right.set_xlim(0.2, 0.8)
    right.set_title("faster: low rank in float32", fontsize=10)
    figure.suptitle(
        "all-MiniLM-L6-v2, its 36 linear layers compressed: how the cosine similarities of 130,816 pairs of held-out\n"
        f"sentences correlate with the original model's (1 is the original; higher is better). {device}",
        fontsize=10,
    )
    return _save(figure, "frontier")


def draw_models(found: dict[str, Rows]) -> Path:
    """Draw the other models, a panel each."""
    drawn: dict[str, tuple[str, Any]] = {
        "encoder-3": ("paraphrase-MiniLM-L3-v2", QUANTIZED),
        "smollm2": ("SmolLM2-135M, already rounded to 4 bits", LOW_RANK),
        "images": ("EfficientNet-lite0 on photographs", LOW_RANK),
    }
    names = [name for name in drawn if name in found]
    figure, axes = _panels(len(names))
    for axis, name in zip(axes, names, strict=True):
        title, styles = drawn[name]
        axis.set_title(title, fontsize=10)
        if name == "smollm2":
            for method, (label, marker, colour, line) in styles.items():
                points = sorted(
                    (float(row["kept"]), float(row["loss"])) for row in found[name] if row["method"] == method
                )
                if points:
                    axis.plot(*zip(*points, strict=True), line, marker=marker, color=colour, label=label, markersize=5)
            (original,) = (float(row["loss"]) for row in found[name] if row["method"] == "original")
            axis.axhline(original, color="black", linestyle=":", label="original")
            axis.set(xlabel="fraction of the parameters", ylabel="loss, nats a token", yscale="log")
            axis.grid(alpha=0.3, which="both")
        elif styles is QUANTIZED:
            _draw_correlation(axis, found[name], styles, "bits", "bits a weight", 0.85)
            axis.set_xlim(2.9, 8.4)
            axis.set_ylabel("correlation of the similarities")
        else:
            _draw_correlation(axis, found[name], styles, "kept", "fraction of the parameters", 0.6)
            axis.set_ylabel("correlation of the logits")
    return _save(figure, "frontier-models")


def _panels(count: int) -> tuple[Any, Any]:
    pyplot = require_extra("matplotlib.pyplot", "bench")
    size = (10, 5) if count == 2 else (3.6 * count + 0.4, 4)
    figure, axes = pyplot.subplots(1, count, figsize=size, squeeze=False, layout="constrained")
    return figure, axes[0]


def _draw_correlation(axis: Any, rows: Rows, styles: Any, column: str, label: str, least: float) -> None:
    """Draw correlations on a scale that ends in 1: a tenth of what is missing is a step."""
    for method, (name, marker, colour, line) in reversed(styles.items()):
        points = sorted((float(row[column]), 1 - float(row["correlation"])) for row in rows if row["method"] == method)
        shown = [(x, lost) for x, lost in points if lost < 1 - least]
        if shown:
            axis.plot(*zip(*shown, strict=True), line, marker=marker, color=colour, label=name, markersize=6)
    ticks = [
        tick
        for tick in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
        if tick >= least
    ]
    axis.set_yscale("log")
    axis.set_ylim(1 - least, min(axis.get_ylim()[0], 1 - ticks[-2]))  # upside down: better is higher
    ticker = require_extra("matplotlib.ticker", "bench")
    low = axis.get_ylim()[1]
    axis.yaxis.set_major_locator(ticker.FixedLocator([1 - tick for tick in ticks if 1 - tick >= low]))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda lost, _: f"{1 - lost:g}"[:6]))
    axis.yaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)


def _save(figure: Any, name: str) -> Path:
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels[::-1], handles[::-1], strict=True))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


if __name__ == "__main__":
    matplotlib = require_extra("matplotlib", "bench")
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "panther"  # the same figure is the same file
    files = sorted({path.name.partition("-cpu-")[0] for path in RESULTS.glob("frontier-*-cpu-*.csv")})
    subjects = [name for name in files if "-speed" not in name]
    found = {name.removeprefix("frontier-"): next(iter(by_cpu(name, 1).items())) for name in subjects}
    if "encoder" in found:
        print(draw_encoder(*found["encoder"]))
    others = {name: rows for name, (_, rows) in found.items() if name != "encoder"}
    if others:
        print(draw_models(others))

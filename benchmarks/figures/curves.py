"""Draw errors from the results: ``python -m benchmarks.figures.curves`` writes docs/_static/benchmarks/*.svg.

Error against time: methods of one family, the same code with another parameter, share a colour and are joined by a
line. Error of attention against the number of features. What compressed models keep,
against their size. Losses of the trial of panther train over the steps. A figure has a row of panels for each CPU that
there are results of; of results with several settings of the allocator, those with the default settings are drawn.
"""

__all__ = ["draw", "draw_attention", "draw_compress", "draw_sklinear", "draw_training"]

import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures.layout import by_cpu, panel_grid, save, start
from panther.errors import require_extra


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
        threads: Of the results that are drawn; None are those of the command line.
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
    threads: int | None = None


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
        threads=1,
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
    found = {
        cpu: [row for row in rows if all(row[key] == value for key, value in plot.only)]
        for cpu, rows in by_cpu(plot.subject, threads).items()
    }
    first = next(iter(found.values()))
    panels = list(dict.fromkeys(tuple(row[key] for key in plot.panels) for row in first))[: plot.cases]
    figure, axes = panel_grid(len(panels), len(found))
    for rows, line in zip(found.values(), axes, strict=True):
        for panel, axis in zip(panels, line, strict=True):
            _draw_panel(axis, plot, panel, [row for row in rows if tuple(row[key] for key in plot.panels) == panel])
    return save(figure, axes, plot.subject, {cpu: plot.label for cpu in found})


def _draw_panel(axis: Any, plot: Plot, panel: tuple[str, ...], rows: list[dict[str, str]]) -> None:
    points = defaultdict(list)
    for row in rows:
        family = next((name for name in plot.families if row[plot.method].startswith(name)), None)
        if family and row[plot.error]:
            points[family].append((float(row["time_ms"]), float(row[plot.error]) - plot.offset))
    for family, found in points.items():
        times, errors = zip(*sorted(found), strict=True)
        axis.plot(times, [max(error, plot.floor) for error in errors], "o-", label=plot.families[family], markersize=5)
    axis.set(xscale="log", yscale="log", xlabel="time, ms")
    title = (value if key == "case" else f"{key} {value}" for key, value in zip(plot.panels, panel, strict=True))
    axis.set_title(", ".join(title).replace(", condition", "\ncondition"), fontsize=9)
    axis.grid(alpha=0.3, which="both")
    axis.xaxis.set_minor_formatter(require_extra("matplotlib.ticker", "bench").NullFormatter())


def draw_attention(threads: int = 1) -> Path:
    """Draw the error of attention maps against their features: flat, peaked and trained attention."""
    cases = [
        ("fresh, weights x 1", "False", "freshly initialised"),
        ("fresh, weights x 2", "False", "weights twice as large"),
        ("trained, layer 1", "True", "a trained model's second layer, causal"),
    ]
    found = by_cpu("attention-error", threads)
    figure, axes = panel_grid(len(cases), len(found))
    for rows, line in zip(found.values(), axes, strict=True):
        for axis, (data, causal, title) in zip(line, cases, strict=True):
            kept = [row for row in rows if (row["data"], row["length"], row["causal"]) == (data, "256", causal)]
            _draw_attention_errors(axis, kept)
            axis.set(xscale="log", yscale="log", xlabel="features", title=title)
            axis.title.set_fontsize(10)
            axis.grid(alpha=0.3, which="both")
    return save(figure, axes, "attention-error", {cpu: "relative error of the attention" for cpu in found})


def _draw_attention_errors(axis: Any, rows: list[dict[str, str]]) -> None:
    labels = {"softmax": "softmax (FAVOR+)"}
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        points = [(row["features"], float(row["rel_error"])) for row in rows if row["kernel"] == kernel]
        if kernel == "mean of the values":
            axis.axhline(points[0][1], color="black", linestyle="--", label=kernel)
        elif kernel == "taylor":
            axis.axhline(points[0][1], color="tab:gray", linestyle=":", label="taylor, 561 features")
        else:
            features = [int(m) for m, _ in points]
            axis.plot(features, [error for _, error in points], "o-", label=labels.get(kernel, kernel), markersize=5)


def draw_compress(threads: int = 1) -> Path:
    """Draw what compressed models keep of their task, by method, against the kept fraction of their layers' numbers."""
    shown = [
        ("compress-encoder", "loss", "held-out loss of a language model"),
        ("compress-encoder", "kl", "its divergence from the original, nats"),
        ("compress-digits", "accuracy", "accuracy on digits"),
    ]
    found = {subject: by_cpu(subject, threads) for subject, _, _ in shown}
    cpus = [cpu for cpu in found["compress-encoder"] if cpu in found["compress-digits"]]
    figure, axes = panel_grid(len(shown), len(cpus))
    for cpu, line in zip(cpus, axes, strict=True):
        for axis, (subject, column, title) in zip(line, shown, strict=True):
            _draw_kept(axis, found[subject][cpu], column)
            axis.set(xlabel="kept fraction of the layers' numbers", title=title)
            axis.title.set_fontsize(10)
            axis.grid(alpha=0.3, which="both")
    return save(figure, axes, "compress", dict.fromkeys(cpus, ""))


def _draw_kept(axis: Any, rows: list[dict[str, str]], column: str) -> None:
    labels = {
        "random": "random",
        "svd": "svd",
        "activation": "activation",
        "two_sided": "two_sided",
        "two_sided + heal": "two_sided + heal",
        "dense twin": "dense, trained at this size",
    }
    values = {method: [row for row in rows if row["method"] == method] for method in labels}
    for method, label in labels.items():
        points = [(float(row["kept"]), max(float(row[column]), 1e-4)) for row in values[method]]
        style = {"color": "gray", "marker": "s"} if method == "dense twin" else {"marker": "o"}
        axis.plot(*zip(*sorted(points), strict=True), label=label, markersize=5, **style)
    (original,) = (float(row[column]) for row in rows if row["method"] == "original")
    if column == "kl":
        axis.set_yscale("log")
        return
    axis.axhline(original, color="black", linestyle="--", label="original")
    if column == "loss":
        axis.set_ylim(0.97 * original, 1.5 * original)
        lowest = math.floor(min(float(row[column]) for row in values["random"]))
        place = {"transform": axis.transAxes, "ha": "right", "va": "top"}
        axis.text(0.97, 0.97, f"random: above {lowest}", fontsize=9, **place)


def draw_training(threads: int = 1) -> Path:
    """Draw the losses of the sketched transformer and its dense twin, and those of the same run in other layouts."""
    found = by_cpu("train-text-curves", threads)
    figure, axes = panel_grid(2, len(found))
    for rows, line in zip(found.values(), axes, strict=True):
        _draw_losses(line[0], line[1], rows)
        for axis in line:
            axis.grid(alpha=0.3)
            axis.title.set_fontsize(10)
    return save(figure, axes, "train-text", {cpu: "nats a character" for cpu in found})


def _draw_losses(whole: Any, layouts: Any, rows: list[dict[str, str]]) -> None:
    for run, colour in (("sketched, killed twice", "C0"), ("dense", "C1")):
        here = [row for row in rows if row["run"] == run]
        kind = run.partition(",")[0]
        for column, style in (("loss", "-"), ("validation_loss", "o")):
            found = [(int(row["step"]), float(row[column])) for row in here if row[column]]
            label = kind if column == "loss" else f"{kind}, held out"
            whole.plot(*zip(*found, strict=True), style, color=colour, label=label, markersize=4)
    whole.set(xlabel="step", title="two processes, ddp")
    last = max(int(row["step"]) for row in rows if row["run"].startswith("sketched, fsdp"))
    for run, style in (("sketched, killed twice", "-"), ("sketched, fsdp", "x"), ("sketched, pp = 2", "+")):
        here = [row for row in rows if row["run"] == run and row["loss"] and int(row["step"]) <= last]
        steps, losses = [int(row["step"]) for row in here], [float(row["loss"]) for row in here]
        layouts.plot(steps, losses, style, label=run.partition(", ")[2].replace("killed twice", "ddp"))
    layouts.set(xlabel="step", title="sketched, in three layouts")
    layouts.legend(frameon=False)


_SERIES = [("SKLinear", "forward", "o-"), ("SKLinear, fused", "forward", "^:"), ("SKLinear", "forward+backward", "s--")]


def draw_sklinear(threads: int = 1) -> Path:
    """Draw how SKLinear's time compares to the optimum's, by batch."""
    found = by_cpu("sklinear", threads)
    figure, axes = panel_grid(3, len(found))
    for rows, line in zip(found.values(), axes, strict=True):
        own = [row for row in rows if row["width"] != "64"]  # that one shows overhead
        for width, axis in zip(dict.fromkeys(row["width"] for row in own), line, strict=True):
            here = [row for row in own if row["width"] == width]
            for dtype, colour in (("float32", "C0"), ("bfloat16", "C1")):
                for layer, mode, style in _SERIES:
                    wanted = (dtype, layer, mode)
                    points = [row for row in here if (row["dtype"], row["layer"], row["mode"]) == wanted]
                    ratios = [float(row["x optimum"]) for row in points]
                    batches = [int(row["batch"]) for row in points]
                    axis.plot(
                        batches,
                        ratios,
                        style,
                        color=colour,
                        label=f"{dtype}, {mode}{layer.removeprefix('SKLinear')}",
                        markersize=4,
                    )
            axis.set(xscale="log", xlabel="batch", ylim=(0, 1.3))
            axis.set_title(f"width {width}, R = {here[0]['R']}", fontsize=10)
            axis.grid(alpha=0.3)
    return save(figure, axes, "sklinear", {cpu: "times the optimum" for cpu in found})


if __name__ == "__main__":
    start()
    for wanted in PLOTS:
        print(draw(wanted, wanted.threads or (int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
    print(draw_attention())
    print(draw_compress())
    print(draw_training())
    print(draw_sklinear())

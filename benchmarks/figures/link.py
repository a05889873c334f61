"""Draw the trial of a slow link: ``python -m benchmarks.figures.link`` writes docs/_static/benchmarks/*link*.svg.

*link-loss*: losses against time over each link. *link-steps*: seconds a step and bytes sent.
"""

__all__ = ["STYLES", "draw_losses", "draw_scale", "draw_steps"]

from pathlib import Path
from typing import Any

from benchmarks.figures.layout import WIDTH, by_cpu, start, write
from panther.errors import require_extra

Rows = list[dict[str, str]]
LINKS = ("100 Mbit/s", "1 Gbit/s", "unlimited")
# Label, marker, colour and line: the colours are those of M. Okabe and K. Ito, which differ for everybody.
STYLES = {
    "dense, ddp": ("dense, ddp", "s", "#0072B2", "-"),
    "dense, ddp, PowerSGD": ("dense, ddp with PowerSGD", "v", "#56B4E9", "-"),
    "sketched, ddp": ("sketched, ddp", "o", "#D55E00", "-"),
    "sketched, ddp, bf16 hook": ("sketched, ddp with bf16 hook", "*", "#000000", "-"),
    "dense, fsdp": ("dense, fsdp", "P", "#0072B2", "--"),
    "sketched, fsdp": ("sketched, fsdp", "D", "#D55E00", "--"),
    "dense, tp": ("dense, tp", "X", "#0072B2", ":"),
    "sketched, tp": ("sketched, tp", "^", "#D55E00", ":"),
}
FIRST = tuple(STYLES)[:4]
_AVERAGED = 3  # points of a curve, whose losses are means of a few steps


def draw_losses(device: str, curves: Rows) -> Path:
    """Draw losses over time: data parallelism on the left, sharded parameters and tensor parallelism on the right."""
    pyplot = require_extra("matplotlib.pyplot", "bench")
    figure, axes = pyplot.subplots(
        len(LINKS), 2, figsize=(WIDTH, 8.4), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for column, runs in zip(axes.T, (FIRST, tuple(STYLES)[4:]), strict=True):
        for axis, link in zip(column, LINKS, strict=True):
            for run in runs:
                points = [row for row in curves if (row["link"], row["run"]) == (link, run)]
                label, _, colour, dash = STYLES[run]
                seconds, losses = [float(row["s"]) for row in points], [float(row["loss"]) for row in points]
                axis.plot(seconds, _smooth(losses), dash, color=colour, label=label)
            axis.set(xlim=(0, 90), ylim=(1.9, 3.6))
            axis.grid(alpha=0.3)
        column[0].legend(frameon=False, fontsize=9)
        column[-1].set_xlabel("seconds")
    for axis, link in zip(axes[:, 0], LINKS, strict=True):
        axis.set_ylabel(f"{link}\nloss, nats a character")
    figure.suptitle(f"Two nodes, one process each. {device}", fontsize=10)
    return write(figure, "link-loss")


def _smooth(values: list[float]) -> list[float]:
    windows = [values[max(0, i + 1 - _AVERAGED) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def draw_steps(device: str, rows: Rows) -> Path:
    """Draw seconds a step and bytes a step of every run over every link."""
    pyplot = require_extra("matplotlib.pyplot", "bench")
    figure, (steps, sent) = pyplot.subplots(2, 1, figsize=(WIDTH, 7.6), layout="constrained", height_ratios=(3, 2))
    for place, (run, (label, marker, colour, dash)) in enumerate(STYLES.items()):
        here = {row["link"]: row for row in rows if row["run"] == run}
        _draw_range(steps, here, place, label, marker, colour, dash)
        sent.barh(place, float(here["100 Mbit/s"]["sent_bytes"]) / 1e6, color=colour, alpha=0.5 if dash != "-" else 0.9)
    steps.set(yscale="log", ylabel="seconds a step")
    steps.set_xticks(range(len(LINKS)), LINKS)
    steps.grid(alpha=0.3, which="both", axis="y")
    sent.set_yticks(range(len(STYLES)), [label for label, *_ in STYLES.values()])
    sent.invert_yaxis()
    sent.set(xscale="log", xlabel="MB a step that a node sends, by its interface's counter")
    sent.grid(alpha=0.3, axis="x", which="both")
    figure.legend(*steps.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=9, ncols=3)
    steps.set_title(f"medians of three rounds, bars to the fastest. {device}", fontsize=10)
    return write(figure, "link-steps")


def draw_scale(device: str, rows: Rows, predicted: Rows) -> Path:
    """Draw the advisor's seconds a step for more devices, and what the trial measured on two."""
    pyplot = require_extra("matplotlib.pyplot", "bench")
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 4.8), sharey=True, layout="constrained")
    for axis, link in zip(axes, LINKS, strict=False):
        for run in ("dense, ddp", "sketched, ddp", "dense, fsdp", "sketched, fsdp"):
            label, marker, colour, dash = STYLES[run]
            here = [row for row in predicted if (row["link"], row["run"]) == (link, run)]
            devices, seconds = [int(row["devices"]) for row in here], [float(row["step_ms"]) / 1e3 for row in here]
            axis.plot(devices, seconds, dash, color=colour, label=f"{label}, predicted")
            (measured,) = (float(row["step_ms"]) / 1e3 for row in rows if (row["link"], row["run"]) == (link, run))
            axis.plot([2], [measured], marker, color=colour, markersize=7, label=f"{label}, measured on two")
        axis.axvspan(2.3, 5500, color="#888888", alpha=0.08)
        axis.text(5000, 0.16, "extrapolated", ha="right", color="#555555")
        axis.set(xscale="log", yscale="log", xlabel="nodes of one device each", xlim=(1.7, 5500))
        axis.set_xticks((2, 8, 64, 512, 4096), ("2", "8", "64", "512", "4,096"))
        axis.set_title(link, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds a step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=9, ncols=2)
    figure.suptitle(f"8 samples for each device. {device}", fontsize=10)
    return write(figure, "link-scale")


def _draw_range(
    axis: Any, rows: dict[str, dict[str, str]], place: int, label: str, marker: str, colour: str, dash: str
) -> None:
    """Draw a line through the medians of the rounds, with a bar to the fastest, which other work disturbs least."""
    x = [i + 0.03 * (place - 3.5) for i in range(len(LINKS))]
    low, middle = ([float(rows[link][name]) / 1e3 for link in LINKS] for name in ("fastest_ms", "step_ms"))
    below = [m - a for a, m in zip(low, middle, strict=True)]
    axis.plot(x, middle, dash, marker=marker, color=colour, label=label, markersize=6)
    axis.errorbar(x, middle, yerr=(below, [0] * len(x)), fmt="none", color=colour, alpha=0.5, capsize=2)


if __name__ == "__main__":
    start()
    (cpu, found), *_ = by_cpu("link-runs", 1).items()
    print(draw_losses(cpu, by_cpu("link-curves", 1)[cpu]))
    print(draw_steps(cpu, found))
    print(draw_scale(cpu, found, by_cpu("link-scale", 1)[cpu]))

"""Draw long tables as dots: ``python -m benchmarks.figures.rows`` writes docs/_static/benchmarks/rows-*.svg.

A figure has a line for each row of a table and a dot for each of its columns; a bar from the least to the largest where
the table has both. The vertical line is the reference, most often 1: as fast as what is compared with.
"""

__all__ = ["FIGURES", "Rows", "draw"]

import csv
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures.layout import WIDTH, by_cpu, start, write
from benchmarks.harness import RESULTS
from benchmarks.layers.quantized import PAGE_BATCHES, PAGE_FORMS, PAGE_LAYERS
from panther.errors import require_extra

Records = list[dict[str, str]]
Lines = dict[str, dict[str, float | tuple[float, float]]]
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
_MARKERS = "osD^vX"


@dataclass(frozen=True)
class Rows:
    """A figure: for each row its label and the values of its series, numbers or pairs of the least and the largest."""

    label: str
    rows: Lines
    reference: float | None = 1.0
    log: bool = True


def read(subject: str, threads: int = 1) -> Records:
    """Return the rows of the CPU that measured last."""
    found = by_cpu(subject, threads)
    return max(found.values(), key=lambda rows: rows[0]["date"])


def select(records: Records, **wanted: str) -> Records:
    """Return the records that have these values."""
    return [record for record in records if all(record[key] == value for key, value in wanted.items())]


def number(records: Records, column: str, **wanted: str) -> float:
    """Return the column of the only record that has these values."""
    (record,) = select(records, **wanted)
    return float(record[column])


def unique(records: Records, *columns: str) -> list[tuple[str, ...]]:
    """Return the combinations of values in their order."""
    return list(dict.fromkeys(tuple(record[column] for column in columns) for record in records))


def sklinear() -> Rows:
    """Return SKLinear beside nn.Linear."""
    sizes = {("8192", "16"), ("4096", "128"), ("1024", "128")}
    records = [record for record in read("sklinear") if (record["width"], record["R"]) in sizes]
    series = {
        "forward": ("SKLinear", "forward"),
        "forward, fused": ("SKLinear, fused", "forward"),
        "forward and backward": ("SKLinear", "forward+backward"),
    }
    rows: Lines = {}
    for width, R, dtype, batch in unique(records, "width", "R", "dtype", "batch"):
        if batch in ("1", "32", "512"):
            case = select(records, width=width, R=R, dtype=dtype, batch=batch, memory="default")
            rows[f"{width}, R = {R}, {dtype}, batch {batch}"] = {
                name: number(case, "x nn.Linear", layer=layer, mode=mode) for name, (layer, mode) in series.items()
            }
    return Rows("times as fast as nn.Linear", rows)


def conv() -> Rows:
    """Return SKConv2d beside nn.Conv2d."""
    records = read("conv")
    rows: Lines = {}
    shape = ("in", "out", "kernel", "groups", "stride", "size", "batch", "low_rank")
    for values in unique(records, *shape):
        case = select(records, **dict(zip(shape, values, strict=True)))
        inputs, outputs, kernel, groups, _, size, batch, rank = values
        grouped = f", groups {groups}" if groups != "1" else ""
        label = f"{inputs} to {outputs}, {kernel} x {kernel}{grouped}; {batch} x {size}, K = {rank.split()[0]}"
        rows[label] = {
            name: number(case, "x Conv2d", layer="SKConv2d NCHW", mode=mode)
            for name, mode in (("forward", "forward"), ("forward and backward", "forward+backward"))
        }
    return Rows("times as fast as nn.Conv2d (NCHW)", rows)


def quantized() -> Rows:
    """Return QuantizedLinear beside nn.Linear, the forms and layers of the page's table."""
    records = select(read("quantized"), memory="default")
    rows: Lines = {}
    for columns, outputs, dtype in PAGE_LAYERS:
        layer = select(records, **{"in": str(columns), "out": str(outputs)}, dtype=dtype)
        for form, name in PAGE_FORMS.items():
            found = {r["batch"]: float(r["x nn.Linear"]) for r in select(layer, form=form)}
            if found:
                line: dict[str, float | tuple[float, float]] = {
                    f"{batch} row{'s' if batch > 1 else ''}": found[str(batch)] for batch in PAGE_BATCHES
                }
                rows[f"{columns} to {outputs}, {dtype}: {name}"] = line
    return Rows("times as fast as nn.Linear of the same dtype", rows)


def svd_shapes() -> Rows:
    """Return randomized_svd beside svd_lowrank over shapes, least and largest of the spectra."""
    records = read("randomized-svd-shapes")
    rows: Lines = {}
    for m, n, k in unique(records, "m", "n", "k"):
        values = {
            dtype: [float(r["x svd_lowrank niter=2"]) for r in select(records, m=m, n=n, k=k, dtype=dtype)]
            for dtype in ("float32", "float64")
        }
        rows[f"{m} x {n}, k = {k}"] = {dtype: (min(found), max(found)) for dtype, found in values.items()}
    return Rows("times as fast as svd_lowrank(q=k + 10, niter=2), over five spectra", rows)


def environment() -> Rows:
    """Return the settings of the allocator: times beside the default."""
    records = read("environment")
    cases = {
        "SKLinear 8192, batch 512": "forward+backward, width 8192, batch 512, SKLinear",
        "nn.Linear 8192, batch 1": "forward+backward, width 8192, batch 1, nn.Linear",
        "transformer, SKLinear": "training step, transformer, SKLinear",
    }
    rows: Lines = {}
    for (setting,) in unique(records, "setting"):
        rows[setting] = {name: number(records, "x default", case=case, setting=setting) for name, case in cases.items()}
    return Rows("times as fast as with glibc's defaults, forward and backward", rows)


def overhead() -> Rows:
    """Return distributed steps beside those written by hand: CPU time in percent."""
    rows: Lines = {}
    for record in read("distributed-overhead"):
        if record["cpu_quartiles"] != "1.000 to 1.000":
            rows[f"{record['case']}: {record['step']}"] = {
                "CPU time": 100 * float(record["cpu_ratio"]) - 100,
                "wall time": 100 * float(record["wall_ratio"]) - 100,
            }
    return Rows("percent above the step by hand", rows, reference=0.0, log=False)


def trainer() -> Rows:
    """Return steps of the Trainer beside a loop by hand."""
    records = read("train-overhead")
    rows: Lines = {}
    for case, processes, logging in unique(records, "case", "processes", "logging"):
        named = f"{case}, {processes} process{'es' if processes != '1' else ''}, records: {logging}"
        found = select(records, case=case, processes=processes, logging=logging)
        rows[named] = {
            by: 100 * number(found, "cpu_ratio", **{"steps by": by}) - 100 for by in ("the same again", "Trainer")
        }
    return Rows("CPU time, percent above the loop by hand", rows, reference=0.0, log=False)


def trainer_messages() -> Rows:
    """Return what the message of the Trainer adds to a step, waited for at once or a step later."""
    records = read("train-messages")
    rows: Lines = {}
    for sent, case in unique(records, "sent alone with", "case"):
        found = select(records, case=case, **{"sent alone with": sent})
        rows[f"{sent}, {case}"] = {
            f"waited for {way}": 100 * number(found, "cpu_ratio", message=way) - 100
            for way in ("at once", "a step later")
        }
    return Rows("CPU time, percent above steps without the message", rows, reference=0.0, log=False)


def linearize() -> Rows:
    """Return windowed linear attention beside softmax attention."""
    rows: Lines = {}
    for record in read("linearize-speed"):
        kind = "" if record["causal"] == "True" else ", not causal"
        rows[f"{int(record['length']):,} positions{kind}"] = {
            f"window {name.split('/')[0]}, {name.split('/')[1]} features": float(record[f"x {name}"])
            for name in ("32/32", "64/64", "128/64")
        }
    return Rows("times as fast as scaled_dot_product_attention", rows)


def advisor() -> Rows:
    """Return the peak memory that was predicted beside the one measured."""
    rows: Lines = {}
    for record in read("advisor"):
        line = rows.setdefault(f"{record['processes']} processes, {record['layout']}", {})
        line[record["model"].split(",")[0]] = float(record["memory_ratio"])
    return Rows("predicted over measured peak memory", rows, log=False)


def survival() -> Rows:
    """Return the seconds from a restart to the next step, by the moment of the kill."""
    records = [record for record in read("survival") if record["first_step_s"]]
    rows: Lines = {}
    for (moment,) in sorted(unique(records, "moment")):
        seconds = sorted(float(r["first_step_s"]) for r in records if r["moment"] == moment)
        rows[f"killed {moment}"] = {"least to largest": (seconds[0], seconds[-1])}
    return Rows("seconds from starting again to the next step", rows, reference=None, log=False)


def encoder_speed() -> Rows:
    """Return the forms of the sentence encoder beside float32."""
    rows: Lines = {}
    for cpu, records in by_cpu("frontier-speed-encoder", 1).items():
        for record in records:
            if record["form"] != "float32":
                line = rows.setdefault(f"{record['form']} ({cpu.split('(')[0]})", {})
                line[f"{record['batch']} x {record['tokens']}"] = float(record["x float32"])
    return Rows("times as fast as float32, by batch x tokens", rows)


def kernel_registers() -> Rows:
    """Return the registers a thread of every kernel, by chip."""
    with (RESULTS / "kernel_resources_summary.csv").open() as file:
        records = list(csv.DictReader(file))
    rows: Lines = {}
    for record in records:
        rows.setdefault(record["kernel"], {})[record["chip"]] = float(record["registers"])
    return Rows("registers a thread, the most of all configurations", rows, reference=None, log=False)


FIGURES: dict[str, Callable[[], Rows]] = {
    "sklinear": sklinear,
    "conv": conv,
    "quantized": quantized,
    "svd-shapes": svd_shapes,
    "environment": environment,
    "overhead": overhead,
    "trainer": trainer,
    "trainer-messages": trainer_messages,
    "linearize": linearize,
    "advisor": advisor,
    "survival": survival,
    "encoder-speed": encoder_speed,
    "kernel-registers": kernel_registers,
}


def draw(name: str, rows: Rows) -> Path:
    """Write a figure and return its file."""
    pyplot = require_extra("matplotlib.pyplot", "bench")
    figure, axis = pyplot.subplots(figsize=(WIDTH, 1.4 + 0.27 * len(rows.rows)), layout="constrained")
    series = list(dict.fromkeys(name for line in rows.rows.values() for name in line))
    for at, (column, marker, colour) in enumerate(zip(series, _MARKERS, _COLOURS, strict=False)):
        offset = 0.14 * (at - (len(series) - 1) / 2)
        shown = False
        for y, line in enumerate(rows.rows.values()):
            if column not in line:
                continue
            value = line[column]
            ends = value if isinstance(value, tuple) else (value, value)
            label = None if shown else column
            axis.plot(ends, (y + offset, y + offset), f"-{marker}", color=colour, markersize=5, label=label)
            shown = True
    axis.set_yticks(range(len(rows.rows)), list(rows.rows), fontsize=9)
    axis.set_ylim(len(rows.rows) - 0.4, -0.6)
    if rows.reference is not None:
        axis.axvline(rows.reference, color="black", linewidth=1)
    if rows.log:
        axis.set_xscale("log")
        ticker = require_extra("matplotlib.ticker", "bench")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_xlabel(rows.label)
    axis.grid(alpha=0.3)
    if len(series) > 1:
        figure.legend(loc="outside lower center", ncols=min(len(series), 4), frameon=False, fontsize=9)
    return write(figure, f"rows-{name}")


def main(names: Iterable[str]) -> None:
    """Draw the figures of these names, all if there are none."""
    start()
    for name in names or FIGURES:
        print(draw(name, FIGURES[name]()))


if __name__ == "__main__":
    main(sys.argv[1:])

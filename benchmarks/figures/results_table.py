"""Write the table of results: ``python -m benchmarks.figures.results_table``, after any benchmark of a line.

It goes to docs/benchmarks/results.inc, with which the pages on benchmarks open: our figure beside that of the best
other way to do the same, what both keep, and the page with the rest. Lines where we lose stay.
"""

__all__ = ["LINES", "Line", "results_table"]

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks" / "results.inc"
HEAD = ("", "Times better", "Ours", "Best other", "Quality of both")
_AMD = "-cpu-amd-epyc-threads-1"
_XEON = "-cpu-intel-xeon-2.50ghz-threads-1"
Row = dict[str, str]


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        subject: What is measured, and the unit.
        page: The page with the rest.
        files: The names of the results of ours and of the other.
        column: The column of the figure, which is better if it is less.
        ours: Our row, by columns and their values.
        other: The other row, likewise.
        other_name: The name of the other way.
        quality: What both keep: a column and its name; None if the figure is all.
        ratio: The column of our row with the median ratio of times that were measured in turns; None is the quotient.
        scale: What the figure is divided by.
        where: Columns and values that both rows have.
        other_column: The column of the other figure, if it is not ``column``.
        other_quality: The column of what the other keeps, if it is not the column of ``quality``.
        counts: Whether the figures are counts, for which a missing row is 0.
    """

    subject: str
    page: str
    files: tuple[str, str]
    column: str
    ours: Row
    other: Row
    other_name: str
    quality: tuple[str, str] | None = None
    ratio: str | None = None
    scale: float = 1.0
    where: Row = field(default_factory=dict)
    other_column: str | None = None
    other_quality: str | None = None
    counts: bool = False

    def cells(self) -> list[str]:
        """Return the cells of the line."""
        rows = [
            _rows(name, wanted | self.where, needed=not self.counts)
            for name, wanted in zip(self.files, (self.ours, self.other), strict=True)
        ]
        columns = self.column, self.other_column or self.column
        figures = [_mean(each, column) / self.scale for each, column in zip(rows, columns, strict=True)]
        ratio = ""
        if self.ratio is not None:
            ratio = f"{_mean(rows[0], self.ratio):.2g}"
        elif figures[0]:
            ratio = f"{figures[1] / figures[0]:.2g}"
        quality = ""
        if self.quality is not None:
            column, name = self.quality
            kept = (column, self.other_quality or column)
            quality = f"{name} " + ", ".join(_text(_mean(each, key)) for each, key in zip(rows, kept, strict=True))
        return [
            f":doc:`{self.subject} <{self.page}>`",
            ratio,
            _text(figures[0]),
            f"{_text(figures[1])} ({self.other_name})",
            quality,
        ]


def _text(number: float) -> str:
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.1e}" if number and abs(number) < 1e-3 else f"{number:.4g}"


def _rows(name: str, wanted: Row, *, needed: bool = True) -> list[Row]:
    with open(RESULTS / f"{name}.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]
    if not rows and needed:
        raise LookupError(f"{name}.csv has no row with {wanted}")
    return rows


def _mean(rows: Sequence[Row], column: str) -> float:
    return sum(float(row[column]) for row in rows) / len(rows) if rows else 0.0


def _same(name: str) -> tuple[str, str]:
    return name, name


LINES = (
    Line(
        "File of a sentence encoder, MB",
        "compress",
        (f"files-encoder{_XEON}", f"files-peers-encoder{_AMD}"),
        "file_mb",
        {"method": "panther, 4.5 bits"},
        {"method": "GPTQ+embeddings, 5 bits"},
        "GPTQ of all layers",
        ("correlation", "correlation"),
    ),
    Line(
        "File of SmolLM2-135M, MB",
        "compress",
        _same(f"files-smollm2{_XEON}"),
        "file_mb",
        {"method": "panther, 8.3 bits"},
        {"method": "bfloat16"},
        "bfloat16",
        ("loss", "loss"),
    ),
    Line(
        "Retrieval, 99 % of the metric kept, MB",
        "tune",
        _same(f"tune-retrieval{_AMD}"),
        "size_mb",
        {"method": "tuned"},
        {"method": "random"},
        "random search",
        ("test", "rank on other data"),
    ),
    Line(
        "Forward of the encoder, 32 x 128 tokens, ms",
        "compress",
        _same(f"frontier-speed-encoder{_AMD}"),
        "time_ms",
        {"form": "panther, by time, 1.5 times as fast"},
        {"form": "int8, torch dynamic"},
        "torch's dynamic int8",
        where={"batch": "32", "tokens": "128"},
    ),
    Line(
        "4096 x 4096 in int8, 128 rows, ms",
        "quantized",
        _same(f"quantized{_AMD}"),
        "time_us",
        {"form": "int8, rounded"},
        {"form": "torch dynamic int8"},
        "torch's dynamic int8",
        ("heavy_error", "error"),
        scale=1e3,
        where={"in": "4096", "out": "4096", "batch": "128", "dtype": "float32", "memory": "default"},
    ),
    Line(
        "Prefill of SmolLM2-135M, 4,096 tokens, s",
        "linearize",
        _same(f"linearize-smollm2{_AMD}"),
        "linear_s",
        {"window": "128"},
        {"window": "128"},
        "softmax attention",
        ("loss", "loss"),
        ratio="x original",
        where={"length": "4096"},
        other_column="original_s",
        other_quality="loss_original",
    ),
    Line(
        "SmolLM2-135M at 4,096 tokens with 256 exact positions, loss",
        "linearize",
        (f"linearize-smollm2{_AMD}", f"linearize-sliding{_AMD}"),
        "loss",
        {"window": "128"},
        {"window": "256"},
        "a sliding window",
        where={"length": "4096"},
    ),
    Line(
        "SKLinear, 4096 x 4096, R = 128, batch 512, forward and backward, ms",
        "sklinear",
        _same(f"sklinear-pair{_AMD}"),
        "time_us",
        {"layer": "SKLinear"},
        {"layer": "pair of nn.Linear"},
        "a pair of nn.Linear",
        ("resident_bytes", "bytes in memory"),
        ratio="x pair of nn.Linear",
        scale=1e3,
        where={"width": "4096", "batch": "512", "dtype": "float32", "mode": "forward+backward"},
    ),
    Line(
        "States of the optimizer, characters, MB",
        "small-states",
        _same(f"optimizers-characters-96{_AMD}"),
        "state_mb",
        {"method": "channel, a quarter", "equal": "time"},
        {"method": "AdamW", "equal": "steps", "lr": "0.0015"},
        "AdamW",
        ("loss", "loss"),
    ),
    Line(
        "Bytes of Muon's messages, 1024 x 256, 4 ranks, MB",
        "/howto/muon",
        _same(f"distributed-muon{_AMD}"),
        "bytes",
        {"optimizer": "MuonAdamW"},
        {"optimizer": "gathering"},
        "gathering",
        scale=1e6,
        where={"ranks": "4", "shape": "1024 x 256"},
    ),
    Line(
        "Bytes of a sharded pair of layers, 4096 x 4096, R = 64, 256 rows, kB",
        "communication",
        _same(f"distributed-bytes{_AMD}"),
        "bytes",
        {"layer": "SKLinear"},
        {"layer": "pair of nn.Linear"},
        "pairs of nn.Linear",
        scale=1e3,
        where={"case": "tensor parallel, a pair of layers", "stage": "forward"},
    ),
    Line(
        "A step of data parallelism on two processes, CPU ms",
        "distributed-overhead",
        _same(f"distributed-overhead{_AMD}"),
        "cpu_ms",
        {"step": "data_parallel"},
        {"step": "DistributedDataParallel, sketches not sent"},
        "DistributedDataParallel",
        where={"case": "ddp"},
    ),
    Line(
        "A step in the advised layout, 100 Mbit/s, ms",
        "advisor",
        _same(f"advisor-link{_AMD}"),
        "step_ms",
        {"layout": "pp=2 gpipe m=4"},
        {"layout": "dp=2 ddp"},
        "DistributedDataParallel",
        where={"link": "100 Mbit/s", "model": "dense"},
    ),
    Line(
        "A step of 1 ms on two processes, CPU ms",
        "trainer",
        _same(f"train-overhead{_AMD}"),
        "cpu_ms",
        {"steps by": "Trainer"},
        {"steps by": "loop by hand"},
        "a loop by hand",
        where={"case": "1 ms", "processes": "2", "logging": "none"},
    ),
    Line(
        "Damaged files that load wrong, of 1,000",
        "survival",
        (f"file-survival{_XEON}", f"file-survival-plain{_AMD}"),
        "number",
        {"trial": "damaged inference folder"},
        {"trial": "damaged file of safetensors"},
        "safetensors",
        where={"outcome": "loaded wrong"},
        counts=True,
    ),
    Line(
        "A step on two nodes over 100 Mbit/s, ms",
        "slow-link",
        _same(f"link-runs{_AMD}"),
        "step_ms",
        {"run": "sketched, ddp, bf16 hook"},
        {"run": "dense, ddp, PowerSGD"},
        "PowerSGD",
        ("loss", "loss"),
        where={"link": "100 Mbit/s"},
    ),
    Line(
        "Text, a network of equal bytes and steps, dense signs, Muon, loss",
        "train-scratch",
        _same(f"scratch-text-transformer{_AMD}"),
        "loss",
        {"form": "sketched", "lr": "0.002"},
        {"form": "dense, narrower", "lr": "0.004"},
        "a narrower dense network",
        where={"optimizer": "Muon", "equal": "steps"},
    ),
    *(
        Line(
            f"Characters, a quarter of the numbers, AdamW, equal {equal}, loss",
            "train-scratch",
            _same(f"layers-characters-192{_AMD}"),
            "loss",
            {"method": ours, "lr": lr},
            {"method": theirs, "lr": "0.0015"},
            name,
            where={"equal": equal},
        )
        for equal, ours, lr, theirs, name in (
            ("steps", "Monarch, a quarter", "0.006", "pair, a quarter", "a pair of nn.Linear"),
            ("time", "sparse, a quarter", "0.003", "narrower, a quarter", "a narrower dense network"),
        )
    ),
    Line(
        "Text on two processes, 500 steps, loss",
        "train-text",
        _same(f"train-text-runs{_AMD}"),
        "validation_loss",
        {"run": "sketched, killed twice"},
        {"run": "dense, narrower"},
        "a narrower dense network",
        ("bytes_rank_0", "bytes a step"),
    ),
    Line(
        "Peak memory of training at a loss of 2.32 after equal time, MB",
        "sketched-activations",
        _same(f"activations-characters-96-speed{_AMD}"),
        "peak_mb",
        {"method": "rows by norm, a quarter"},
        {"method": "checkpointing, 1 of 2 blocks"},
        "checkpointing",
    ),
    Line(
        "SKConv2d, 64 to 128 channels, 3 x 3, ms",
        "convolutions",
        _same(f"conv{_AMD}"),
        "time_us",
        {"layer": "SKConv2d NCHW"},
        {"layer": "Conv2d NCHW"},
        "nn.Conv2d",
        ratio="x Conv2d",
        scale=1e3,
        where={"in": "64", "out": "128", "kernel": "3", "size": "64", "low_rank": "8", "mode": "forward"},
    ),
    Line(
        "The same beside two plain layers, ms",
        "convolutions",
        _same(f"conv-pair{_AMD}"),
        "time_us",
        {"layer": "SKConv2d"},
        {"layer": "pair of nn.Conv2d"},
        "a pair of nn.Conv2d",
        ("trained_numbers", "numbers"),
        ratio="x pair of nn.Conv2d",
        scale=1e3,
        where={"in": "64", "out": "128", "kernel": "3", "size": "64", "low_rank": "8", "mode": "forward"},
    ),
    Line(
        "Attention over 4,096 positions, ms",
        "attention",
        _same(f"attention{_AMD}"),
        "time_ms",
        {"attention": "hermite"},
        {"attention": "with SDPA"},
        "softmax attention",
        ratio="x better of both",
        where={"length": "4096", "causal": "False", "memory": "default"},
    ),
    Line(
        "Sparse sketch of 65536 x 512 to 1024 rows, ms",
        "sketches",
        _same(f"sketch-simple{_AMD}"),
        "time_ms",
        {"sketch": "SJLT, vec_nnz 4"},
        {"sketch": "scikit-learn, SparseRandomProjection"},
        "scikit-learn",
        ("distortion_coherent", "distortion"),
        where={"m": "65536", "n": "512", "d": "1024", "dtype": "float32"},
    ),
    Line(
        "SVD of rank 100, 4096 x 2048, ms",
        "linalg",
        _same(f"randomized-svd{_AMD}"),
        "time_ms",
        {"method": "panther n_iter=auto"},
        {"method": "svd_lowrank niter=2"},
        "torch.svd_lowrank",
        ("spectral", "error"),
        ratio="x svd_lowrank niter=2",
        where={"spectrum": "i^-0.3"},
    ),
    Line(
        "PCA of a stream, 854 x 640, k = 40, ms",
        "linalg-drivers",
        _same(f"linalg-drivers{_AMD}"),
        "time_ms",
        {"method": "StreamingSVD, 2k rows kept"},
        {"method": "IncrementalPCA, batches of 2k"},
        "scikit-learn",
        ("error", "excess error"),
    ),
    Line(
        "Pivoted QR, 16384 x 512, ms",
        "linalg",
        _same("cqrrpt-cpu-amd-epyc-threads-2"),
        "time_ms",
        {"method": "panther gamma=1.25"},
        {"method": "scipy pivoted"},
        "scipy",
        ("residual", "residual"),
        ratio="x scipy pivoted",
        where={"m": "16384", "n": "512", "dtype": "float64", "condition": "1e10"},
    ),
    Line(
        "Least squares, 200000 x 1000, ms",
        "linalg",
        _same("lstsq-cpu-amd-epyc-threads-2"),
        "time_ms",
        {"method": "panther"},
        {"method": "torch gels"},
        "torch's gels",
        ("distance", "error"),
        ratio="x torch gels",
        where={"case": "200000 x 1000 float64, condition 1e+08"},
    ),
    Line(
        "Least squares, 16384 x 512, condition 1e2, ms",
        "linalg",
        _same(f"lstsq-simple{_AMD}"),
        "time_ms",
        {"method": "panther"},
        {"method": "normal equations"},
        "the normal equations",
        ("distance", "error"),
        ratio="x normal equations",
        where={"case": "16384 x 512 float64, condition 1e+02"},
    ),
)


def results_table() -> str:
    """Return the table."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([HEAD, *(line.cells() for line in LINES)])
    lines = [
        ".. Written by python -m benchmarks.figures.results_table.",
        "",
        ".. csv-table::",
        "   :header-rows: 1",
        "   :widths: 36 10 10 24 20",
        "   :class: lookup",
        "",
    ]
    return "\n".join([*lines, *(f"   {line}" for line in table.getvalue().splitlines())]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(results_table(), encoding="utf-8")
    print(PAGE)

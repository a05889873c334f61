"""Write the tables of the guide's page on compression: ``python benchmarks/table_frontier.py``, after the trials.

They are CSV files in docs/_static/benchmarks, which the page includes: rows by method, times of whole models, and what
was reached of aims that were set before. Figures of several CPUs: those of the first by name.
"""

__all__ = ["write_aims", "write_quality", "write_speed"]

import csv
from pathlib import Path

from figures import OUTPUT, by_cpu
from harness import RESULTS

Rows = list[dict[str, str]]
AIMS = (  # row, column, least, what it is called
    ("panther, 6 bits", 0.9985, "6 bits a weight"),
    ("panther, 4.75 bits", 0.995, "4.75 bits a weight"),
    ("panther, 4.25 bits", 0.990, "4.25 bits a weight"),
    ("panther, 3.75 bits", 0.977, "3.75 bits a weight"),
    ("panther, 3.25 bits", 0.957, "3.25 bits a weight"),
    ("panther + healing, 3.25 bits", 0.985, "3.25 bits a weight, healed"),
    ("low rank, 75% of the numbers", 0.975, "low rank, 75 % of the numbers"),
    ("low rank, 50% of the numbers", 0.93, "low rank, 50 %"),
    ("low rank + healing, 50% of the numbers", 0.975, "low rank, 50 %, healed"),
    ("low rank + healing, 25% of the numbers", 0.90, "low rank, 25 %, healed"),
)
FASTER = (  # form, beside which, least ratio at batch 32, what it is called
    ("low rank, 50% of the numbers", "float32", 1.5, "low rank, 50 %, times as fast as float32 at batch 32"),
    (
        "low rank, int8, 4.25 bits",
        "int8, torch dynamic",
        1.0,
        "low rank in int8, times as fast as torch's dynamic int8",
    ),
)


def write_quality(model: str, rows: Rows) -> Path:
    """Write what each row of a model keeps, and what compressing took."""
    kinds = [name for name in ("correlation", "agreement", "loss") if name in rows[0]]
    titles = {"correlation": "Correlation", "agreement": "Same class", "loss": "Loss"}
    head = ["Method", "Asked for", "Bits a weight", *(titles[kind] for kind in kinds), "CPU s", "Stated MB", "Peak MB"]
    body = [
        [row["method"], row["size"], f"{float(row['bits']):.2f}", *(f"{float(row[kind]):.4f}" for kind in kinds)]
        + [_short(row[column]) for column in ("cpu_s", "stated_mb", "peak_mb")]
        for row in rows
    ]
    return _write(f"frontier-{model}", head, body)


def write_speed(model: str, rows: Rows) -> Path:
    """Write the latency of each form of a model relative to float32, by size of the input, and its memory."""
    sizes = list(dict.fromkeys((row["batch"], row["tokens"]) for row in rows))
    head = ["Form", "Stored MB", "Memory MB", *(f"{batch} x {tokens}" for batch, tokens in sizes)]
    body = []
    for form in dict.fromkeys(row["form"] for row in rows):
        own = {(row["batch"], row["tokens"]): row for row in rows if row["form"] == form}
        times = [
            f"{_short(row['time_ms'])} ms" if form == "float32" else row["x float32"] for row in (own[s] for s in sizes)
        ]
        body.append([form, _short(own[sizes[-1]]["stored_mb"]), _short(own[sizes[-1]]["memory_mb"]), *times])
    return _write(f"frontier-speed-{model}", head, body)


def write_aims(rows: Rows, speeds: Rows) -> Path:
    """Write which aims were reached by the first encoder."""
    found = {f"{row['method']}, {row['size']}": row for row in rows}
    body = []
    for name, least, title in AIMS:
        reached = found[name]["correlation"] if name in found else ""
        body.append([title, f"{least:g}", reached and f"{float(reached):.4f}", _verdict(reached, least)])
    times = {(row["form"], row["batch"], row["tokens"]): float(row["time_ms"]) for row in speeds}
    for form, beside, least, title in FASTER:
        for tokens in sorted({int(row["tokens"]) for row in speeds if row["batch"] == "32"}):
            at = ("32", str(tokens))
            ratio = f"{times[beside, *at] / times[form, *at]:.2f}" if (form, *at) in times else ""
            body.append([f"{title}, {tokens} tokens", f"{least:g}", ratio, _verdict(ratio, least)])
    return _write("frontier-aims", ["all-MiniLM-L6-v2", "Aim", "Measured", "Reached"], body)


def _verdict(measured: str, least: float) -> str:
    return "" if not measured else "yes" if float(measured) >= least else "no"


def _short(value: str) -> str:
    return "" if not value else f"{float(value):.3g}" if float(value) < 1000 else f"{float(value):,.0f}"


def _write(name: str, head: list[str], body: list[list[str]]) -> Path:
    path = OUTPUT / f"{name}.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *body])
    return path


if __name__ == "__main__":
    names = sorted({path.name.partition("-cpu-")[0] for path in RESULTS.glob("frontier-*-cpu-*.csv")})
    tables = {name.removeprefix("frontier-"): next(iter(by_cpu(name, 1).values())) for name in names}
    for name, found in tables.items():
        model = name.removeprefix("speed-")
        print(write_quality(model, found) if model == name else write_speed(model, found))
    if "encoder" in tables:
        print(write_aims(tables["encoder"], tables.get("speed-encoder", [])))

"""Results of the GPU suite: rows appended to a CSV as they come, and the Markdown page made of them."""

__all__ = ["AIMS", "Aim", "Recorder", "markdown", "read_rows"]

import csv
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

COLUMNS = (
    "section", "case", "dtype", "precision", "direction", "mode", "alternative", "status", "time_us", "x_baseline",
    "baseline", "roofline_us", "of_roofline", "max_rel_error", "note",
)  # fmt: skip
STAMP = ("card", "driver", "torch", "triton", "python", "date", "commit")
_TABLES = {
    "host": "Time on the host",
    "sklinear": "SKLinear",
    "quantized": "Products with quantized weights",
    "hadamard": "Walsh-Hadamard transform",
    "sparse": "Sparse sketches",
    "attention": "Causal linear attention",
    "windowed": "Windowed linear attention",
}


@dataclass(frozen=True)
class Aim:
    """A figure to reach, in bfloat16."""

    section: str
    case: str
    alternative: str
    mode: str
    direction: str
    column: str
    least: float


# Under a CUDA graph: the roofline knows nothing of the host, which takes longer to launch than these shapes to compute.
AIMS = (
    *(
        Aim("sklinear", f"{shape} batch {batch}", "SKLinear", "graph", "forward", "of_roofline", 0.8)
        for shape in ("8192x8192 R 16", "4096x4096 R 128")
        for batch in (512, 8192)
    ),
    Aim("sklinear", "8192x8192 R 16 batch 1", "SKLinear", "graph", "forward", "x_baseline", 5),
    *(
        Aim("attention", "length 16384 features 64 head dim 64", "panther", "eager", direction, "x_baseline", 3)
        for direction in ("forward", "forward+backward")
    ),
    Aim("sklinear", "8192x8192 R 16 batch 64", "SKLinear, packed", "graph", "forward", "x_baseline", 4),
    *(
        Aim("windowed", f"length 8192 features 64, {way}", "panther", "eager", "forward", "x_baseline", 2)
        for way in ("causal", "both ways")
    ),
)


def stamp(device: str, commit: str) -> dict[str, str]:
    """Say what the figures were measured on, and by what."""
    name, driver = platform.processor() or platform.machine(), ""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
        except (OSError, subprocess.SubprocessError):
            driver = "unknown"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return dict(
        zip(STAMP, (name, driver, torch.__version__, triton, platform.python_version(), date, commit), strict=True)
    )


class Recorder:
    """Appends rows to ``path``, each in the file before the next is measured, with the stamp of this run."""

    def __init__(self, path: Path, stamped: Mapping[str, str]) -> None:
        self.path, self.stamped = path, dict(stamped)
        if not path.exists():
            with open(path, "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(COLUMNS + STAMP)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row; columns it lacks stay empty."""
        full = {**dict.fromkeys(COLUMNS, ""), **row, **self.stamped}
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS + STAMP, lineterminator="\n").writerow(full)
        shown = (full[name] for name in COLUMNS if full[name] != "")
        print("  ".join(map(str, shown)), flush=True)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows recorded so far."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def verdict(aim: Aim, rows: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Return the figure and whether it is enough."""
    for row in rows:
        if row["dtype"] == "bfloat16" and all(
            row[name] == getattr(aim, name) for name in ("section", "case", "alternative", "mode", "direction")
        ):
            if row["status"] != "measured" or not row[aim.column]:
                return "", f"not measured: {row['note']}"
            return row[aim.column], "reached" if float(row[aim.column]) >= aim.least else "missed"
    return "", "not measured"


def markdown(rows: Sequence[Mapping[str, str]], stamped: Mapping[str, str], rehearsal: bool) -> str:
    """Write the page: what it ran on, the aims, the tests, the card's ceilings, a table a section."""
    lines = ["# GPU results", ""]
    if rehearsal:
        lines += ["**A rehearsal on the CPU at tiny sizes. No figure here says anything about a GPU.**", ""]
    lines += [", ".join(f"{name} {value}" for name, value in stamped.items() if value), ""]
    aims: list[Mapping[str, Any]] = []
    for aim in AIMS:
        figure, outcome = verdict(aim, rows)
        kind = "of the roofline" if aim.column == "of_roofline" else "times the baseline"
        aims.append(
            {
                "case": aim.case,
                "what": f"{aim.alternative}, {aim.direction}, {aim.mode}, bfloat16",
                "aim": f"{aim.least} {kind}",
                "measured": figure,
                "": outcome,
            }
        )
    lines += ["## Aims", "", *_table(aims)]
    for section in ("tests", "roofline"):
        found = [{"what": row["case"], "result": row["note"]} for row in rows if row["section"] == section]
        lines += [f"## {section.capitalize()}", "", *(_table(found) if found else ["Not run.", ""])]
    for section, title in _TABLES.items():
        taken = [row for row in rows if row["section"] == section]
        lines += [f"## {title}", ""]
        if not taken:
            lines += ["Not run.", ""]
            continue
        keep = [
            name for name in COLUMNS[1:] if name not in ("baseline", "note") and any(row.get(name) for row in taken)
        ]
        measured = [{name: row[name] for name in keep} for row in taken if row["status"] == "measured"]
        lines += _table(measured) if measured else []
        rest = [row for row in taken if row["status"] != "measured"]
        lines += [
            "- "
            + ", ".join(row[name] for name in ("case", "dtype", "direction", "mode", "alternative") if row[name])
            + f": {row['status']}, {row['note']}"
            for row in rest
        ]
        lines += [""] if rest else []
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    names = list(rows[0])
    return [line(names), "|" + "---|" * len(names), *(line(list(row.values())) for row in rows), ""]

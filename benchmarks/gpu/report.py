"""Results of the GPU suite: rows appended to a CSV as they come, and the pages made of them."""

__all__ = [
    "AIMS",
    "TIME_IS_UP",
    "Aim",
    "Recorder",
    "continue_table",
    "document",
    "markdown",
    "read_rows",
    "rest",
    "stamp",
]

import csv
import hashlib
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.predictions import contradictions
from benchmarks.harness import ROOT

COLUMNS = (
    "section", "case", "dtype", "precision", "direction", "mode", "alternative", "status", "time_us", "x_baseline",
    "baseline", "roofline_us", "of_roofline", "max_rel_error", "note",
)  # fmt: skip
STAMP = ("card", "driver", "torch", "triton", "python", "date", "commit")
TIME_IS_UP = "the time for this section is up"
"""The note of cases that a later call measures."""
_TABLES = {
    "sklinear": "SKLinear",
    "quantized": "Products with quantized weights",
    "hadamard": "Walsh-Hadamard transform",
    "sparse": "Sparse sketches",
    "attention": "Causal linear attention",
    "host": "Time on the host",
}
# A block of a page: a heading with its level, a paragraph or list, or the rows of a table.
Block = tuple[str, int] | str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Aim:
    """A figure to reach, in bfloat16."""

    section: str
    case: str
    alternative: str
    mode: str
    direction: str
    column: str
    minimum: float


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
        print("  ".join(str(full[name]) for name in COLUMNS if full[name] != ""), flush=True)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows recorded so far."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def continue_table(path: Path, stamped: Mapping[str, str], unfinished: Sequence[Mapping[str, str]]) -> bool:
    """Prepare the table of an earlier call to be continued, and return whether it can be.

    Rows of the same card, versions and commit stay, except for what the time did not suffice for and for the cases in
    which that call was ended. Another table is renamed.

    Args:
        path: The table.
        stamped: The stamp of this call; its date may differ.
        unfinished: Columns of the cases in which the earlier call was ended.
    """
    rows = read_rows(path)
    if not rows:
        path.unlink(missing_ok=True)
        return False
    same = set(rows[0]) == set(COLUMNS + STAMP) and all(
        row[name] == stamped[name] for row in rows for name in STAMP if name != "date"
    )
    if not same:
        number = 1
        while (earlier := path.with_name(f"{path.stem}-earlier-{number}.csv")).exists():
            number += 1
        path.rename(earlier)
        print(f"the earlier table is of another card, version or commit: it is now {earlier}", flush=True)
        return False
    done = [row for row in rows if not _is_to_be_repeated(row, unfinished)]
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS + STAMP, lineterminator="\n")
        writer.writeheader()
        writer.writerows(done)
    temporary.replace(path)
    print(f"continuing {path}: {len(done)} rows are there, {len(rows) - len(done)} are measured again", flush=True)
    return True


def _is_to_be_repeated(row: Mapping[str, str], unfinished: Sequence[Mapping[str, str]]) -> bool:
    if row["note"] == TIME_IS_UP or row["status"] == "out of time" or row["case"] == "section":
        return True
    return any(all(row[name] == value for name, value in case.items()) for case in unfinished)


def sources_digest() -> str:
    """Return a digest of the sources that are measured, for checkouts without history or with changes."""
    digest = hashlib.sha256()
    for folder in ("panther", "kernels", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def verdict(aim: Aim, rows: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Return the figure and whether it is enough."""
    for row in rows:
        if row["dtype"] == "bfloat16" and all(
            row[name] == getattr(aim, name) for name in ("section", "case", "alternative", "mode", "direction")
        ):
            if row["status"] != "measured" or not row[aim.column]:
                return "", f"not measured: {row['note']}"
            return row[aim.column], "reached" if float(row[aim.column]) >= aim.minimum else "missed"
    return "", "not measured"


def rest(rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """Return the number of cases, by section, that a further call will measure."""
    counts: dict[str, int] = {}
    for row in rows:
        if row["note"] == TIME_IS_UP or row["status"] == "out of time":
            counts[row["section"]] = counts.get(row["section"], 0) + 1
    return counts


def markdown(rows: Sequence[Mapping[str, str]], stamped: Mapping[str, str], rehearsal: bool) -> str:
    """Write the summary for a terminal, in Markdown."""
    lines: list[str] = []
    for block in _blocks(rows, stamped, rehearsal):
        if isinstance(block, tuple):
            lines += ["#" * block[1] + " " + block[0], ""]
        elif isinstance(block, str):
            lines += [block, ""]
        else:
            lines += _table(block)
    return "\n".join(lines)


def document(rows: Sequence[Mapping[str, str]], stamped: Mapping[str, str], rehearsal: bool) -> str:
    """Write the page for the documentation, in reStructuredText."""
    lines: list[str] = []
    for block in _blocks(rows, stamped, rehearsal):
        if isinstance(block, tuple):
            lines += [block[0], "=-"[block[1] - 1] * len(block[0]), ""]
        elif isinstance(block, str):
            lines += [block if block.startswith("**") else _escaped(block), ""]
        else:
            lines += [".. list-table::", "   :header-rows: 1", ""]
            for cells in (list(block[0]), *(list(row.values()) for row in block)):
                marks = ["   * - ", *["     - "] * (len(cells) - 1)]
                lines += [f"{mark}{_escaped(cell)}".rstrip() for mark, cell in zip(marks, cells, strict=True)]
            lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _escaped(cell: Any) -> str:
    """Return text in which reStructuredText finds no markup."""
    return re.sub(r"([\\*`|]|_(?!\w))", r"\\\1", str(cell))


def _blocks(rows: Sequence[Mapping[str, str]], stamped: Mapping[str, str], rehearsal: bool) -> list[Block]:
    """Return the page: what it ran on, the aims, the predictions, correctness, the ceilings, a table a section."""
    blocks: list[Block] = [("GPU results", 1)]
    if rehearsal:
        blocks += ["**A rehearsal on the CPU at tiny sizes. No figure here says anything about a GPU.**"]
    blocks += [", ".join(f"{name} {value}" for name, value in stamped.items() if value)]
    if left := rest(rows):
        counts = ", ".join(f"{section} {count}" for section, count in left.items())
        blocks += [f"The time did not suffice for these cases, which a further call measures: {counts}."]
    blocks += [("Aims", 2), _aims(rows)]
    sentences = list(contradictions(rows, triton=not rehearsal))
    blocks += [("Predictions", 2), "\n".join(f"- {sentence}" for sentence in sentences) or "No row contradicts one."]
    for section in ("correctness", "tests", "roofline"):
        taken = [row for row in rows if row["section"] == section]
        results = [{"what": _words(row), "result": f"{row['status']}, {row['note']}"} for row in taken]
        blocks += [(section.capitalize(), 2), results or "Not run."]
    for section, title in _TABLES.items():
        taken = [row for row in rows if row["section"] == section]
        blocks += [(title, 2)]
        if not taken:
            blocks += ["Not run."]
            continue
        names = [
            name for name in COLUMNS[1:] if name not in ("baseline", "note") and any(row.get(name) for row in taken)
        ]
        if measured := [{name: row[name] for name in names} for row in taken if row["status"] == "measured"]:
            blocks += [measured]
        if skipped := [row for row in taken if row["status"] != "measured"]:
            blocks += ["\n".join(f"- {_words(row)}: {row['status']}, {row['note']}" for row in skipped)]
    return blocks


def _words(row: Mapping[str, str]) -> str:
    return ", ".join(row[name] for name in ("case", "dtype", "direction", "mode", "alternative") if row[name])


def _aims(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, Any]]:
    aims: list[Mapping[str, Any]] = []
    for aim in AIMS:
        figure, outcome = verdict(aim, rows)
        kind = "of the roofline" if aim.column == "of_roofline" else "times the baseline"
        aims.append(
            {
                "case": aim.case,
                "what": f"{aim.alternative}, {aim.direction}, {aim.mode}, bfloat16",
                "aim": f"{aim.minimum} {kind}",
                "measured": figure,
                "verdict": outcome,
            }
        )
    return aims


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    names = list(rows[0])
    return [line(names), "|" + "---|" * len(names), *(line(list(row.values())) for row in rows), ""]

"""Write the table of folders: ``python -m benchmarks.figures.folder_table``, after trial_folder.

It goes to docs/benchmarks/folder.inc: time, memory and disk of compressing models part by part, and predictions.
"""

__all__ = ["folder_table"]

import csv
import io

from benchmarks.figures.frontier_table import cpu_name, short
from benchmarks.figures.layout import merged
from benchmarks.harness import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "folder.inc"
COLUMNS = {
    "model": "Weights", "method": "", "cpu_s": "CPU s", "peak_mb": "Peak MB", "disk_gb": "Disk GB",
    "forward": "Forward", "moments": "Moments", "fits": "Fits", "choice": "Choice", "tokens": "Tokens",
}  # fmt: skip
TEXTS = ("model", "method", "tokens")


def folder_table(rows: list[dict[str, str]]) -> str:
    """Return the rows as a table."""
    body = [[row[name] if name in TEXTS else short(row[name]) for name in COLUMNS] for row in rows]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([[*COLUMNS.values()], *body])
    cpus = " and ".join(dict.fromkeys(cpu_name(row["device"]) for row in rows))
    title = f".. csv-table:: Models compressed part by part, {cpus}, one thread"
    lines = [title, "   :header-rows: 1", "   :class: compact", ""]
    return "\n".join([*lines, *(f"   {line}" for line in table.getvalue().splitlines())]) + "\n"


if __name__ == "__main__":
    table = folder_table(merged("folder", 1, ("model", "method"))[1])
    PAGE.write_text(f".. Written by python -m benchmarks.figures.folder_table.\n\n{table}", encoding="utf-8")
    print(PAGE)

"""Write the tables of whole files: ``python -m benchmarks.figures.files_table``, after trial_files.

They go to docs/benchmarks/files.inc, which the page on compression includes: what each file keeps, and what compressing
took, a table for each model. Aims that were set for the first encoder are beside its rows.
"""

__all__ = ["files_table"]

import csv
import io

from benchmarks.figures.frontier_table import cpu_name, short
from benchmarks.figures.layout import merged
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "benchmarks" / "files.inc"
TITLES = {
    "encoder": "all-MiniLM-L6-v2",
    "encoder-3": "paraphrase-MiniLM-L3-v2",
    "smollm2": "SmolLM2-135M, whose weights come rounded to 4 bits",
    "images": "EfficientNet-lite0",
}
QUALITIES = {
    "correlation": "Correlation",
    "unseen": "Unseen tokens",
    "agreement": "Same class",
    "loss": "Loss, nats a token",
}
AIMS = {  # least correlations of the first encoder
    "panther, 8.3 bits": "0.9999",
    "panther, 6.7 bits": "0.9996",
    "panther, 5.6 bits": "0.9990",
    "panther, 4.5 bits": "0.996",
    "panther, 3.7 bits": "0.985",
}


def files_table(model: str, rows: list[dict[str, str]]) -> str:
    """Return what the files of a model keep, from the largest file to the smallest."""
    kinds = [name for name in QUALITIES if name in rows[0]]
    costs = {"cpu_s": "CPU s", "peak_mb": "Peak MB"}
    head = ["", "File MB", *(QUALITIES[kind] for kind in kinds), *costs.values()]
    body = []
    for row in sorted(rows, key=lambda row: -float(row["file_mb"])):
        values = [f"{float(row[kind]):.5f}" for kind in kinds]
        body.append([row["method"], short(row["file_mb"]), *values, *(short(row[column]) for column in costs)])
    if model == "encoder":
        head.insert(3, "Aim")
        for line in body:
            line.insert(3, AIMS.get(line[0], ""))
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([head, *body])
    cpus = " and ".join(dict.fromkeys(cpu_name(row["device"]) for row in rows))
    lines = [f".. csv-table:: {TITLES[model]}, {cpus}", "   :header-rows: 1", ""]
    return "\n".join([*lines, *(f"   {line}" for line in table.getvalue().splitlines())]) + "\n\n"


if __name__ == "__main__":
    parts = [".. Written by python -m benchmarks.figures.files_table.\n\n"]
    parts += [
        files_table(model, merged(f"files-{model}", 1, ("method",))[1])
        for model in TITLES
        if any(RESULTS.glob(f"files-{model}-cpu-*.csv"))
    ]
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(PAGE)

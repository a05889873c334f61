"""Write the table of ONNX files: ``python -m benchmarks.figures.onnx_table``, after trial_onnx.

It goes to docs/benchmarks/onnx.inc: size, quality and time in onnxruntime, beside onnxruntime's own quantizers.
"""

__all__ = ["onnx_table"]

import csv
import io

from benchmarks.figures.frontier_table import cpu_name, short
from benchmarks.figures.layout import merged
from benchmarks.harness import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "onnx.inc"
COLUMNS = {
    "method": "File", "file_mb": "MB", "correlation": "Correlation", "error": "Error", "ms_1x32": "ms, 1 x 32",
    "ms_32x32": "ms, 32 x 32", "ms_1x128": "ms, 1 x 128", "ms_32x128": "ms, 32 x 128",
}  # fmt: skip
TEXTS = ("method", "correlation", "error")


def onnx_table(rows: list[dict[str, str]]) -> str:
    """Return the rows as a table."""
    body = [[row[name] if name in TEXTS else short(row[name]) for name in COLUMNS] for row in rows]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([[*COLUMNS.values()], *body])
    cpus = " and ".join(dict.fromkeys(cpu_name(row["device"]) for row in rows))
    lines = [f".. csv-table:: ONNX files of all-MiniLM-L6-v2, {cpus}, one thread", "   :header-rows: 1", ""]
    return "\n".join([*lines, *(f"   {line}" for line in table.getvalue().splitlines())]) + "\n"


if __name__ == "__main__":
    table = onnx_table(merged("onnx", 1, ("model", "method"))[1])
    PAGE.write_text(f".. Written by python -m benchmarks.figures.onnx_table.\n\n{table}", encoding="utf-8")
    print(PAGE)

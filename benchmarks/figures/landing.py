"""Draw the first page's figure: ``python -m benchmarks.figures.landing`` writes docs/_static/benchmarks/landing-*.svg.

*landing-quality*: how much of a sentence encoder is kept, against the megabytes of its file. One file a panel, so that
a narrow screen shows them one below the other at full size.
"""

__all__ = ["draw_quality"]

from pathlib import Path

from benchmarks.figures.frontier import draw_correlation
from benchmarks.figures.layout import merged, start, write
from panther.errors import require_extra

# By the first word of a row's method: the label, and the marker, colour and line, as in frontier.py.
STYLES = {
    "panther": ("pr.compress", "o", "#D55E00", "-"),
    "GPTQ+embeddings": ('pr.compress, method="activation" (GPTQ)', "s", "#0072B2", "-"),
    "bfloat16": ("bfloat16", "D", "#000000", " "),
    "MatMulNBits": ("onnxruntime, 4 bits", "P", "#E69F00", " "),
    "quantize_dynamic": ("onnxruntime, 8 bits", "*", "#E69F00", " "),
    "GPTQ": ("GPTQ, embeddings in bfloat16", "s", "#56B4E9", "--"),
    "hqq": ("hqq, likewise", "^", "#009E73", "-"),
    "torchao": ("torchao int8, likewise", "X", "#CC79A7", " "),
    "quanto": ("quanto, likewise", "v", "#666666", "-"),
}
SIZE = (4.3, 6.0)  # inches: as wide as a phone


def draw_quality() -> Path:
    """Draw the pairs that are ranked differently against megabytes of the file."""
    rows = [
        row | {"method": row["method"].replace(",", " ").split()[0]}
        for subject in ("files-encoder", "files-peers-encoder", "onnx")
        for row in merged(subject, 1, ("method",))[1]
    ]
    pyplot = require_extra("matplotlib.pyplot", "bench")
    figure, axis = pyplot.subplots(figsize=SIZE, layout="constrained")
    draw_correlation(axis, rows, STYLES, ("file_mb", "", (8, 48)), 0.9)
    axis.set_title("all-MiniLM-L6-v2, without training", fontsize=11)
    axis.set(xlabel="megabytes of the file (float32: 90.9)", ylabel="pairs ranked differently than by the original")
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", frameon=False, fontsize=9)
    return write(figure, "landing-quality")


if __name__ == "__main__":
    start()
    print(draw_quality())

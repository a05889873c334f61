"""Draw the first page's figure: ``python -m benchmarks.figures.landing`` writes docs/_static/benchmarks/landing-*.svg.

*landing-quality*: how much of a sentence encoder is kept, against its bits a weight. One file a panel, so that a narrow
screen shows them one below the other at full size.
"""

__all__ = ["draw_quality"]

from pathlib import Path

from benchmarks.figures.frontier import BITS, QUANTIZED, draw_correlation
from benchmarks.figures.layout import merged, start, write
from panther.errors import require_extra

SHOWN = ("panther", "GPTQ", "nearest", "SVD, int8")
SIZE = (4.3, 4.4)  # inches: as wide as a phone


def draw_quality() -> Path:
    """Draw correlation against bits a weight for the methods above."""
    _, rows = merged("frontier-encoder", 1, ("method", "size"))
    pyplot = require_extra("matplotlib.pyplot", "bench")
    figure, axis = pyplot.subplots(figsize=SIZE, layout="constrained")
    draw_correlation(axis, rows, {method: QUANTIZED[method] for method in SHOWN}, BITS, 0.75)
    axis.set_title("all-MiniLM-L6-v2, without training", fontsize=11)
    axis.set(xlabel="bits a weight (dense: 32)", ylabel="correlation with the original model")
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", frameon=False, fontsize=9)
    return write(figure, "landing-quality")


if __name__ == "__main__":
    start()
    print(draw_quality())

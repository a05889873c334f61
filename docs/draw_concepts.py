"""Draw the pictures of the concepts: ``python docs/draw_concepts.py`` writes docs/_static/concepts/*.svg."""

__all__ = ["FIGURES"]

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

from panther.sketch import signs

OUTPUT = Path(__file__).parent / "_static" / "concepts"
TRAINED, PLUS, MINUS = "#2f6f9f", "#d9480f", "#f7c9a9"
DATA, PALE, INK = "#2f7d4f", "#eef1f4", "#222832"


def picture(width: int, height: int, shapes: Iterable[str]) -> str:
    """Return an SVG file of this size in pixels with a white ground, so that it can be read on dark pages too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Verdana, sans-serif" font-size="14">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, fill: str, label: str = "", ink: str = "white") -> str:
    """Return a rectangle with a label in its middle."""
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 5, label, fill=ink) if label else "")


def text(x: float, y: float, label: str, *, anchor: str = "middle", size: int = 14, fill: str = INK) -> str:
    """Return words at a place."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(label)}</text>'


def cells(x: float, y: float, rows: int, columns: int, size: int, stream: int) -> str:
    """Return random signs as a grid of cells, those that Panther draws from seed 0."""
    drawn = signs(0, stream, range(rows), range(columns))
    return "".join(
        f'<rect x="{x + size * column}" y="{y + size * row}" width="{size - 1}" height="{size - 1}" '
        f'fill="{PLUS if drawn[row, column] > 0 else MINUS}"/>'
        for row in range(rows)
        for column in range(columns)
    )


def sketching() -> str:
    """Return S A, a sketch of a tall matrix."""
    return picture(
        560,
        240,
        [
            cells(20, 70, 4, 20, 10, 0),
            text(120, 60, "S"),
            text(120, 130, "d x m, signs"),
            box(250, 20, 60, 200, DATA, "A"),
            text(320, 125, "m x n", anchor="start"),
            text(410, 95, "=", size=22),
            box(450, 70, 60, 40, DATA, "S A"),
            text(480, 130, "d x n"),
        ],
    )


def layer() -> str:
    """Return the weight of a sketched layer as a sum of two products."""
    return picture(
        620,
        210,
        [
            box(20, 40, 120, 120, PALE, "W", INK),
            text(80, 180, "in x out"),
            text(160, 105, "=", size=22),
            box(185, 40, 24, 120, TRAINED, "S1"),
            cells(219, 40, 2, 12, 10, 0),
            text(279, 78, "U1"),
            text(197, 180, "in x R"),
            text(279, 98, "R x out"),
            text(370, 105, "+", size=22),
            cells(400, 40, 12, 2, 10, 1),
            text(410, 180, "U2"),
            box(434, 40, 120, 24, TRAINED, "S2"),
            text(494, 82, "R x out"),
            text(20, 20, "blue: trained, saved, sent", anchor="start"),
            text(330, 20, "orange: signs, drawn from the seed", anchor="start"),
        ],
    )


def parallelism() -> str:
    """Return what two ranks hold and compute in four layouts of four layers."""
    shapes = []
    layouts: list[tuple[str, str, Callable[[int, int], tuple[float, float]], tuple[str, str]]] = [
        ("data parallel", "all layers", lambda rank, row: (0, 1), ("samples 1, 2", "samples 3, 4")),
        ("sharded data parallel", "shards", lambda rank, row: (rank / 2, 0.5), ("samples 1, 2", "samples 3, 4")),
        ("tensor parallel", "half of each layer", lambda rank, row: (rank / 2, 0.5), ("all samples", "all samples")),
        (
            "pipeline parallel",
            "half of the layers",
            lambda rank, row: (0, 1 if row // 2 == rank else 0),
            ("microbatches", "microbatches"),
        ),
    ]
    for number, (name, parameters, part, samples) in enumerate(layouts):
        left, top = 20 + 320 * (number % 2), 20 + 230 * (number // 2)
        shapes += [
            text(left, top + 12, name, anchor="start", size=16),
            text(left + 280, top + 12, parameters, anchor="end"),
        ]
        for rank in range(2):
            x = left + 150 * rank
            shapes.append(text(x + 65, top + 40, f"rank {rank}"))
            for row in range(4):
                y = top + 50 + 30 * row
                begin, share = part(rank, row)
                shapes.append(box(x, y, 130, 24, PALE))
                if share:
                    shapes.append(box(x + 130 * begin, y, 130 * share, 24, TRAINED))
            shapes.append(text(x + 65, top + 190, samples[rank]))
    return picture(640, 460, shapes)


def ddp() -> str:
    """Return the phases of a step on two ranks over time."""
    shapes = [text(620, 24, "time", anchor="end"), text(20, 24, "a step", anchor="start")]
    for rank in range(2):
        y = 40 + 100 * rank
        shapes += [
            text(20, y + 25, f"rank {rank}", anchor="start"),
            box(80, y, 130, 40, DATA, "forward"),
            box(215, y, 200, 40, TRAINED, "backward"),
            box(500, y, 120, 40, "#6b4c9a", "optimizer"),
        ]
    shapes += [
        box(300, 86, 190, 48, PLUS, "all-reduce: mean"),
        text(300, 215, "samples differ; gradients and weights are equal"),
    ]
    return picture(640, 230, shapes)


FIGURES = {"sketching": sketching, "layer": layer, "parallelism": parallelism, "ddp": ddp}

if __name__ == "__main__":
    OUTPUT.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        path = OUTPUT / f"{name}.svg"
        path.write_text(figure())
        print(path)

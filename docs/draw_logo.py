"""Draw the logo: ``python docs/draw_logo.py`` writes docs/_static/logo-light.svg and logo-dark.svg.

A letter P as a sketched layer is stored: the stem is a trained factor, one block; the bowl is a random sketch, whose
cells are the signs that Panther draws from seed 0, filled for +1 and tinted for -1.
"""

__all__ = ["PALETTES", "draw"]

from pathlib import Path

from panther.sketch import signs

OUTPUT = Path(__file__).parent / "_static"
# Stem, cells of +1, cells of -1: on a light and on a dark page.
PALETTES = {"light": ("#0b3c5d", "#d9480f", "#f7c9a9"), "dark": ("#7cc4f0", "#ff922b", "#6b3a12")}
CELL, GAP = 16, 2
# Rows and columns of the bowl: a band above, one to the right, one below. The stem takes columns 0 and 1 of all rows.
BOWL = [
    (row, column)
    for row in range(6)
    for column in range(2, 8)
    if (row in (0, 1, 4, 5) or column in (6, 7)) and (row, column) not in ((0, 7), (5, 7))
]


def draw(theme: str) -> str:
    """Return the logo for a ``"light"`` or ``"dark"`` page as the text of an SVG file."""
    stem, plus, minus = PALETTES[theme]
    drawn = signs(0, 0, range(6), range(8))
    cells = "".join(
        f'<rect x="{column * CELL + GAP // 2}" y="{row * CELL + GAP // 2}" width="{CELL - GAP}" height="{CELL - GAP}" '
        f'rx="2" fill="{plus if drawn[row, column] > 0 else minus}"/>\n'
        for row, column in BOWL
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {8 * CELL} {10 * CELL}" role="img">\n'
        "<title>Panther</title>\n"
        f'<rect x="{GAP // 2}" y="{GAP // 2}" width="{2 * CELL - GAP}" height="{10 * CELL - GAP}" rx="4" '
        f'fill="{stem}"/>\n'
        f"{cells}</svg>\n"
    )


if __name__ == "__main__":
    for theme in PALETTES:
        path = OUTPUT / f"logo-{theme}.svg"
        path.write_text(draw(theme))
        print(path)

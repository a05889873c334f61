"""The table with which the pages on benchmarks open is that of the committed rows."""

import pytest

pytestmark = pytest.mark.tool


def test_the_table_is_that_of_the_rows():
    from benchmarks.figures.results_table import PAGE, results_table

    assert PAGE.read_text(encoding="utf-8") == results_table()


def test_lines_where_we_lose_stay():
    from benchmarks.figures.results_table import LINES

    ratios = [float(cells[1]) for line in LINES if (cells := line.cells())[1]]
    assert min(ratios) < 1 < max(ratios)


def test_every_page_has_a_line():
    from benchmarks.figures.results_table import LINES, PAGE

    # The speed of the kernels is not measured yet.
    pages = {path.stem for path in PAGE.parent.glob("*.rst")} - {"index", "kernels"}
    assert pages == {line.page for line in LINES if not line.page.startswith("/")}

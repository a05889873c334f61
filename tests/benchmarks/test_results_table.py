"""The table with which the pages on benchmarks open is that of the committed rows."""

import pytest

pytestmark = pytest.mark.tool


def test_the_table_is_that_of_the_rows():
    from benchmarks.figures.results_table import PAGE, results_table

    assert PAGE.read_text(encoding="utf-8") == results_table()


def test_lines_where_we_lose_stay():
    from benchmarks.figures.results_table import LINES

    ratios = [float(line.cells()[3]) for line in LINES]
    assert min(ratios) < 1 < max(ratios)

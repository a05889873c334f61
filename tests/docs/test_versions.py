"""The table of tested versions, which ``make test-versions`` writes and the installation page shows."""

import csv
import re
from pathlib import Path

import versions

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "start" / "installation.rst"


def test_the_installation_page_shows_the_table():
    (shown,) = re.findall(
        r"^\.\. csv-table::\n   :file: (\S+versions\.csv)\n   :header-rows: 1$", PAGE.read_text(), re.M
    )
    assert (PAGE.parent / shown).resolve() == versions.RESULTS


def test_the_table_has_a_line_for_each_environment():
    header, *rows = csv.reader(versions.RESULTS.read_text().splitlines())
    assert tuple(header) == versions.COLUMNS
    assert [row[0].partition(":")[0] for row in rows] == ["oldest", "newest"]
    assert all(len(row) == len(header) for row in rows)
    # The oldest versions of the table are those that pyproject.toml allows.
    oldest = re.search(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"torch {oldest}" in rows[0][0]

"""Every file and folder that CONTRIBUTING names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = ("docs/_build/", "docs/examples", ".venv")  # by commands
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w.-]+(?:/|\.(?:py|rst|md|toml|txt|cff|csv)))`")


def paths():
    """Paths of all files and folders, as they end: a page names `moments/` within a section about a package."""
    files = [*ROOT.glob("*.*")]
    for folder in ("panther", "kernels", "tests", "docs", "benchmarks"):
        files += [ROOT / folder, *(ROOT / folder).rglob("*")]
    return [f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in files]


def test_every_file_that_contributing_names_exists():
    named = NAMED.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 100
    existing = paths()
    unknown_paths = {
        name
        for name in named
        if not name.startswith(MADE) and not re.search(r"[A-Z]{4,}(/|\.py)", name)
        if not any(path.endswith(f"/{name}") for path in existing)
    }
    assert unknown_paths == set()

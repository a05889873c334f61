"""Results name the code that they were measured with, and pages name the commits of their results."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"^(?:# )?\.\. measured-at:: (.+)$", re.M)
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text(encoding="utf-8")
    for path in [
        *(ROOT / "docs/benchmarks").glob("*.rst"),
        *(ROOT / "docs/concepts").glob("*.rst"),
        *(ROOT / "docs/howto").glob("*.rst"),
        *(ROOT / "docs/gallery").rglob("*.py"),
    ]
}


def subjects_on(page):
    return {subject for line in DIRECTIVE.findall(PAGES[page]) for subject in line.split()}


def test_every_file_of_results_names_its_code():
    from benchmarks.figures import age

    subjects = {age.subject_of(path.name) for path in age.RESULTS.glob("*.csv")}
    assert subjects == set(age.SOURCES)
    unknown_paths = {path for paths in age.SOURCES.values() for path in paths if not (age.ROOT / path).exists()}
    assert unknown_paths == set()
    assert age.subject_of("files-peers-encoder-cpu.csv") == "files-peers"
    with pytest.raises(KeyError, match="has no entry"):
        age.subject_of("unheard-of-cpu.csv")


def test_every_page_of_measurements_names_their_commits():
    from benchmarks.figures import age

    pages = {page for page in PAGES if DIRECTIVE.search(PAGES[page])}
    assert {page for page in PAGES if page.startswith("benchmarks/")} - pages == {"benchmarks/index.rst"}
    assert {subject for page in pages for subject in subjects_on(page)} == set(age.SOURCES)
    for page, content in PAGES.items():
        for pattern in re.findall(r"benchmarks/results/([\w.*-]+\.csv)", content):
            assert {age.subject_of(path.name) for path in age.RESULTS.glob(pattern)} <= subjects_on(page), page

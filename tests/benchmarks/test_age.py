"""Results name the code that they were measured with, and pages name the commits of their results."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"^(?:# )?\.\. measured-at:: (.+)$", re.M)
PAGES = {
    path.relative_to(ROOT / "docs").as_posix(): path.read_text(encoding="utf-8")
    for path in [
        *(ROOT / "docs/benchmarks").glob("*.rst"),
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


@pytest.fixture
def measured_repository(tmp_path, monkeypatch):
    """A repository with one script and a function that changes files and commits; it returns the commit."""
    from benchmarks.figures import age

    monkeypatch.setattr(age, "ROOT", tmp_path)
    monkeypatch.setattr(age, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(age, "SOURCES", {"subject": ("script.py", "package")})
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]

    def commit(**texts):
        for name, content in texts.items():
            path = tmp_path / name.replace("__", "/").replace("_py", ".py").replace("_csv", ".csv")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "change"], check=True)
        age._history.cache_clear()
        age._differences.cache_clear()
        return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

    subprocess.run([*git, "init", "--quiet"], check=True)
    yield commit
    age._history.cache_clear()
    age._differences.cache_clear()


def test_docstrings_and_formatting_do_not_make_results_old(measured_repository):
    from benchmarks.figures import age

    script = 'def run():\n    """Run."""\n    return [1, 2]\n'
    commit = measured_repository(script_py=script, package__a_py="A = 1\n", package__README="text")
    measured_repository(results__subject_csv=f"ms,date,commit\n1,2026-01-01,{commit[:12]}\n")
    measured_repository(
        script_py='"""A script."""\n\n\ndef run():\n    return [\n        1,  # one\n        2,\n    ]\n'
    )
    measured_repository(package__b_py="B = 1\n", unrelated="x")
    assert [entry.changes for entry in age.measurements()] == [()]
    measured_repository(package__a_py="A = 2\n")
    assert [entry.changes for entry in age.measurements()] == [("package/a.py",)]
    measured_repository(package__README="another text")
    (entry,) = age.measurements()
    assert (entry.commit, entry.compared_from, entry.date) == (commit[:12], commit[:12], "2026-01-01")
    assert entry.changes == ("package/README", "package/a.py")


def test_rows_of_changed_files_count_from_the_commit_that_added_them(measured_repository):
    from benchmarks.figures import age

    first = measured_repository(script_py="A = 1\n")[:12]
    rows = f"ms,date,commit\n1,2026-01-01,{first}-dirty\n2,2026-01-01,0123456789ab\n3,,\n"
    added = measured_repository(script_py="A = 2\n", results__subject_csv=rows)
    entries = age.measurements()
    assert {added.startswith(entry.compared_from) for entry in entries} == {True}
    assert [entry.changes for entry in entries] == [(), (), ()]
    measured_repository(script_py="A = 3\n")
    assert [entry.changes for entry in age.measurements()] == [("script.py",)] * 3
